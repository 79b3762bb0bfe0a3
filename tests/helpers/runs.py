"""Short runs, and what must be the same in two of them."""

import hashlib
from pathlib import Path

import pytest

from immunization import Result, run
from immunization.runs.filenames import CHECKPOINT
from immunization.training import checkpoint

QUICK = ("tracker=none", "dataset.max_samples=40", "evaluation=[rir]", "log_every=1", "figures=false")
DEEP = ("experiment=digits_deep", "tracker=none", "figures=false", "evaluation=[rir]", "method.epochs=1")
DEEP += ("dataset.primary=[0,1]", "dataset.harmful=[4,5]", "dataset.benign=null", "dataset.size=16")


def outcome(folder: Path) -> tuple:
    """What must not depend on interruptions: weights and history byte for byte, and the result but for the clock."""
    content = Result.read(folder).as_dict()
    del content["seconds"]
    hashes = [
        hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("immunized.safetensors", "metrics.jsonl")
    ]
    return content, hashes


def kill_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let runs end at a step as a kill would end them, without a chance to write anything."""
    taken = checkpoint.Checkpointer.__call__

    def killed(self, now, state):
        taken(self, now, state)
        if now == step:
            raise KeyboardInterrupt

    patch.setattr(checkpoint.Checkpointer, "__call__", killed)


def resumed(overrides, tmp_path, monkeypatch, cut, at=5, every=3) -> tuple[tuple, tuple]:
    """Outcome of a run without interruption, and of one that was cut at step `at` and went on."""
    run(overrides, folder=tmp_path / "whole")
    whole = outcome(tmp_path / "whole")
    with monkeypatch.context():
        cut(at)
        with pytest.raises(KeyboardInterrupt):
            run([*overrides, f"checkpoint.every={every}"], folder=tmp_path / "cut")
    monkeypatch.undo()
    assert Result.read(tmp_path / "cut").error == "interrupted"
    run([*overrides, "resume=true"], folder=tmp_path / "cut")
    assert not (tmp_path / "cut" / CHECKPOINT).exists()
    return whole, outcome(tmp_path / "cut")
