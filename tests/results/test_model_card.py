"""The model card: its figures are those of the result, at the steps it names."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from immunization.results import model_card
from immunization.runs.result import Result

FACTS = {"architecture": "resnet18", "weights": "made up", "dtype": "float32", "data_config": {"mean": [0.5]}}
ROWS = {role: {"train": 6, "val": 2, "test": 4} for role in ("primary", "harmful")}


@pytest.fixture
def result() -> Result:
    x = [1, 2, 4, 8, 16, 64, 128, 1024, 8192]
    return Result(
        seed=3,
        dataset="image_folders",
        model="resnet18",
        method="learning_curve",
        metrics={"rir": 29_700.0, "steps_ratio/benign": None},
        reasons={"steps_ratio/benign": "no third task", "a_flag": "why it is there"},
        curves={"probe/harmful": {"x": x, "y": [step / 10_000 for step in x]}},
        flags=["a_flag"],
        about={"data": {"primary": "p", "harmful": "h"}, "rows": ROWS, "classes": {"primary": 2, "harmful": 3}},
    )


def card(result: Result, folder: Path, **facts: str) -> str:
    config = OmegaConf.create({"method": {"_target_": "immunization.methods.LearningCurve", "epochs": 5}})
    return model_card.write(folder, result, config, FACTS | facts).read_text()


def test_accuracies_are_those_of_the_nearest_step(result, tmp_path):
    """Of 1, 10, 100 up to 10^6 steps; on this curve the accuracy is the step over 10^4."""
    nearest = [1, 8, 128, 1024, 8192, 8192, 8192]
    row = " | ".join(f"{step / 10_000:.3f}" for step in nearest)
    assert f"| harmful, after | {row} |" in card(result, tmp_path).splitlines()


def test_measures_that_do_not_exist_have_their_reason(result, tmp_path):
    lines = card(result, tmp_path).splitlines()
    assert "| RIR, training images | 29,700 |" in lines
    assert any(line.endswith("| none: no third task |") for line in lines)
    assert not any("held-out images" in line for line in lines)  # not measured at all
    assert "- `a_flag`: why it is there" in lines


def test_what_it_was_made_from(result, tmp_path):
    text = card(result, tmp_path)
    assert "- Harmful data: h, 3 classes; 6 training, 2 validation and 4 test images" in text
    assert 'Method: `learning_curve` with `{"epochs": 5}`, seed 3.' in text
    assert "License of its weights: not stated" in text
    assert "License of its weights: mit." in card(result, tmp_path, license="mit")
