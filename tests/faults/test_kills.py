"""Processes killed at random moments: whoever goes on ends with the very bits of a run that nobody touched.

The victims are forked from this process, which has paid the imports, so that a kill costs a fraction of a second.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  a signal amid an extension's start is an ImportError, and no Preempted
import torch
from helpers.processes import ended, in_a_child
from helpers.repository import ROOT
from helpers.runs import DEEP, QUICK, outcome
from hydra.core.global_hydra import GlobalHydra

from immunization import Result, run
from immunization.__main__ import start
from immunization.runs import files
from immunization.runs.filenames import CHECKPOINT, WEIGHTS
from immunization.runs.resume import read_config

pytestmark = [pytest.mark.slow, pytest.mark.trains]

LINEAR = [*QUICK, "method.epochs=60", "checkpoint.every=7"]
BATCHES = [*QUICK, "method.epochs=8", "method.batch_size=10", "model.init=random", "checkpoint.every=5"]
BATCHES += ["scheduler=warmup_cosine"]
NET = [*DEEP, "method=condition_number", "method.epochs=3", "method.batch_size=32", "checkpoint.every=2", "log_every=1"]


def sound(folder: Path) -> int:
    """Whether every file in a run folder is whole; the step of its checkpoint, -1 for none."""
    if (folder / "config.yaml").exists():
        read_config(folder)
    if (folder / WEIGHTS).exists():
        files.read_tensors(folder / WEIGHTS)
    if (folder / "result.json").exists() and Result.read(folder).status == "completed":
        assert (folder / WEIGHTS).exists()
    if not (folder / CHECKPOINT).exists():
        return -1
    return torch.load(folder / CHECKPOINT, weights_only=True)["state"]["progress"]["step"]


def torment(work: "Single | Multi", seconds: float, kills: int, rng: random.Random, number: int) -> int:
    """Start `work` and kill it at a random moment, until it has been killed `kills` times or came to its end.

    Returns how often it was killed. After each kill all files are whole, and no checkpoint has been lost.
    """
    reached: dict[Path, int] = {}
    struck = 0
    while struck < kills:
        child = in_a_child(work)
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, number)
        code = ended(child)
        if code == 0:
            return struck
        assert code in (-number, 128 + number)
        struck += 1
        for folder in work.folders():
            step = sound(folder)
            completed = (folder / "result.json").exists() and Result.read(folder).status == "completed"
            assert step >= reached.get(folder, -1) or completed
            reached[folder] = step
    assert ended(in_a_child(work)) == 0
    return struck


class Single:
    """A run in a folder, going on with what is there."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        self.overrides, self.folder = overrides, folder

    def __call__(self) -> None:
        run([*self.overrides, "resume=true"], folder=self.folder)

    def folders(self) -> list[Path]:
        return [self.folder] if self.folder.exists() else []


class Multi:
    """The command line's multirun in a folder."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        self.overrides, self.folder = overrides, folder

    def __call__(self) -> None:
        sys.argv = ["launch.py", "-m", *self.overrides, "resume=true", f"hydra.sweep.dir={self.folder}"]
        GlobalHydra.instance().clear()
        start()

    def folders(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if path.is_dir()]


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time that `work` takes in a process of its own: what a kill is drawn from."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended(in_a_child(work)) == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("overrides", "kills", "number"),
    [
        (LINEAR, 70, signal.SIGKILL),
        (LINEAR, 20, signal.SIGTERM),
        (BATCHES, 30, signal.SIGKILL),
        (NET, 35, signal.SIGKILL),
    ],
    ids=["linear", "linear, SIGTERM", "batches", "net"],
)
def test_single_runs(overrides, kills, number, tmp_path, count):
    rng, done, round_ = random.Random(0), 0, 0
    seconds = timed(Single(overrides, tmp_path / "whole"))
    whole = outcome(tmp_path / "whole")
    while done < kills:
        work = Single(overrides, tmp_path / str(round_))
        done += torment(work, seconds, kills - done, rng, number)
        assert outcome(work.folder) == whole
        assert not list(work.folder.glob(".*"))
        round_ += 1
    count["kills"] += done


def test_multiruns(tmp_path, count):
    jobs = [*QUICK, "method.epochs=30", "checkpoint.every=7", "seed=0,1", "method=condition_number,imma"]
    rng, done, round_ = random.Random(1), 0, 0
    seconds = timed(Multi(jobs, tmp_path / "whole"))
    whole = {path.name: outcome(path) for path in (tmp_path / "whole").iterdir() if path.is_dir()}
    assert len(whole) == 4
    while done < 40:
        work = Multi(jobs, tmp_path / str(round_))
        done += torment(work, seconds, 40 - done, rng, signal.SIGKILL)
        assert {path.name: outcome(path) for path in work.folder.iterdir() if path.is_dir()} == whole
        assert len((work.folder / "results.csv").read_text().splitlines()) == 5
        round_ += 1
    count["kills"] += done


def test_processes_from_the_command_line(tmp_path, count):
    """The same with nothing shared: a new interpreter, killed as early as in its imports."""
    rng, folder = random.Random(2), tmp_path / "run"
    arguments = [*LINEAR, "method.epochs=3000", "log_every=100", "checkpoint.every=50"]
    run(arguments, folder=tmp_path / "whole")
    command = [sys.executable, str(ROOT / "launch.py"), *arguments, "resume=true", f"hydra.run.dir={folder}"]
    done = 0
    while done < 5:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0, 12))
        process.kill()
        if process.wait() == 0:
            break
        done += 1
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert outcome(folder) == outcome(tmp_path / "whole")
    count["kills"] += done
