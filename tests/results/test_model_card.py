"""The model card: its figures are those of the result, at the steps it names."""

import ast
from pathlib import Path

import pytest
import yaml
from helpers.made_runs import made_result, measure
from omegaconf import OmegaConf

from immunization.results import model_card
from immunization.runs.result import Result

FACTS = {"architecture": "resnet18", "weights": "made up", "dtype": "float32", "data_config": {"mean": [0.5]}}
ROWS = {role: {"train": 6, "val": 2, "test": 4} for role in ("primary", "harmful")}


@pytest.fixture
def result() -> Result:
    x = [1, 2, 4, 8, 16, 64, 128, 1024, 8192]
    return made_result(
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


def card(result: Result | None, folder: Path, **facts: str) -> str:
    config = OmegaConf.create({"_target_": "immunization.methods.LearningCurve", "epochs": 5})
    made = model_card.recipe("learning_curve", config, 3)
    return model_card.write(folder, FACTS | facts, made, result).read_text()


def test_accuracies_are_those_of_the_nearest_step(result, tmp_path):
    """Of 1, 10, 100 up to 10^6 steps; on this curve the accuracy is the step over 10^4."""
    nearest = [1, 8, 128, 1024, 8192, 8192, 8192]
    row = " | ".join(f"{step / 10_000:.3f}" for step in nearest)
    assert f"| harmful, after | {row} |" in card(result, tmp_path).splitlines()


def test_the_front_matter_is_what_the_hub_reads(result, tmp_path):
    for license, expected in (("mit", "mit"), ("dinov3", "other"), (None, "unknown")):
        head = yaml.safe_load(card(result, tmp_path, license=license).split("---")[1])
        assert head["license"] == expected
        assert head["library_name"] == "timm"
        assert {"immunization", "arxiv:2505.23760"} <= set(head["tags"])


def test_folders_and_data_of_others_are_not_named(result, tmp_path):
    result.about["data"] = {"primary": "/home/me/my data/birds", "harmful": "torch/cifar10 /data/cifar"}
    text = card(result, tmp_path)
    assert "- Primary data: birds, 2 classes" in text
    assert "- Harmful data: torch/cifar10 cifar, 3 classes" in text
    assert not any(word in text for word in ("/home", "/data", "ImageNet", "Stanford"))


def test_what_was_capped_says_so(result, tmp_path):
    result.flags.append("capped_harmful")
    measure(result, {"steps_ratio/harmful": 7280.0, "steps_ratio/primary": 1.0})
    text = card(result, tmp_path)
    assert "| > 7,280 (capped: not reached within" in text
    assert "at most 1) | 1 |" in text


def test_what_was_measured_begins_with_the_verdict(result, tmp_path):
    measure(result, {"definition/immunized": 0.0, "definition/a": 0.0, "definition/b": 1.0, "definition/c": 1.0})
    measured = card(result, tmp_path).partition("## Measured")[2].strip()
    assert measured.startswith(
        "**Definition 3.1, which does not depend on attackers, does not call it immunized: it fails in (a)"
    )
    measure(result, {"steps_ratio/harmful": 7280.0})
    measured = card(result, tmp_path).partition("## Measured")[2].strip().split("\n\n")
    assert measured[0].startswith(
        "**Gradient descent on a fresh probe takes 7,280 times the baseline's steps for the harm"
    )
    assert measured[1].startswith("Definition 3.1, which does not depend on attackers, does not call it immunized")


def test_what_makes_a_model_useless_comes_first(result, tmp_path):
    result.flags += ["harmful_faster", "head_at_chance"]
    result.reasons |= {"harmful_faster": "harm became easier", "head_at_chance": "its head is at 0.25"}
    lines = card(result, tmp_path).splitlines()
    title = lines.index("# resnet18, immunized by learning_curve")
    after = [line for line in lines[title + 1 :] if line]
    assert after[:2] == [f"**Do not use this model: {result.reasons[flag]}.**" for flag in result.flags[1:]]
    assert "- `harmful_faster`: harm became easier" in lines


def test_text_of_the_file_is_no_markup(result, tmp_path):
    """Of the weights' header and the measures of somebody else's run."""
    text = '<img src=x>`"); print(1) #\n\n# b'
    result.reasons["a_flag"], result.flags = text, ["a_flag", text]
    result.about["data"]["primary"] = text
    written = card(result, tmp_path, architecture=text, weights=text, license=text, dtype=text)
    assert "<img" not in written
    assert "\n# b" not in written
    (line,) = [line for line in written.splitlines() if line.startswith("model = timm.create_model(")]
    assert isinstance(ast.parse(line.partition(".eval()")[0]).body[0].value.args[0], ast.Constant)


def test_a_card_without_measures(tmp_path):
    text = card(None, tmp_path)
    assert "run `immunization.audit`" in text
    assert text.rstrip().endswith("```")


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
