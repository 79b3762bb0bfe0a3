"""When a training stops early, for want of a better score or for a fallen accuracy, and what it goes back to."""

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
    """Scores of epochs, and accuracies from before the first one on, as they are given; theta holds their number."""

    def __init__(self, scores: list[float], accuracies: list[float] | None = None, **options) -> None:
        super().__init__(epochs=len(scores), **options)
        self.scores, self.accuracies, self.asked = scores, accuracies, []

    def accuracy(self, model):
        return self.accuracies[int(model.extractor.theta[0, 0].item())]

    def score(self, model):
        self.asked.append(int(model.extractor.theta[0, 0].item()))
        return self.scores[self.asked[-1] - 1]


def pair_of(val: int = 9) -> TaskPair:
    x = gaussian(9, 2, seed=0)
    task = Task("any", Split(x, x[:, 0]), Split(x[:val], x[:val, 0]), Split(x, x[:, 0]))
    return TaskPair("any", task, task)


def trained(method: Scripted) -> tuple[int, int]:
    """The last epoch, and the one whose parameters are kept, from 1 on; 0 is before the first one."""
    pair = pair_of()
    model = Linear(pair)
    model.extractor.theta.data.zero_()
    method.setup(model, pair)
    for epoch in range(1, method.epochs + 1):
        model.extractor.theta.data.fill_(epoch)
        if any(callback.epoch_end(model, epoch - 1) for callback in method.callbacks):
            break
    method.finish(model)
    return epoch, int(model.extractor.theta[0, 0].item())


def test_ten_scores_within_the_patience():
    method = Scripted([0.0] * 200, patience=40)
    assert trained(method) == (44, 4)
    assert method.asked == [*range(4, 45, 4)]
    method = Scripted([0.0] * 20, patience=5)
    trained(method)
    assert method.asked == [*range(1, 7)]


def test_a_gain_below_a_thousandth_is_none():
    """Such steps would add up for as long as one waits."""
    slow = [1 + 0.9e-4 * epoch for epoch in range(10)] + [1.0] * 10
    assert trained(Scripted(slow, patience=3)) == (4, 1)
    fast = [1 + 2e-3 * epoch for epoch in range(6)] + [1.0] * 10
    assert trained(Scripted(fast, patience=3)) == (9, 6)


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
    method = Scripted(scores, accuracies, max_accuracy_drop=0.1)
    assert trained(method) == (last, kept)
    assert ("stopped_early" in method.flags) is (accuracies[last] < 0.8)


def test_a_largest_drop_needs_validation_rows():
    with pytest.raises(ConfigError, match=r"dataset\.val_fraction above 0"):
        Scripted([], [0.9], max_accuracy_drop=0.1).setup(Linear(pair_of(val=0)), pair_of(val=0))


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
