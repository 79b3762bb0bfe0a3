"""What users get wrong: one line that says what to do. More stand in test_launch.py and test_configs.py."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.data_files import IMAGES, NPZ, image_pair
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import save_file

from immunization import Result
from immunization.__main__ import start
from immunization.results import run_figures
from immunization.runs.filenames import CHECKPOINT

pytestmark = [pytest.mark.slow, pytest.mark.trains]

QUICK = ("tracker=none", "evaluation=[rir]")


def a_file(tmp: Path) -> None:
    (tmp / "file").touch()


def weights(tmp: Path, kind: str) -> None:
    image_pair(tmp)
    if kind == "text":
        (tmp / "w.safetensors").write_text("no weights")
    elif kind == "other":
        save_file({"a": torch.zeros(2)}, tmp / "w.safetensors")
    elif kind == "directory":
        (tmp / "w.safetensors").mkdir()


OPTIONS = [
    ("method=magic", "Could not (find|load) 'method/magic'.*available for method: clamp, closed_form, "),
    ("dataset=magic", "Could not (find|load) 'dataset/magic'"),
    ("model=magic", "Could not (find|load) 'model/magic'"),
    ("optimizer=magic", "Could not (find|load) 'optimizer/magic'"),
    ("scheduler=magic", "Could not (find|load) 'scheduler/magic'"),
    ("tracker=magic", "Could not (find|load) 'tracker/magic'"),
    ("experiment=magic", "Could not (find|load) 'experiment/magic'"),
    ("evaluation=[magic]", "Could not (find|load) 'evaluation/magic'"),
    ("launcher=magic", "Could not (find|load) 'launcher/magic'"),
    ("seed", "seed|=(?s:.)*"),
    ("=1", "."),
    ("seed=[", "."),
    ("+method.nonsense=1", "does not take that key"),
    ("seed=x", "seed must be an integer"),
    ("seed=null", "seed must be an integer"),
    ("seed=true", "seed must be an integer"),
    ("seed=99999999999999999999999", "seed"),
    ("threads=many", "threads must be an integer of at least 1"),
    ("figures=perhaps", "figures must be true or false"),
    ("resume=perhaps", "resume must be true or false"),
    ("deterministic=perhaps", "deterministic must be true or false"),
    ("checkpoint.every=0", "checkpoint.every must be an integer of at least 1"),
    ("checkpoint.seconds=-1", "checkpoint.seconds must be a finite number above 0"),
    ("checkpoint.minutes=1", "no key checkpoint.minutes"),
    ("tags=one", "tags must be a list"),
    ("trusted=one", "trusted must be a list"),
    ("dataset.val_fraction=1", "dataset.val_fraction must be a number of at least 0 and below 1, not 1"),
    ("dataset.test_fraction=-0.1", "dataset.test_fraction must be a number of at least 0 and below 1, not -0.1"),
    ("model.init=magic", "model.init"),
    ("method.epochs=ten", "method.epochs must be an integer of at least 0, not 'ten'"),
    ("method.epochs=null", "method.epochs must be an integer of at least 0, not None"),
    ("method.lambda_P=nan", "method.lambda_P must be a finite number"),
    ("method.lambda_H=inf", "method.lambda_H must be a finite number"),
    ("method.batch_size=1", "method.batch_size must be an integer of at least 2, or null"),
    ("method.precondition=magic", "method.precondition"),
    ("method.patience=0", "method.patience"),
    ("optimizer.lr=0", "optimizer.lr must be a finite number above 0"),
    ("optimizer.betas=[2,2]", "optimizer: Invalid beta"),
    ("method.power=smooth", "method.power must be an even number from 2 to 64 .*, or inf, not 'smooth'"),
    ("scheduler.T_max=2", "no key scheduler.T_max; choose a scheduler first"),
    (
        "scheduler={_target_: torch.optim.lr_scheduler.CosineAnnealingLR, _partial_: true, T_max: 1}",
        "ends before the 2",
    ),
    (
        "scheduler={_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 3}",
        "does not fit into the 2",
    ),
    ("scheduler={_target_: torch.optim.SGD, _partial_: true, lr: 3}", "scheduler"),
    ("method._target_=os.system", "not from a trusted package"),
    ("method._target_=immunization.methods.Magic", "Magic"),
    ("model=resnet18", "needs? images|needs model=linear"),
    ("hydra.run.dir=/proc/run", "/proc/run"),
    ("hydra.run.dir={tmp}/file/run", "hydra.run.dir="),
    ("objective=magic", "objective=magic: no chosen evaluation or attack measures that"),
]
"""One override after the good ones, and what is said."""

DATA = [
    (None, NPZ, "pair.npz"),
    (lambda tmp: (tmp / "pair.npz").mkdir(), NPZ, "pair.npz"),
    (None, IMAGES, r"dataset\.primary_root: folder .*/p not found"),
    (image_pair, (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), r"model\.checkpoint: .* not found"),
    (lambda tmp: weights(tmp, "text"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "w.safetensors"),
    (lambda tmp: weights(tmp, "other"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "does not fit"),
    (lambda tmp: weights(tmp, "directory"), (*IMAGES, "model.checkpoint={tmp}/w.safetensors"), "w.safetensors"),
]
"""What lies in the folder, the overrides, and what is said."""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, count):
    """Runs the command line on overrides that cannot work, and returns the one line it says."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(run_figures, "draw", lambda result, folder: [])
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str) -> str:
        run_folder = tmp_path / "run"
        arguments = [*QUICK, f"hydra.run.dir={run_folder}", *(o.replace("{tmp}", str(tmp_path)) for o in overrides)]
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as end:
            start()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(end.value.code, str), captured.err
        said = end.value.code
        assert said.startswith("error: ")
        assert "Traceback" not in said
        if (run_folder / "result.json").exists() and "run itself is complete" not in said:
            result = Result.read(run_folder)
            assert result.status == "failed"
            assert result.error in said
        count["bad inputs"] += 1
        return said

    return call


@pytest.mark.parametrize(("override", "message"), OPTIONS, ids=[override for override, _ in OPTIONS])
def test_options(override, message, refused, tmp_path):
    a_file(tmp_path)
    own = ["scheduler=none"] if override.startswith(("scheduler.", "scheduler={")) else []  # not the data set's
    said = refused("dataset.max_samples=20", "method.epochs=2", *own, override)
    assert re.search(message, said), said
    assert "\n" not in said


@pytest.mark.parametrize(("prepare", "overrides", "message"), DATA, ids=range(len(DATA)))
def test_data(prepare, overrides, message, refused, tmp_path):
    if prepare is not None:
        prepare(tmp_path)
    said = refused(*overrides)
    assert re.search(message, said), said
    assert "\n" not in said


# --- Processes --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up(tmp_path, count):
    """A real one, of 16 to 160 KiB: whatever was written before is intact, and the run goes on where there is room."""
    import subprocess

    from helpers.runs import QUICK, outcome

    from immunization import run
    from immunization.errors import ConfigError

    disk = tmp_path / "disk"
    disk.mkdir()
    run([*QUICK, "method.epochs=9"], folder=tmp_path / "whole")
    for size in (16, 48, 96, 160):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=False)
        if mounted.returncode:
            pytest.skip("this container may not mount")
        try:
            with pytest.raises(ConfigError, match=r"No space left on device; make room there"):
                run([*QUICK, "method.epochs=9", "checkpoint.every=3"], folder=disk / "run")
            if (disk / "run" / CHECKPOINT).exists():
                shutil.copytree(disk / "run", tmp_path / f"moved{size}")
                run([*QUICK, "method.epochs=9", "resume=true"], folder=tmp_path / f"moved{size}")
                assert outcome(tmp_path / f"moved{size}") == outcome(tmp_path / "whole")
        finally:
            subprocess.run(["umount", disk], check=True)
        count["full disks"] += 1
