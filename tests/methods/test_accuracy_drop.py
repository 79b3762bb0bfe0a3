"""Training that ends where the primary accuracy has fallen too far, and what it goes back to."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.matrices import gaussian

from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods import Method
from immunization.models import Linear


class Scripted(Method):
    """Accuracies and scores as they are given; theta holds the number of the epoch, 0 before the first one."""

    def __init__(self, accuracies: list[float], scores: list[float]) -> None:
        super().__init__(epochs=len(scores), max_accuracy_drop=0.1)
        self.accuracies, self.scores = accuracies, scores

    def accuracy(self, model):
        return self.accuracies[int(model.extractor.theta[0, 0].item())]

    def score(self, model):
        return self.scores[int(model.extractor.theta[0, 0].item()) - 1]


def pair_of(val: int) -> TaskPair:
    x = gaussian(9, 2, seed=0)
    task = Task("any", Split(x, x[:, 0]), Split(x[:val], x[:val, 0]), Split(x, x[:, 0]))
    return TaskPair("any", task, task)


@pytest.mark.parametrize(
    ("accuracies", "scores", "last", "kept"),
    [
        ([0.9, 0.9, 0.81, 0.79, 0.9], [1.0, 2.0, 3.0, 4.0], 3, 2),  # 0.09 is allowed, 0.11 is not
        ([0.9, 0.85, 0.84, 0.7], [2.0, 1.0, 3.0], 3, 1),
        ([0.9, 0.7], [5.0], 1, 0),  # theta_0 where nothing before was good
        ([0.9, 0.95, 0.95, 0.95], [1.0, 2.0, 3.0], 3, 3),  # a better accuracy is no reason to stop
    ],
)
def test_the_best_score_before_too_large_a_drop_is_kept(accuracies, scores, last, kept):
    pair = pair_of(val=9)
    model, method = Linear(pair), Scripted(accuracies, scores)
    model.extractor.theta.data.zero_()
    method.setup(model, pair)
    for epoch in range(1, len(scores) + 1):
        model.extractor.theta.data.fill_(epoch)
        if any(callback.epoch_end(model, epoch - 1) for callback in method.callbacks):
            break
    method.finish(model)
    assert epoch == last
    assert model.extractor.theta[0, 0].item() == kept
    assert ("stopped_early" in method.flags) is (accuracies[last] < 0.8)


def test_it_needs_validation_rows():
    with pytest.raises(ConfigError, match=r"dataset\.val_fraction above 0"):
        Scripted([0.9], []).setup(Linear(pair_of(val=0)), pair_of(val=0))


@pytest.mark.parametrize("dead", [0.0, 1e-20])
def test_dead_features_are_no_better_score(dead):
    """Their singular value is 0 or noise, as rounding has it; they count as just above it, and not on D_P."""
    images = Split(torch.zeros(9, 1, 4, 4), torch.arange(9) % 2)
    tasks = [Task("images", images, images, images, classes=2, width=3) for _ in range(2)]

    def score(primary: float, harmful: float) -> float:
        factors = [torch.tensor([2.0, 1.0, smallest], dtype=torch.float64).diag() for smallest in (primary, harmful)]
        method = Method()
        model = SimpleNamespace(
            factor=lambda task: factors[task is tasks[1]],
            baseline_factor=lambda role, task: torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).diag(),
        )
        method.setup(model, TaskPair("pair", *tasks))
        return method.score(model)

    assert score(0.5, dead) == pytest.approx(-math.log(16) - 2 * math.log(9 * torch.finfo(torch.float64).eps))
    assert score(dead, 0.5) == -math.inf
