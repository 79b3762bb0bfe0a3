"""The attacker's probe in closed form, against gradient descent, least squares, steepest descent and refits.

`docs/theory.md` names some of these tests.
"""

from decimal import Decimal, localcontext
from functools import partial

import numpy as np
import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from helpers.spectra import tensor
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.errors import DegenerateSpectrum
from immunization.theory import spectrum
from immunization.theory.probe import Probe, excess, leave_one_out, residuals

FLOOR = 1e-14
OCTAVES = 2.0 ** torch.arange(17, dtype=torch.float64)
f64, eye = partial(torch.tensor, dtype=torch.float64), partial(torch.eye, dtype=torch.float64)


def problem(seed: int, outputs: int, rank: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [30, 6] of the given rank with kappa about 100, and targets [30, outputs]."""
    sigma = torch.linspace(3.0, 0.3, rank, dtype=torch.float64)
    return with_spectrum(sigma, 30, 6, seed), gaussian(30, outputs, seed=seed + 2)


def test_a_decomposition_that_fails_is_taken_by_the_slower_driver(monkeypatch):
    f, y = problem(seed=0, outputs=2)
    expected = Probe.fit(f, y, FLOOR)

    def gives_up(*args, **kwargs):
        raise torch.linalg.LinAlgError("failed to converge because of too many repeated singular values")

    monkeypatch.setattr(torch.linalg, "svd", gives_up)
    found = Probe.fit(f, y, FLOOR)
    assert found.resolved == expected.resolved == 5
    assert torch.allclose(found.sigma, expected.sigma)
    assert torch.allclose(found.optimum(), expected.optimum())
    with pytest.raises(torch.linalg.LinAlgError):
        spectrum.svd(f * float("nan"))


@given(seeds, st.integers(1, 6))
def test_optimum_is_minimum_norm_least_squares_and_the_limit_of_the_descent(seed, rank):
    f, y = problem(seed, 2, rank)
    probe = Probe.fit(f, y, FLOOR)
    assert probe.sigma.shape == (rank,)
    assert_close(probe.optimum(), torch.linalg.pinv(f) @ y, rtol=1e-9, atol=1e-11)
    assert_close(probe.weights(torch.tensor([2**20]))[0], probe.optimum(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("small", [1e-3, 1e-7, 1e-11])
@pytest.mark.parametrize("t", [1, 1000, 2**20])
def test_directions_of_tiny_singular_values_keep_their_digits(small, t):
    probe = Probe.fit(torch.diag(f64([1.0, small])), torch.ones(2, 1).double(), FLOOR)
    with localcontext() as context:
        context.prec = 60
        kept = (1 - Decimal(small) ** 2) ** t
        expected = float((1 - kept) / Decimal(small)), float(kept**2)
    grid = torch.tensor([t])
    weight = probe.weights(grid)[0].abs().min() if expected[0] < 1 else probe.weights(grid)[0].abs().max()
    assert weight.item() == pytest.approx(expected[0], rel=1e-12)
    assert probe.excess(grid).item() == pytest.approx(expected[1], rel=1e-12)


@given(seeds, st.integers(1, 3), st.integers(2, 6))
def test_norm_ratio_is_that_of_steepest_descent_with_exact_line_search(seed, outputs, rank):
    f, y = problem(seed, outputs, rank)
    h, b = f.T @ f, f.T @ y
    w, best = torch.zeros(6, outputs, dtype=f.dtype), torch.linalg.pinv(f) @ y
    expected = [1.0]
    for _ in range(25):
        gradient = h @ w - b
        w = w - gradient * (gradient.square().sum() / (gradient * (h @ gradient)).sum())
        expected.append(((w - best).norm() / best.norm()).item())
    assert_close(Probe.fit(f, y, FLOOR).norm_ratio(25), f64(expected), rtol=1e-7, atol=1e-11)


def test_directions_below_the_noise_floor_are_kept_but_not_solved_for():
    probe = Probe.fit(torch.diag(f64([1.0, 1e-20])), torch.ones(2, 1).double(), FLOOR, rank=2)
    assert (len(probe.sigma), probe.resolved) == (2, 1)
    assert probe.optimum().abs().flatten().tolist() == [1, 0]
    assert probe.excess(torch.tensor([1, 2**20])).tolist() == [1, 1]
    assert torch.isfinite(probe.norm_ratio(5)).all()


def test_a_singular_value_of_zero_gives_finite_weights():
    probe = Probe.fit(torch.diag(f64([1.0, 0.0])), torch.ones(2, 1).double(), FLOOR, rank=2)
    assert probe.weights(torch.tensor([1, 2**20])).abs().squeeze(2).tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize(("value", "words"), [(0.0, "all zero"), (float("nan"), "NaN"), (float("inf"), "infinite")])
def test_features_without_a_spectrum_are_refused(value, words):
    with pytest.raises(DegenerateSpectrum, match=words):
        Probe.fit(torch.full((3, 2), value).double(), torch.ones(3, 1).double(), FLOOR)


@given(seeds, st.integers(1, 8), st.integers(1, 3), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
def test_it_is_numpys_least_squares_however_the_rows_come(seed, width, outputs, batch, dtype):
    """Also with fewer rows than features, and of features stored in float32, whose noise counts as such."""
    rows = 5 + seed % 30
    rank = 1 + seed % min(rows, width)
    features = with_spectrum(torch.linspace(2.0, 0.5, rank, dtype=torch.float64), rows, width, seed).to(dtype)
    targets, eps = gaussian(rows, outputs, seed=seed + 1), torch.finfo(dtype).eps
    probe = Probe.of(features.split(batch), targets, eps)
    floor = max(rows, width) * eps
    expected, _, k, sigma = np.linalg.lstsq(features.double().numpy(), targets.numpy(), rcond=floor)
    assert probe.resolved == len(probe.sigma) == k == rank
    np.testing.assert_allclose(probe.sigma, sigma[:k], rtol=1e-12)
    np.testing.assert_allclose(probe.optimum(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(probe.root.T @ probe.root, (features.T @ features).double(), atol=30 * rows * eps)
    np.testing.assert_allclose(probe.root.T @ probe.coefficients, features.double().T @ targets, atol=30 * rows * eps)
    left = probe.residuals(torch.tensor([7]))[0]
    u = features.double() @ probe.vectors / probe.sigma
    np.testing.assert_allclose(
        left, u.T @ (targets - features.double() @ probe.weights(torch.tensor([7]))[0]), atol=30 * rows * eps
    )
    whole = Probe.of(features, targets, eps)
    assert_close(whole.excess(torch.arange(9)), probe.excess(torch.arange(9)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("rows", "width"), [(12, 3), (3, 12)])
@pytest.mark.parametrize(("eps", "tolerance"), [(2.0**-52, 12 * 2.0**-52), (2.0**-23, 3**0.5 * 2.0**-23), (1e-5, 1e-5)])
@pytest.mark.parametrize(("factor", "kept"), [(0.5, 1), (2.0, 2)])
def test_noise_is_what_lies_below_the_rank_tolerance(rows, width, eps, tolerance, factor, kept):
    features = torch.zeros(rows, width, dtype=torch.float64)
    features[0, 0], features[1, 1] = 1.0, factor * tolerance
    targets = torch.ones(rows, 1, dtype=torch.float64)
    probe = Probe.of(features, targets, eps=eps)
    assert len(probe.sigma) == kept
    assert probe.dropped == (pytest.approx(factor * tolerance) if kept == 1 else 0)
    known = Probe.of(features, targets, eps=eps, rank=2)
    assert (len(known.sigma), known.resolved) == (2, kept)
    features[1, 1] = factor * 12 * spectrum.EPS
    assert len(Probe.of(features, targets).sigma) == kept


def test_rows_and_targets_belong_together():
    features, targets = gaussian(6, 3, seed=0), gaussian(5, 1, seed=1)
    with pytest.raises(ValueError, match="5 targets for at least 6 rows"):
        Probe.of(features.split(2), targets)
    with pytest.raises(ValueError, match="5 targets for 4 rows"):
        Probe.of(features[:4], targets)
    with pytest.raises(DegenerateSpectrum, match="no rows"):
        Probe.of([], targets)
    with pytest.raises(DegenerateSpectrum, match="NaN"):
        Probe.of(features[:5] * float("nan"), targets)


# --- Learning curves --------------------------------------------------------------------------------------------------


def gradient_descent(features, y, steps):
    """Weights after each of `steps` steps of size 1/lambda_1 on ||F w - y||^2 / 2 from w = 0."""
    hessian, b = features.T @ features, features.T @ y
    weights, rate = torch.zeros_like(b), 1 / torch.linalg.eigvalsh(hessian)[-1]
    for _ in range(steps):
        weights = weights - rate * (hessian @ weights - b)
        yield weights


def excess_of(features, y, weights):
    """||F w - F w*||^2, twice the excess training loss."""
    best = features @ torch.linalg.lstsq(features, y).solution
    return (features @ weights - best).square().sum().item()


@given(rows=st.integers(3, 20), size=st.integers(1, 8), outputs=st.integers(1, 3), seed=seeds)
def test_excess_loss_in_closed_form(rows, size, outputs, seed):
    """excess(t) = sum_i |c_i|^2 (1 - lambda_i / lambda_1)^(2t), c = U^T Y."""
    features, y = gaussian(rows, min(rows, size), seed=seed), gaussian(rows, outputs, seed=seed + 1)
    closed = Probe.fit(features, y, tolerance=1e-14).excess(torch.arange(1, 13))
    stepwise = [excess_of(features, y, weights) for weights in gradient_descent(features, y, 12)]
    assert stepwise == pytest.approx(closed.tolist(), rel=1e-6, abs=1e-10)


@given(rows=st.integers(2, 20), size=st.integers(1, 8), seed=seeds, scale=st.floats(-3, 3))
def test_doubling_is_gradient_descent(rows, size, seed, scale):
    """w_2t = w_t + P^t w_t with P = I - H/lambda_1 gives the weights after 2^j steps, singular H included; scaling the
    features leaves P, and with it the curve, as they are."""
    features, y = 10**scale * gaussian(rows, size, seed=seed), gaussian(rows, 2, seed=seed + 1)
    hessian, b = features.T @ features, features.T @ y
    largest = torch.linalg.eigvalsh(hessian)[-1]
    power, weights = torch.eye(size, dtype=torch.float64) - hessian / largest, b / largest
    stepwise = dict(enumerate(gradient_descent(features, y, 64), start=1))
    solved = Probe.fit(features, y, tolerance=1e-14).weights(2 ** torch.arange(7))
    for j in range(7):
        assert_close(weights, stepwise[2**j], rtol=1e-9, atol=1e-11 / 10**scale)
        assert_close(solved[j], stepwise[2**j], rtol=1e-9, atol=1e-11 / 10**scale)
        weights, power = weights + power @ weights, power @ power


def test_expected_curve_of_random_labels():
    """The mean of excess(t) over labels with E[c c^T] = I is ||P^t||_F^2 = sum_i (1 - lambda_i / lambda_1)^(2t)."""
    features = gaussian(12, 5, seed=0)
    u, sigma, vh = torch.linalg.svd(features, full_matrices=False)
    p = torch.eye(5, dtype=torch.float64) - features.T @ features / sigma[0] ** 2
    steps = torch.arange(1, 9)
    ((_, expected),) = residuals([(sigma[:, None] * vh, torch.eye(5, dtype=torch.float64))], steps)
    curves = [[excess_of(features, u[:, [i]], w) for w in gradient_descent(features, u[:, [i]], 8)] for i in range(5)]
    norms = [torch.linalg.matrix_power(p, t).square().sum().item() for t in range(1, 9)]
    assert [sum(values) for values in zip(*curves, strict=True)] == pytest.approx(norms, abs=1e-10)
    assert (5 * expected).tolist() == pytest.approx(norms, abs=1e-10)


def test_labels_and_not_kappa_decide_the_speed():
    """kappa = 1e8 with the labels on the first direction is learned in one step; kappa = 4 with the labels on the last
    one keeps (3/4)^2t of the excess. Spectra alone, and RIR with them, say the opposite."""
    u = orthonormal(9, 3, seed=0)
    ill, well = u * tensor(1.0, 1e-2, 1e-4), u * tensor(1.0, 0.8, 0.5)
    assert spectrum.condition_number(ill) == pytest.approx(1e8)
    assert spectrum.condition_number(well) == pytest.approx(4)
    after_ill = [excess_of(ill, u[:, :1], w) for w in gradient_descent(ill, u[:, :1], 10)]
    after_well = [excess_of(well, u[:, 2:], w) for w in gradient_descent(well, u[:, 2:], 10)]
    assert after_ill[0] == pytest.approx(0, abs=1e-20)
    assert after_well == pytest.approx([0.75 ** (2 * t) for t in range(1, 11)])


def excess_curves(factor, c, steps):
    ((residual, expected),) = residuals([(factor, c)], steps)
    return excess(residual), expected


def doubled(factor, c, octaves):
    """Excess after 1, 2, 4, ..., 2^octaves steps by w_2t = w_t + P^t w_t, P^2t = P^t P^t; and mean ||P^t||_F^2."""
    hessian, b = factor.T @ factor, factor.T @ c
    largest = torch.linalg.eigvalsh(hessian)[-1]
    power, w = torch.eye(len(hessian)).double() - hessian / largest, b / largest
    excess, expected = [], []
    for _ in range(octaves + 1):
        excess.append((factor @ w - c).square().sum())
        expected.append(power.square().sum() / len(hessian))
        w, power = w + power @ w, power @ power
    return torch.stack(excess), torch.stack(expected)


@given(spectra(smallest=2, largest=6), seeds)
def test_curves_are_those_of_the_doubling_formula(sigma, seed):
    size = len(sigma)
    factor, c = with_spectrum(sigma, size, size, seed), gaussian(size, 2, seed=seed + 5)
    for curve, expected in zip(excess_curves(factor, c, OCTAVES[:17]), doubled(factor, c, 16), strict=True):
        assert_close(curve, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "sigma",
    [[3.0, 2.0, 1.0, 0.5], [3.0, 2.0, 2.0, 1e-3], [1.0, 1e-2, 0.0, 0.0], [2.0, 1.0, 1 - 1e-9, 0.5]],
    ids=["simple", "repeated", "singular", "nearly equal"],
)
def test_gradients_are_those_of_backpropagation_through_the_doubling(sigma):
    factor = with_spectrum(torch.tensor(sigma, dtype=torch.float64), 4, 4, seed=1)
    c, weights = gaussian(4, 2, seed=2), gaussian(2, 11, seed=3)
    gradients = []
    for curves in (excess_curves(factor.requires_grad_(), c, OCTAVES[:11]), doubled(factor, c, 10)):
        loss = sum(weight @ curve for weight, curve in zip(weights, curves, strict=True))
        gradients.extend(torch.autograd.grad(loss, factor))
    assert_close(*gradients, rtol=1e-6, atol=1e-8)


def test_gradient_is_finite_where_the_largest_eigenvalue_is_repeated():
    factor = with_spectrum(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64), 3, 3, seed=1).requires_grad_()
    excess, expected = excess_curves(factor, gaussian(3, 1, seed=2), OCTAVES[:11])
    (excess.sum() + expected.sum()).backward()
    assert torch.isfinite(factor.grad).all()


@given(
    seeds, st.integers(2, 5), st.integers(1, 3), st.sampled_from([OCTAVES[:4], OCTAVES[:13], torch.tensor([1, 5, 40])])
)
def test_gradients_of_curves_against_finite_differences(seed, size, outputs, grid):
    factor, c = gaussian(size, size + 1, seed=seed).requires_grad_(), gaussian(size, outputs, seed=seed + 1)
    assert torch.autograd.gradcheck(
        lambda f: torch.cat(excess_curves(f, c, grid)), factor, eps=1e-7, atol=1e-3, rtol=1e-3
    )


# --- Leave-one-out predictions ----------------------------------------------------------------------------------------


RIDGES = (1e-6, 1e-4, 1e-2, 0.1)


def refitted(features: torch.Tensor, targets: torch.Tensor, ridge: float) -> torch.Tensor:
    """Fit N times, each without one row; the means and sigma_1 are those of all rows."""
    z, y = features - features.mean(0), targets - targets.mean(0)
    penalty = (ridge**0.5 * torch.linalg.svdvals(z)[0]) * torch.eye(z.shape[1], dtype=z.dtype)
    found = []
    for row in range(len(z)):
        kept = torch.arange(len(z)) != row
        stacked = torch.cat([z[kept], penalty]), torch.cat([y[kept], y.new_zeros(z.shape[1], y.shape[1])])
        q, r = torch.linalg.qr(stacked[0])  # no Gram matrix: a solution by other means
        found.append(z[row] @ torch.linalg.solve_triangular(r, q.mT @ stacked[1], upper=True))
    return torch.stack(found)


@given(seed=seeds, rows=st.integers(2, 12), columns=st.integers(1, 12), outputs=st.integers(1, 3),
       ridge=st.floats(-5, 1), scale=st.floats(-3, 3))  # fmt: skip
def test_it_is_refitting_without_each_row(seed, rows, columns, outputs, ridge, scale):
    x, y = gaussian(rows, columns, seed=seed), gaussian(rows, outputs, seed=seed + 1)
    found = leave_one_out(10**scale * x, y, [10**ridge])[0]
    assert_close(found, refitted(x, y, 10**ridge), rtol=1e-6, atol=1e-6 * y.abs().max().item())


@pytest.mark.parametrize(("rows", "columns"), [(9, 3), (5, 7)])
def test_its_gradient_is_that_of_finite_differences(rows, columns):
    x, y = gaussian(rows, columns, seed=2).requires_grad_(), gaussian(rows, 2, seed=3)
    assert torch.autograd.gradcheck(lambda x: leave_one_out(x, y, [1e-3, 0.1]), [x])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_features_predict_nothing(value):
    x = torch.full((6, 3), value, requires_grad=True)
    found = leave_one_out(x, gaussian(6, 2, seed=0), RIDGES)
    found.sum().backward()
    assert found.shape == (4, 6, 2)
    assert not found.any()
    assert not x.grad.any()


def test_rows_without_information_predict_nothing():
    """Means of the other rows alone would predict the opposite of each row's class."""
    x = torch.zeros(6, 2, dtype=torch.float64)
    x[0, 0] = 1.0  # sigma_1 > 0, and nothing else
    found = leave_one_out(x, torch.eye(3, dtype=torch.float64).repeat(2, 1), [1e9])
    assert found.abs().max() < 1e-8


@pytest.mark.parametrize("rows", [8, 300])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(rows, bad):
    features = torch.randn(rows, 4)
    features[0, 0] = bad
    with pytest.raises(torch.linalg.LinAlgError, match="NaN, infinite"):
        leave_one_out(features, torch.randn(rows, 2), [0.01])
