"""The loop: divergence, and methods that end early."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.methods import make_pair
from torch.testing import assert_close

from immunization.errors import Diverged
from immunization.methods import Method
from immunization.models import Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


class Scripted(Method):
    """Losses by script; each step's gradient is 1 in every entry of theta."""

    def __init__(self, losses: list[float | None], stop: int | None = None) -> None:
        super().__init__(epochs=len(losses))
        self.losses, self.stop = iter(losses), stop

    def step(self, model, primary, harmful):
        value = next(self.losses)
        if value is None:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        total = model.extractor.theta.sum()
        return {"loss": total - total.detach() + value}

    def epoch_end(self, model, epoch):
        return epoch == self.stop


def run_script(losses: list[float | None], stop: int | None = None) -> tuple[list[int], Linear, Callable[[], int]]:
    """The steps that will have been seen, the model, and the training itself, yet to be called."""
    pair, seen = make_pair(), []
    model = Linear(pair)
    batches = PairedBatches(pair, None, torch.Generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = partial(train, Scripted(losses, stop), model, batches, optimizer, lambda step, terms: seen.append(step))
    return seen, model, run


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.1e12, None])
def test_divergence_stops_before_the_bad_step(bad):
    """Non-finite losses, failed decompositions, losses above 1e12 times the first; theta stays that before."""
    seen, model, run = run_script([2.0, 1.9e12, bad, 1.0])
    with pytest.raises(Diverged, match=r"Scripted diverged at step 3 .*; lower optimizer\.lr"):
        run()
    assert seen == [1, 2]
    assert_close(model.extractor.theta, torch.eye(4, dtype=torch.float64) - 2)


def test_large_negative_losses_are_no_divergence():
    """opt_kappa descends without a floor."""
    _, _, run = run_script([2.0, -1e15, 3.0])
    assert run() == 3


def test_a_method_may_stop_early():
    seen, _, run = run_script([1.0] * 5, stop=1)
    assert run() == 2
    assert seen == [1, 2]
