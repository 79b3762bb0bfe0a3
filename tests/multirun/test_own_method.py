"""A multirun with a method of one's own, in folders that a second start finds again."""

import os
import re
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from immunization.__main__ import start
from immunization.checks import CONF
from immunization.config import compose, slug
from immunization.errors import ConfigError
from immunization.methods import Method
from immunization.runner import run
from immunization.runs.resume import BOOKKEEPING

QUICK = ("tracker=none", "dataset.max_samples=20", "evaluation=[]")
OWN = ("--config-dir", "conf", f"trusted=[{__name__}]")


class Mine(Method):
    """It counts how often it was run."""

    runs = 0

    def setup(self, model, pair):
        super().setup(model, pair)
        Mine.runs += 1


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch) -> Path:
    """The working folder of a user, with a method of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # a multirun sets it for its processes
    monkeypatch.setattr(Mine, "runs", 0)
    write("method/mine", f"_target_: {__name__}.Mine\nepochs: 0\n")
    return tmp_path


def write(name: str, text: str) -> None:
    path = Path("conf", f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def multirun(monkeypatch, *arguments: str, folder: str = "jobs") -> list[str]:
    """The names of the run folders once these jobs have run."""
    monkeypatch.setattr(sys, "argv", ["launch.py", "-m", *QUICK, f"hydra.sweep.dir={folder}", *arguments])
    GlobalHydra.instance().clear()
    start()
    return sorted(path.parent.name for path in Path(folder).glob("*/result.json"))


def test_a_row_of_ones_own_leaves_the_leaderboards_other_rows_as_they_are(user, monkeypatch, capsys):
    track = ("experiment=leaderboard/linear_digits", "attack=[]", "seed=0")
    (ours,) = multirun(monkeypatch, *track, "method=identity", "pair=0-1", folder="track")
    line = "track linear_digits: 0 of 1 jobs are complete, 1 to run: time unknown"
    assert capsys.readouterr().out.startswith(f"{line}\n")
    written = Path("track", ours, "result.json").stat().st_mtime_ns
    places = (f"hydra.searchpath=[file://{user}]", "log_every=3", "tags=[x]")
    found = multirun(monkeypatch, *track, *OWN, *places, "method=identity,mine", "pair=0-1,1-7", folder="track")
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch("track linear_digits: 1 of 4 jobs are complete, 3 to run: about .* h one after another", first)
    names = [
        ours.replace("identity", method).replace("0-1", pair)
        for method in ("identity", "mine")
        for pair in ("0-1", "1-7")
    ]
    assert [line.partition(":")[0] for line in lines[:4]] == sorted(found) == names
    assert Path("track", ours, "result.json").stat().st_mtime_ns == written


def test_a_completed_job_is_not_run_twice(user, monkeypatch, capsys):
    first = multirun(monkeypatch, *OWN, "method=mine,identity", "seed=0,1,0")
    assert Mine.runs == 2
    assert "2 of 6 jobs repeat another one and are left out" in capsys.readouterr().out
    again = multirun(monkeypatch, *OWN, "method=mine,identity", "seed=2,0,1", "resume=true")
    assert Mine.runs == 3
    assert len(again) == 6
    assert set(first) < set(again)
    assert "6 completed\n" in capsys.readouterr().out


def test_keys_that_decide_no_number_are_in_no_folder_name():
    lines = (CONF / "config.yaml").read_text().splitlines()
    (excluded,) = (
        line.partition("exclude_keys:")[2].strip(" []").split(", ") for line in lines if "exclude_keys" in line
    )
    assert {*BOOKKEEPING} - {"checkpoint"} <= {*excluded}
    tracker = {f"tracker.{key}" for key in compose(["tracker=wandb"]).tracker if key != "_target_"}
    assert tracker <= {*excluded}


def test_long_names_that_differ_at_their_end_stay_different():
    assert slug("x" * 200 + "1") != slug("x" * 200 + "2")
    assert len(slug("x" * 200)) == 150
    assert len(slug("画" * 200).encode()) <= 150


def test_a_file_without_its_package_is_refused(user):
    write("hparams/digits/mine", "method: {epochs: 7}\n")  # this one needs none
    write("experiment/mine", "method: {epochs: 8}\n")
    mine = [*QUICK, "method=mine", f"trusted=[{__name__}]", f"hydra.searchpath=[file://{user}/conf]"]
    assert compose(mine).method.epochs == 7
    config = compose([*mine, "experiment=mine"])
    with pytest.raises(
        ConfigError, match=r"experiment: a file of this group lacks the first line `# @package _global_`"
    ):
        run(config, user / "run")
