"""The presets of the group debug, on a linear model and on a net."""

import json

import pytest
import torch
from helpers.images import draw_folder
from helpers.nets import open_pair

from immunization import run
from immunization.runs.tracker import history
from immunization.training.assembly import Debug

pytestmark = pytest.mark.trains

ON = {
    "linear": ("evaluation=[rir]",),
    "net": (
        "dataset=digits_deep",
        "dataset.size=16",
        "dataset.primary=[0,1]",
        "dataset.harmful=[4,5]",
        "dataset.benign=null",
        "model=digits_net",
        "model.fit_epochs=1",
        "dtype=float32",
        "evaluation=[]",
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Where the net that all of them start from is kept."""
    return f"cache={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(params=ON)
def options(request, cache) -> list[str]:
    return [*ON[request.param], "figures=false", "log_every=1", cache]


def test_one_step(options, tmp_path):
    result = run(["debug=one_step", *options], folder=tmp_path / "run")
    assert result.status == "completed"
    assert history(tmp_path / "run")["loss"]["x"] == [1]


def test_a_few_rows_are_learned(options, tmp_path):
    result = run(["debug=overfit", "debug.steps=25", *options], folder=tmp_path / "run")
    loss = history(tmp_path / "run")["loss"]
    assert loss["x"] == list(range(1, 26))
    assert loss["y"][-1] < loss["y"][0]
    assert {task["train"] for task in result.about["rows"].values()} == {64} or "digits_deep" not in options[0]


def test_every_class_of_folders_has_an_image(tmp_path):
    folders = draw_folder(tmp_path / "p", 40, 3, 1, 0), draw_folder(tmp_path / "h", 3, 20, 1, 1)
    pair = Debug(rows=9).few(open_pair(folders, None, val_fraction=0.0))
    primary, harmful = (pair.tasks[role].splits["train"].labels for role in ("primary", "harmful"))
    assert torch.bincount(primary).tolist() == [1] * 40
    assert torch.bincount(harmful).tolist() == [3] * 3


def test_a_profile(options, tmp_path, capsys):
    run(["debug=profiler", "debug.steps=2", *options], folder=tmp_path / "run")
    assert "Self CPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
