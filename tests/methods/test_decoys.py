"""The map in closed form that squeezes a harmful task's directions, and decoys."""

import pytest
import torch
from helpers.comparisons import eye
from helpers.matrices import gaussian, orthonormal
from safetensors.torch import load_file

from immunization import run
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods import Decoys
from immunization.models import Linear

SHORT = ("method=decoys", "tracker=none", "evaluation=[learning_curves,primary,leak]")
OPTIONS = {"dimensions": None, "ridge": "auto", "kept": "auto", "max_condition": "auto", "rotate": True}


def classes(seed: int, along: torch.Tensor) -> Task:
    """Two classes that differ along one direction; 200 rows on every split."""
    y = torch.arange(600) % 2
    x = gaussian(600, len(along), seed=seed) + 2 * (2.0 * y - 1)[:, None] * along
    return Task("two", *map(Split, x.split(200), y.split(200)), classes=2)


def test_harm_is_slowed_to_the_cap_and_the_primary_task_not_at_all(tmp_path):
    metrics = run(SHORT, folder=tmp_path).metrics
    assert metrics["steps_ratio/harmful"] > 1e4
    assert metrics["steps_ratio/primary"] <= 1
    assert metrics["primary/accuracy"] == metrics["primary/accuracy_baseline"]
    assert metrics["leak/auc"] > 0.9  # one direction, which anybody reads
    sigma = torch.linalg.svdvals(load_file(tmp_path / "immunized.safetensors")["theta"].double())
    torch.testing.assert_close(sigma / sigma[0], torch.tensor([1.0] * 63 + [1e-6]).double(), rtol=1e-6, atol=0)


def test_decoys_hide_the_direction(tmp_path):
    metrics = run([*SHORT, "method.dimensions=32"], folder=tmp_path).metrics
    assert metrics["steps_ratio/harmful"] > 1e4
    assert metrics["leak/auc"] < 0.75


def test_what_the_primary_probe_goes_along_is_not_squeezed():
    """Both tasks lie along nearly one direction: without `kept` the primary probe loses it, too."""
    own, other = orthonormal(8, 2, seed=0).T
    pair = TaskPair("pair", classes(1, own), classes(2, (0.6 * own + 0.8 * other)))
    kept = {}
    for share in (None, 0.1):
        model, method = Linear(pair), Decoys(**OPTIONS | {"kept": share, "rotate": False, "ridge": 10.0})
        method.setup(model, pair)
        kept[share] = (model.extractor.theta.detach().double().T @ own).norm() / torch.linalg.matrix_norm(
            model.extractor.theta.detach().double(), 2
        )
    assert kept[0.1] > 0.99 > 0.9 > kept[None]


def test_wrong_numbers_of_directions_are_refused_with_what_is_possible():
    pair = TaskPair("pair", classes(1, eye(8)[0]), classes(2, eye(8)[1]))
    for dimensions in (8, 20):
        with pytest.raises(ConfigError, match="set it from 1 to 7, or null for no decoys"):
            Decoys(**OPTIONS | {"dimensions": dimensions}).setup(Linear(pair), pair)
