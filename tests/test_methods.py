"""Methods against direct computations: gradients, bi-level steps, batches, balancing, divergence."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from matrices import gaussian
from torch import Tensor
from torch.func import grad
from torch.testing import assert_close

from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError, DegenerateSpectrum, Diverged
from immunization.methods import (
    IMMA,
    ConditionNumber,
    Identity,
    Method,
    OptKappa,
    PairedBatches,
    ReleasedConditionNumber,
    RIllOnly,
    train,
)
from immunization.models import Batch, Linear
from immunization.theory.regularizers import log_condition_number
from immunization.theory.spectrum import condition_number

METHODS = {
    "condition_number": lambda **options: ConditionNumber(1.0, 1.0, balance=False, **options),
    "condition_number, ridge": lambda **options: ConditionNumber(
        1.0, 1.0, precondition="ridge", balance=False, **options
    ),
    "r_ill_only": RIllOnly,
    "opt_kappa, raw": OptKappa,
    "opt_kappa, log": lambda **options: OptKappa(form="log", **options),
    "imma": IMMA,
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def task(x: Tensor, y: Tensor, classes: int = 0) -> Task:
    return Task("task", Split(x, y), Split(x[:0], y[:0]), Split(x[:0], y[:0]), classes=classes)


def make_pair(rows: tuple[int, int] = (30, 20), columns: int = 4, classes: int = 0) -> TaskPair:
    """Two tasks of random inputs, without validation and test rows: regressions, or `classes` classes."""
    tasks = []
    for seed, n in enumerate(rows):
        x, y = gaussian(n, columns, seed=seed), gaussian(n, seed=seed + 10)
        tasks.append(task(x, torch.arange(n) % classes if classes else y, classes))
    return TaskPair("pair", *tasks)


def full_batches(pair: TaskPair) -> tuple[Batch, Batch]:
    return next(PairedBatches(pair, None, torch.Generator()).epoch())


def gradient(term: Tensor, model: Linear) -> Tensor:
    (found,) = torch.autograd.grad(term, [model.extractor.theta], retain_graph=True)
    return found


def central_differences(function, theta: Tensor, step: float = 1e-6) -> Tensor:
    """Gradient of a scalar function of a matrix, entry by entry."""
    found = torch.zeros_like(theta)
    for index in np.ndindex(*theta.shape):
        ends = []
        for sign in (step, -step):
            moved = theta.clone()
            moved[index] += sign
            ends.append(float(function(moved)))
        found[index] = (ends[0] - ends[1]) / (2 * step)
    return found


def fit(method: Method, pair: TaskPair, optimizer: type, lr: float, init: str = "random") -> Linear:
    """A model, trained."""
    model = Linear(pair, init)
    method.setup(model, pair)
    batches = PairedBatches(pair, method.batch_size, torch.Generator().manual_seed(0))
    train(method, model, batches, optimizer(model.parameters(), lr=lr))
    return model


# --- Batches ----------------------------------------------------------------------------------------------------------


def numbered(rows: int) -> Task:
    """Inputs whose first column is the row number, which is the target too."""
    number = torch.arange(rows, dtype=torch.float64)
    return task(torch.stack([number, number**2, torch.ones_like(number)], 1), number)


def test_full_batches_carry_everything():
    pair = make_pair()
    batches = PairedBatches(pair, None, torch.Generator())
    assert batches.steps_per_epoch == 1
    ((primary, harmful),) = batches.epoch()
    for batch, one in ((primary, pair.primary), (harmful, pair.harmful)):
        assert batch.x is one.train.x
        assert batch.y is one.train.y
        assert batch.rank == len(batch.root) == 4
        assert_close(batch.root.T @ batch.root, one.train.x.T @ one.train.x)


def test_an_epoch_is_one_pass_over_the_harmful_task():
    """Harmful: 6 of 7 rows, another order each epoch. Primary: goes on where it was, 9 of 10 rows before it repeats."""
    batches = PairedBatches(TaskPair("pair", numbered(10), numbered(7)), 3, torch.Generator().manual_seed(0))
    assert batches.steps_per_epoch == 2
    epochs = [list(batches.epoch()) for _ in range(6)]
    assert {len(epoch) for epoch in epochs} == {2}
    for batch in (batch for epoch in epochs for pair in epoch for batch in pair):
        assert batch.x.shape == (3, 3)
        assert batch.rank == 3
        assert batch.root is None
        assert torch.equal(batch.x[:, 0], batch.y)
    harmful = [torch.cat([h.y for _, h in epoch]).tolist() for epoch in epochs]
    assert all(len(set(rows)) == 6 for rows in harmful)
    assert len({tuple(rows) for rows in harmful}) == 6
    primary = torch.cat([p.y for epoch in epochs for p, _ in epoch]).reshape(4, 9).tolist()
    assert all(len(set(rows)) == 9 for rows in primary)
    assert len({tuple(rows) for rows in primary}) == 4


def test_batches_follow_the_seed():
    pair = make_pair()

    def order(seed: int) -> Tensor:
        batches = PairedBatches(pair, 5, torch.Generator().manual_seed(seed))
        return torch.cat([batch.y for _ in range(2) for both in batches.epoch() for batch in both])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_the_rank_of_a_batch_is_bounded_by_that_of_its_task():
    x = gaussian(30, 2, seed=0) @ gaussian(2, 5, seed=1)
    one = task(x, x[:, 0])
    assert {
        b.rank for both in PairedBatches(TaskPair("pair", one, one), 4, torch.Generator()).epoch() for b in both
    } == {2}


@pytest.mark.parametrize(
    ("rows", "name"), [((5, 20), "5 training rows of the primary"), ((20, 5), "5 .* of the harmful")]
)
def test_batches_larger_than_a_task(rows, name):
    with pytest.raises(ConfigError, match=rf"method\.batch_size=6 is above the {name} task; lower it"):
        PairedBatches(make_pair(rows), 6, torch.Generator())


# --- condition_number -------------------------------------------------------------------------------------------------


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
    method = ReleasedConditionNumber(0.2, 0.5, epochs=1, power=power, **options)
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
    model, method = Linear(pair, "random"), ConditionNumber(0.0, 0.0, epochs=1, smoothing=0.3, balance=False)
    method.setup(model, pair)
    primary, harmful = full_batches(pair)
    smoothed = torch.nn.functional.cross_entropy(model(primary.x), primary.y, label_smoothing=0.3)
    assert_close(method.step(model, primary, harmful)["task_loss"], smoothed)


def test_balance_makes_the_gradients_equally_long_at_the_start_and_keeps_the_scale():
    pair = make_pair()
    model, method = Linear(pair, "random"), ConditionNumber(2.0, 3.0, epochs=1, balance=True)
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


def test_balance_of_a_head_at_zero_is_among_the_regularizers():
    """The loss then has no gradient in theta; both regularizers get one of length 1."""
    pair = make_pair()
    model, method = Linear(pair, "identity"), ConditionNumber(1.0, 1.0, epochs=1, balance=True)
    method.setup(model, pair)
    terms = method.step(model, *full_batches(pair))
    assert not gradient(terms["task_loss"], model).any()
    for scale, name in ((method.scale_P, "r_well"), (method.scale_H, "r_ill")):
        assert_close((scale * gradient(terms[name], model)).norm().item(), 1.0)


def test_singular_k_without_ridge_names_the_ridge():
    x = torch.cat([gaussian(30, 3, seed=0), torch.zeros(30, 1, dtype=torch.float64)], 1)
    pair = TaskPair("pair", task(x, x[:, 0]), task(x, x[:, 1]))
    method = ConditionNumber(1.0, 1.0, epochs=1, batch_size=10, precondition="ridge", ridge=0.0, balance=False)
    with pytest.raises(DegenerateSpectrum, match=r"method\.ridge=0 too small"):
        fit(method, pair, torch.optim.SGD, 1e-3)


# --- r_ill_only and opt_kappa -----------------------------------------------------------------------------------------


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


# --- imma -------------------------------------------------------------------------------------------------------------


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
    method.attacker.weight.data.fill_(0.5)
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
    torch.nn.init.normal_(method.attacker.weight)
    omega, w = (head.weight.detach().numpy()[0] for head in (model.head, method.attacker))

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
    for head, batch in ((model.head, primary), (method.attacker, harmful)):
        slope = -2 / len(batch.y) * batch.y @ batch.x  # of the mean squared error at w = 0
        assert_close(head.weight[0], -0.3 / batch.x.square().sum(1).mean() * slope / scale)
    terms["loss"].backward()
    assert model.head.weight.grad is None  # the upper level moves theta alone
    assert method.attacker.weight.grad is None


def test_imma_keeps_the_attackers_head_and_starts_each_run_anew():
    pair = make_pair()
    model, method = Linear(pair), IMMA(epochs=1)
    method.setup(model, pair)
    losses = [method.step(model, *full_batches(pair))["harmful_loss"].item() for _ in range(20)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    method.setup(model, pair)
    assert not method.attacker.weight.any()


# --- All methods ------------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch_size", [None, 3, 6], ids=["full", "wide", "tall"])
def test_theta_keeps_its_dtype_and_stays_finite(make, dtype, batch_size):
    pair = make_pair().to("cpu", dtype)
    model = fit(make(epochs=3, batch_size=batch_size), pair, torch.optim.SGD, 1e-4)
    for parameter in model.parameters():
        assert parameter.dtype == dtype
        assert torch.isfinite(parameter).all()


@every_method
def test_a_small_step_descends(make):
    pair = make_pair()
    method, model = make(epochs=1), Linear(pair, "random")
    if isinstance(method, IMMA):
        method.head_steps = 0  # or the second loss would be another one
    method.setup(model, pair)
    batches = PairedBatches(pair, None, torch.Generator())
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    train(method, model, batches, optimizer, lambda step, terms: seen.append(terms["loss"].item()))
    assert method.step(model, *full_batches(pair))["loss"].item() < seen[0]


@pytest.mark.parametrize("mode", INVERSES)
@pytest.mark.parametrize(("weights", "term"), [((1.0, 0.0), "r_well"), ((0.0, 1.0), "r_ill")])
def test_each_regularizer_descends_under_every_preconditioner(mode, weights, term):
    """K^-1 is positive definite, so K^-1 grad descends as grad does; the head at 0 keeps the loss out."""
    pair = make_pair()
    method = ConditionNumber(*weights, epochs=1, precondition=mode, balance=True)
    model = Linear(pair)
    method.setup(model, pair)
    seen = []
    for _ in range(5):
        batches = PairedBatches(pair, None, torch.Generator())
        optimizer = torch.optim.SGD([model.extractor.theta], lr=1e-3)
        train(method, model, batches, optimizer, lambda step, terms: seen.append(terms[term].item()))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0]


@pytest.mark.parametrize(
    ("method", "share"), [(ConditionNumber(3.0, 1.0, 300, balance=True), 0.8), (OptKappa(300, form="log"), 0.99)]
)
def test_methods_raise_the_ratio(method, share):
    """RIR against its ceiling kappa(K_P^-1 K_H) kappa(K_P) / kappa(K_H) (docs/theory.md), in logarithms."""
    pair = make_pair()
    theta = fit(method, pair, torch.optim.Adam, 1e-2, "orthogonal").extractor.theta.detach()
    harmful, primary = (
        condition_number(one.train.x @ theta) / condition_number(one.train.x) for one in (pair.harmful, pair.primary)
    )
    k_p, k_h = (one.train.x.T @ one.train.x for one in (pair.primary, pair.harmful))
    relative = torch.linalg.eigvals(torch.linalg.solve(k_p, k_h)).real
    ceiling = relative.max() / relative.min() * torch.linalg.cond(k_p) / torch.linalg.cond(k_h)
    assert share * math.log(ceiling) < math.log(harmful / primary) < math.log(ceiling) + 1e-9


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
        model, method = Linear(pair), OptKappa(300, form="log")
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
        method = OptKappa(1, form=form)
        method.setup(Linear(pair), pair)
        assert ("unbounded" in method.undetermined) == flagged


def test_identity_takes_no_step_whatever_the_epochs():
    pair = make_pair()
    model, method = Linear(pair), Identity(epochs=5)
    method.setup(model, pair)
    assert train(method, model, PairedBatches(pair, None, torch.Generator()), torch.optim.SGD(model.parameters())) == 0
    assert torch.equal(model.extractor.theta, torch.eye(4, dtype=torch.float64))


def test_names_are_those_of_the_yaml_files():
    names = {cls.__name__: cls.name.fget(object.__new__(cls)) for cls in (ConditionNumber, RIllOnly, OptKappa, IMMA)}
    assert names == {
        "ConditionNumber": "condition_number",
        "RIllOnly": "r_ill_only",
        "OptKappa": "opt_kappa",
        "IMMA": "imma",
    }


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ConditionNumber(-1.0, 1.0, epochs=1), "lambda_P"),
        (lambda: ConditionNumber(1.0, math.nan, epochs=1), "lambda_H"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, ridge=-1.0), "ridge"),
        (lambda: ReleasedConditionNumber(1.0, 1.0, epochs=1, ridge_harmful=-1.0), "ridge_harmful"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, smoothing=1.0), "smoothing"),
        (lambda: ReleasedConditionNumber(1.0, 1.0, epochs=1, precondition="pinv"), "side"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, power=7), "power"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, power=0), "power"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, power=-math.inf), "power"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, power=math.nan), "power"),
        (lambda: ConditionNumber(1.0, 1.0, epochs=1, power=66), "power"),
        (lambda: OptKappa(epochs=1, form="square"), "form"),
        (lambda: OptKappa(epochs=1, power=3), "power"),
        (lambda: OptKappa(epochs=1, form="log", rate=1.0), "rate"),
        (lambda: RIllOnly(epochs=-1), "epochs"),
        (lambda: RIllOnly(epochs=1, batch_size=1), "batch_size"),
        (lambda: IMMA(epochs=1, inner_steps=-1), "inner_steps"),
        (lambda: IMMA(epochs=1, cap=-1.0), "cap"),
        (lambda: IMMA(epochs=1, mode="implicit"), "mode"),
    ],
)
def test_impossible_options_are_named(make, key):
    with pytest.raises(ConfigError, match=rf"method\.{key}\b"):
        make()


# --- The loop ---------------------------------------------------------------------------------------------------------


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
