"""The loop: divergence, and methods that end early."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.methods import make_pair
from helpers.pretend_gpu import pretended_gpu
from torch.testing import assert_close

from immunization.errors import ConfigError, Diverged
from immunization.methods import Method
from immunization.models import Linear
from immunization.training import loop
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


def run_script(
    losses: list[float | None], stop: int | None = None, device: str = "cpu"
) -> tuple[list[int], Linear, Callable[..., int]]:
    """The steps that will have been seen, the model, and the training itself, yet to be called."""
    pair, seen = make_pair().to(device, torch.float64), []
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


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "NoneType"),
        ({"los": torch.zeros(())}, "a dict of los"),
        ({}, "a dict of nothing"),
        ({"loss": 1.0}, "a dict"),
    ],
)
def test_a_step_without_a_loss_is_said_to_have_none(returned, said, monkeypatch):
    _, _, run = run_script([1.0])
    monkeypatch.setattr(Scripted, "step", lambda *_: returned)
    with pytest.raises(ConfigError, match=rf"^method=scripted: Scripted\.step must return .* `loss`, not {said}"):
        run()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"loss": torch.zeros(3, requires_grad=True)}, r"tensors of one number each; `loss` is of shape \(3,\)"),
        ({"loss": torch.zeros(())}, "a `loss` with its graph; this one has no gradient"),
        ({"term": "a"}, "tensors of one number each; `term` is str"),
    ],
)
def test_terms_that_are_no_numbers_are_refused(more, said, monkeypatch):
    _, _, run = run_script([1.0])
    monkeypatch.setattr(Scripted, "step", lambda *_: {"loss": torch.zeros((), requires_grad=True)} | more)
    with pytest.raises(ConfigError, match=rf"^method=scripted: Scripted\.step must return {said}"):
        run()


def test_large_negative_losses_are_no_divergence():
    """opt_kappa descends without a floor."""
    _, _, run = run_script([2.0, -1e15, 3.0])
    assert run() == 3


def test_a_method_may_stop_early():
    seen, _, run = run_script([1.0] * 5, stop=1)
    assert run() == 2
    assert seen == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.1e12, None])
@pytest.mark.parametrize("logged", [(), (4,), (2, 4)], ids=str)
def test_a_gpu_is_not_waited_for_to_see_that_a_training_diverges(bad, logged):
    """The verdict comes before the next logged step, or at the end; it names the step and loss that a CPU would."""
    with pretended_gpu():
        seen, _, run = run_script([2.0, 1.9e12, bad, 1.0, 1.0], device="cuda")
        with pytest.raises(Diverged, match=r"Scripted diverged at step 3 \(loss (nan|-?inf|2.1e\+12)\)"):
            run(logged=logged.__contains__)
    assert max(seen) == (2 if bad is None else 3 if logged else 5)


def test_errors_after_a_bad_step_are_put_down_to_it():
    """On a GPU, other numbers than the loss may be looked at first."""
    with pretended_gpu():
        _, _, run = run_script([2.0, math.nan, 1.0], device="cuda")
        run.args[0].epoch_end = lambda model, epoch: 0 / (epoch < 1)
        with pytest.raises(Diverged, match="step 2"):
            run(logged=lambda step: False)


def test_losses_that_nobody_logs_are_looked_at_all_the_same(monkeypatch):
    monkeypatch.setattr(loop, "UNSEEN", 2)
    with pretended_gpu():
        seen, _, run = run_script([1.0, math.nan, *[1.0] * 8], device="cuda")
        with pytest.raises(Diverged, match="step 2"):
            run(logged=lambda step: False)
    assert max(seen) < 6
