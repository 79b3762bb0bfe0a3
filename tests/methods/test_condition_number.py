"""The paper's method and its R_ill-only variant against Algorithm 1 written out."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.matrices import gaussian
from helpers.methods import fit, full_batches, gradient, make_pair, task
from torch import Tensor, nn
from torch.func import grad
from torch.testing import assert_close

from immunization.data.task import Split, TaskPair
from immunization.errors import DegenerateSpectrum
from immunization.methods import ConditionNumber, ReleasedConditionNumber, RIllOnly
from immunization.models import Batch, Linear
from immunization.models.linear import InverseHead
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


def dense_well(theta: Tensor, k: Tensor, rank: int, power: float) -> Tensor:
    h = theta.T @ k @ theta
    eigenvalues = torch.linalg.eigvalsh(h)[-rank:]
    mean = eigenvalues[-1] if power == math.inf else eigenvalues.pow(power).mean() ** (1 / power)
    return mean**2 / 2 - eigenvalues.square().mean() / 2


def dense_ill(theta: Tensor, k: Tensor, rank: int) -> Tensor:
    h = theta.T @ k @ theta
    return 1 / (h.square().sum() / (2 * rank) - torch.linalg.eigvalsh(h)[-rank] ** 2 / 2)


INVERSES = {
    "cancelled": lambda k, ridge: torch.linalg.inv(k),
    "ridge": lambda k, ridge: torch.linalg.inv(k + ridge * torch.eye(len(k), dtype=k.dtype)),
    "pinv": lambda k, ridge: torch.linalg.pinv(k, hermitian=True),
    "none": lambda k, ridge: torch.eye(len(k), dtype=k.dtype),
}


@pytest.mark.parametrize(
    ("mode", "side", "rank", "rows", "classes"),
    [
        ("cancelled", "input", "data", (30, 20), 0),
        ("cancelled", "input", "full", (30, 20), 3),
        ("ridge", "input", "data", (30, 20), 0),
        ("ridge", "input", "data", (30, 3), 2),
        ("ridge", "output", "full", (30, 20), 2),
        ("ridge", "output", "full", (30, 3), 0),  # batches of N < D: sigma_k = 0, as in the released code
        ("pinv", "input", "data", (30, 20), 3),
        ("pinv", "input", "data", (30, 3), 0),
        ("none", "input", "data", (30, 3), 0),
    ],
)
@pytest.mark.parametrize("compressed", [True, False], ids=["root", "rows"])
@pytest.mark.parametrize("power", [math.inf, 4, 10])
def test_condition_number_is_algorithm_1(mode, side, rank, rows, classes, compressed, power):
    """Terms and gradient of L + lambda_P R_well + lambda_H R_ill by dense autograd, the latter two times K^-1."""
    pair = make_pair(rows, classes=classes)
    model = Linear(pair, "random")
    options = {"precondition": mode, "side": side, "rank": rank, "ridge": 0.3, "ridge_harmful": 0.7}
    method = ReleasedConditionNumber(lambda_P=0.2, lambda_H=0.5, epochs=1, power=power, **options)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    if not compressed:
        primary, harmful = (Batch(b.x, b.y, b.rank) for b in (primary, harmful))
    terms = method.step(model, primary, harmful)

    theta, omega = model.extractor.theta.detach(), model.head.weight.detach()
    k_p, k_h = (b.x.T @ b.x for b in (primary, harmful))
    k = 4 if rank == "full" else min(4, rows[1])
    loss = pair.primary.loss(primary.x @ theta @ omega.T, primary.y)
    expected = {"task_loss": loss, "r_well": dense_well(theta, k_p, 4, power), "r_ill": dense_ill(theta, k_h, k)}
    expected["loss"] = loss + 0.2 * expected["r_well"] + 0.5 * expected["r_ill"]
    assert_close(terms, expected)

    def conditioned(plain: Tensor, inverse: Tensor) -> Tensor:
        return inverse @ plain if side == "input" else plain @ inverse

    direct = grad(lambda t: pair.primary.loss(primary.x @ t @ omega.T, primary.y))(theta)
    direct += 0.2 * conditioned(grad(dense_well)(theta, k_p, 4, power), INVERSES[mode](k_p, 0.3))
    direct += 0.5 * conditioned(grad(dense_ill)(theta, k_h, k), INVERSES[mode](k_h, 0.7))
    assert_close(gradient(terms["loss"], model), direct, rtol=1e-6, atol=1e-9)
    (head,) = torch.autograd.grad(terms["loss"], [model.head.weight])
    assert_close(head, grad(lambda w: pair.primary.loss(primary.x @ theta @ w.T, primary.y))(omega))


def test_label_smoothing_is_that_of_the_primary_loss():
    pair = make_pair(classes=3)
    model, method = (
        Linear(pair, "random"),
        ConditionNumber(lambda_P=0.0, lambda_H=0.0, epochs=1, smoothing=0.3, balance=False),
    )
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    smoothed = torch.nn.functional.cross_entropy(model(primary.x), primary.y, label_smoothing=0.3)
    assert_close(method.step(model, primary, harmful)["task_loss"], smoothed)


def test_balance_makes_the_gradients_equally_long_at_the_start_and_keeps_the_scale():
    pair = make_pair()
    model, method = Linear(pair, "random"), ConditionNumber(lambda_P=2.0, lambda_H=3.0, epochs=1, balance=True)
    method.setup(model, pair)
    terms = method.step(model, *full_batches(pair))
    loss, well, ill = (gradient(terms[name], model).norm() for name in ("task_loss", "r_well", "r_ill"))
    assert_close(method.scale_P * well, loss)
    assert_close(method.scale_H * ill, loss)
    scaled = terms["task_loss"] + 2 * method.scale_P * terms["r_well"] + 3 * method.scale_H * terms["r_ill"]
    assert_close(terms["loss"], scaled)

    scales = method.scale_P, method.scale_H
    with torch.no_grad():
        model.extractor.theta *= 3
    method.step(model, *full_batches(pair))
    assert (method.scale_P, method.scale_H) == scales
    method.setup(model, pair)  # a second run finds its own
    method.step(model, *full_batches(pair))
    assert (method.scale_P, method.scale_H) != scales


@pytest.mark.parametrize("head", ["zero", "inverse"])
def test_balance_of_a_head_at_zero_or_one_that_undoes_theta_is_among_the_regularizers(head):
    """The loss then has no gradient in theta, up to rounding; both regularizers get one of length 1."""
    pair = make_pair()
    model, method = Linear(pair, "identity"), ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, balance=True)
    if head == "inverse":
        model.head = InverseHead(model.extractor, nn.Linear(pair.dim, pair.primary.outputs))
    method.setup(model, pair)
    terms = method.step(model, *full_batches(pair))
    assert gradient(terms["task_loss"], model).norm() < 1e-12
    for scale, name in ((method.scale_P, "r_well"), (method.scale_H, "r_ill")):
        assert_close((scale * gradient(terms[name], model)).norm().item(), 1.0)


def test_singular_k_without_ridge_names_the_ridge():
    x = torch.cat([gaussian(30, 3, seed=0), torch.zeros(30, 1, dtype=torch.float64)], 1)
    pair = TaskPair("pair", task(x, x[:, 0]), task(x, x[:, 1]))
    method = ConditionNumber(
        lambda_P=1.0, lambda_H=1.0, epochs=1, batch_size=10, precondition="ridge", ridge=0.0, balance=False
    )
    with pytest.raises(DegenerateSpectrum, match=r"ridge=0 too small"):
        fit(method, pair, torch.optim.SGD, 1e-3)


@pytest.mark.parametrize("rows", [20, 3])
def test_r_ill_only_is_the_plain_gradient_of_one_term(rows):
    pair = make_pair((30, rows))
    model, method = Linear(pair, "random"), RIllOnly(epochs=1)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    terms = method.step(model, primary, harmful)
    k, rank = harmful.x.T @ harmful.x, min(rows, 4)
    assert_close(terms["loss"], dense_ill(model.extractor.theta, k, rank))
    assert_close(gradient(terms["loss"], model), grad(dense_ill)(model.extractor.theta.detach(), k, rank))
    terms["loss"].backward()
    assert model.head.weight.grad is None


def test_r_ill_only_of_huge_features_moves_once_normalized():
    pair = make_pair((30, 20))
    pair = replace(pair, harmful=replace(pair.harmful, train=Split(1e4 * pair.harmful.train.x, pair.harmful.train.y)))
    moved = {}
    for normalize in (False, True):
        model, method = Linear(pair), RIllOnly(epochs=3, normalize=normalize)
        method.setup(model, pair)
        optimizer = torch.optim.Adam(model.groups(), lr=1e-3)
        train(method, model, PairedBatches(pair, None, torch.Generator()), optimizer)
        moved[normalize] = (model.extractor.theta - torch.eye(pair.dim)).abs().max().item()
    assert moved[False] < 1e-6
    assert moved[True] == pytest.approx(3e-3, rel=0.1)
