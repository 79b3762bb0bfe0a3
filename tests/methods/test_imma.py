"""IMMA: bi-level steps by hand and by automatic differentiation."""

import numpy as np
import pytest
import torch
from helpers.methods import central_differences, full_batches, gradient, make_pair, task
from helpers.nets import build, open_pair
from torch import Tensor
from torch.testing import assert_close

from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods import IMMA
from immunization.models import Linear
from immunization.training.batches import PairedBatches

pytestmark = pytest.mark.trains


@pytest.mark.parametrize(
    ("options", "loss", "slope"),
    [
        # d L_H / d theta = 2 x_H w (x_H w theta - 3) = -4, theta^1 = 1.4
        # there L_P = 1.8^2, slope 7.2, L_H = 1.6^2, slope -3.2
        ({"mode": "first_order"}, 3.24 - 2.56, 7.2 + 3.2),
        ({}, 3.24 - 2.56, 0.8 * (7.2 + 3.2)),  # d theta^1 / d theta = 1 - 0.1 * 2 (x_H w)^2 = 0.8
        ({"weight": 0.5}, 3.24 - 1.28, 0.8 * (7.2 + 1.6)),
        ({"weight": 0.0}, 3.24, 0.8 * 7.2),
        ({"cap": 2.0}, 3.24 - 2.0, 0.8 * 7.2),  # above the cap the harmful loss has no gradient
        ({"cap": 3.0}, 3.24 - 2.56, 0.8 * (7.2 + 3.2)),
        # theta^2 = 1.72: L_P = 2.44^2, slope 9.76, L_H = 1.28^2, slope -2.56
        ({"inner_steps": 2}, 2.44**2 - 1.28**2, 0.8**2 * (9.76 + 2.56)),
        ({"inner_steps": 2, "mode": "first_order"}, 2.44**2 - 1.28**2, 9.76 + 2.56),
        # theta itself: L_P = (2 - 1)^2, slope 4, L_H = 2^2, slope -4
        ({"inner_steps": 0}, 1.0 - 4.0, 4.0 + 4.0),
    ],
)
def test_imma_in_one_dimension_by_hand(options, loss, slope):
    """theta = 1, omega = 2, w = 1/2; D_P: x = 1, y = 1; D_H: x = 2, y = 3; alpha = 0.1."""
    one = torch.ones(1, 1, dtype=torch.float64)
    pair = TaskPair("pair", task(one, one[0]), task(2 * one, 3 * one[0]))
    model = Linear(pair)
    method = IMMA(epochs=1, inner_lr=0.1, head_steps=0, **options)
    method.setup(model, pair)
    model.head.weight.data.fill_(2.0)
    method.attackers["harmful"].weight.data.fill_(0.5)
    terms = method.step(model, *full_batches(pair))
    assert_close(terms["loss"].item(), loss)
    assert_close(gradient(terms["loss"], model).item(), slope)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_imma_differentiates_through_the_attackers_steps(inner_steps):
    """Classes in two dimensions, heads fixed: central differences of the whole lower level, written in numpy."""
    pair = make_pair((8, 9), columns=2, classes=2)
    model = Linear(pair, "random")
    method = IMMA(epochs=1, inner_steps=inner_steps, inner_lr=0.8, head_steps=0, weight=0.6)
    method.setup(model, pair)
    torch.nn.init.normal_(method.attackers["harmful"].weight)
    omega, w = (head.weight.detach().numpy()[0] for head in (model.head, method.attackers["harmful"]))

    def loss(one: Task, theta: np.ndarray, head: np.ndarray) -> float:
        x, y = one.train.x.numpy(), one.train.y.numpy()
        return np.logaddexp(0, (1 - 2 * y) * (x @ theta @ head)).mean()

    def slope(one: Task, theta: np.ndarray, head: np.ndarray) -> np.ndarray:
        x, y = one.train.x.numpy(), one.train.y.numpy()
        return x.T @ np.outer((1 / (1 + np.exp(-x @ theta @ head)) - y) / len(y), head)

    def upper(start: Tensor) -> float:
        theta = start.numpy()
        for _ in range(inner_steps):
            theta = theta - 0.8 * slope(pair.harmful, theta, w)
        return loss(pair.primary, theta, omega) - 0.6 * loss(pair.harmful, theta, w)

    terms = method.step(model, *full_batches(pair))
    theta = model.extractor.theta.detach()
    assert_close(terms["loss"].item(), upper(theta))
    assert_close(gradient(terms["loss"], model), central_differences(upper, theta), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_imma_differentiates_twice_through_nets(folders, name):
    """Heads fixed, along a random direction: central differences, also where attention is fused otherwise."""
    images = open_pair(folders)
    model, pair = build(images, name).read(images, False)
    method = IMMA(epochs=1, inner_lr=0.5, heads="fixed", head_start="random")
    method.setup(model, pair)
    batches = next(PairedBatches(pair, 16, torch.Generator()).epoch())
    parameters = list(model.trained().values())
    start, way = [p.detach().clone() for p in parameters], [torch.randn_like(p) for p in parameters]

    def loss(t: float) -> Tensor:
        for p, before, step in zip(parameters, start, way, strict=True):
            p.data.copy_(before + t * step)
        return method.step(model, *batches)["loss"]

    slopes = torch.autograd.grad(loss(0.0), parameters)
    along = sum((slope * step).sum() for slope, step in zip(slopes, way, strict=True)).item()
    assert along == pytest.approx((loss(1e-6) - loss(-1e-6)).item() / 2e-6, rel=1e-4)
    first_order = IMMA(epochs=1, inner_lr=0.5, heads="fixed", mode="first_order")
    first_order.setup(model, pair)
    first_order.attackers["harmful"] = method.attackers["harmful"]
    loss(0.0)
    other = torch.autograd.grad(first_order.step(model, *batches)["loss"], parameters)
    assert any((slope - one).norm() > 1e-3 * slope.norm() for slope, one in zip(slopes, other, strict=True))


def test_heads_that_stay_at_zero_are_refused():
    pair = make_pair()
    with pytest.raises(ConfigError, match="leaves both heads at 0"):
        IMMA(epochs=1, heads="fixed").setup(Linear(pair), pair)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_imma_steps_both_heads_first_at_the_scale_of_the_features(scale):
    """From w = 0 one step of `head_lr` / mean ||f||^2 down the loss: logits do not depend on the scale of theta."""
    pair = make_pair()
    model, method = Linear(pair), IMMA(epochs=1, head_lr=0.3, inner_steps=0)
    method.setup(model, pair)
    with torch.no_grad():
        model.extractor.theta *= scale
    primary, harmful = full_batches(pair)
    terms = method.step(model, primary, harmful)
    for head, batch in ((model.head, primary), (method.attackers["harmful"], harmful)):
        slope = -2 / len(batch.y) * batch.y @ batch.x  # of the mean squared error at w = 0
        assert_close(head.weight[0], -0.3 / batch.x.square().sum(1).mean() * slope / scale)
    terms["loss"].backward()
    assert model.head.weight.grad is None  # the upper level moves theta alone
    assert method.attackers["harmful"].weight.grad is None


def test_imma_keeps_the_attackers_head_and_starts_each_run_anew():
    pair = make_pair()
    model, method = Linear(pair), IMMA(epochs=1)
    method.setup(model, pair)
    losses = [method.step(model, *full_batches(pair))["harmful_loss"].item() for _ in range(20)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    method.setup(model, pair)
    assert not method.attackers["harmful"].weight.any()
