"""kappa minimized directly: gradients by finite differences, and the steps of the log form."""

import math

import pytest
import torch
from helpers.matrices import gaussian
from helpers.methods import central_differences, full_batches, gradient, make_pair
from torch import Tensor
from torch.testing import assert_close

from immunization.methods import OptKappa
from immunization.models import Linear
from immunization.theory.regularizers import log_condition_number
from immunization.theory.spectrum import condition_number
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("rows", [(30, 20), (30, 3)])
@pytest.mark.parametrize("form", ["raw", "log"])
def test_opt_kappa_by_finite_differences(form, rows):
    """The plain gradient, which the log form follows where the model is more than a matrix (here: a bias)."""
    pair = make_pair(rows)
    model, method = Linear(pair, "random", bias=form == "log"), OptKappa(epochs=1, form=form, power=math.inf)
    offset = 0 if model.extractor.bias is None else model.extractor.bias.detach()
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    loss = method.step(model, primary, harmful)["loss"]

    def direct(theta: Tensor) -> float:
        kappa_p, kappa_h = (condition_number(batch.x @ theta + offset, rank=batch.rank) for batch in (primary, harmful))
        if form == "raw":
            return kappa_p - kappa_h
        residual = (primary.x @ theta + offset) @ model.head.weight.T - primary.y[:, None]
        return math.log(kappa_p) - math.log(kappa_h) + residual.square().mean().item()

    theta = model.extractor.theta.detach()
    assert_close(loss.item(), direct(theta), rtol=1e-9, atol=0)
    numeric = central_differences(direct, theta)
    assert_close(gradient(loss, model), numeric, rtol=1e-4, atol=1e-5 * numeric.abs().max().item())


@pytest.mark.parametrize("rows", [(30, 20), (30, 3)])
@pytest.mark.parametrize("power", [4, math.inf])
def test_the_log_form_takes_the_steepest_relative_step(power, rows):
    """theta (I - rate E) with <E, X> the derivative of the loss towards theta (I + X), for every X."""
    pair = make_pair(rows)
    model, method = Linear(pair, "random"), OptKappa(epochs=1, form="log", power=power, rate=0.01)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    theta = model.extractor.theta.detach().clone()

    def direct(change: Tensor) -> float:
        logs = (log_condition_number(b.root @ (theta + theta @ change), b.rank, power) for b in (primary, harmful))
        log_p, log_h = logs
        return (log_p - log_h).item()

    nothing = torch.zeros_like(theta)
    terms = method.step(model, primary, harmful)
    assert_close((terms["log_kappa_primary"] - terms["log_kappa_harmful"]).item(), direct(nothing))
    slope = central_differences(direct, nothing)
    assert_close(model.extractor.theta, theta - 0.01 * theta @ slope, rtol=1e-6, atol=1e-8)
    assert model.extractor.theta.grad is None
    assert terms["loss"].requires_grad  # of the head


def test_the_log_form_comes_to_the_ceiling_and_does_not_feel_rounding():
    pair = make_pair()
    reached = []
    for seed in range(3):
        model, method = Linear(pair), OptKappa(epochs=300, form="log")
        with torch.no_grad():
            model.extractor.theta += 1e-14 * gaussian(4, 4, seed=seed)
        method.setup(model, pair)
        train(method, model, PairedBatches(pair, None, torch.Generator()), torch.optim.SGD(model.groups(), lr=1e-3))
        method.finish(model)
        theta = model.extractor.theta.detach()
        kappa_h, kappa_p = (condition_number(one.train.x @ theta) for one in (pair.harmful, pair.primary))
        reached.append(math.log(kappa_h / kappa_p))
    assert reached == pytest.approx([reached[0]] * 3, abs=1e-9)


def test_an_unbounded_objective_is_flagged():
    wide = make_pair((3, 20))  # of 4 dimensions the primary task has 3
    for pair, form, flagged in ((wide, "log", True), (wide, "raw", False), (make_pair(), "log", False)):
        method = OptKappa(epochs=1, form=form)
        method.setup(Linear(pair), pair)
        assert ("unbounded" in method.undetermined) == flagged
