"""What an attacker meets: gradient descent on a linear probe, solved (see `docs/theory.md`)."""

import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds
from helpers.spectra import tensor
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory import spectrum
from immunization.theory.probe import Probe, residuals


def gradient_descent(features, y, steps):
    """Weights after each of `steps` steps of size 1/lambda_1 on ||F w - y||^2 / 2 from w = 0."""
    hessian, b = features.T @ features, features.T @ y
    weights, rate = torch.zeros_like(b), 1 / torch.linalg.eigvalsh(hessian)[-1]
    for _ in range(steps):
        weights = weights - rate * (hessian @ weights - b)
        yield weights


def excess(features, y, weights):
    """||F w - F w*||^2, twice the excess training loss."""
    best = features @ torch.linalg.lstsq(features, y).solution
    return (features @ weights - best).square().sum().item()


@given(rows=st.integers(3, 20), size=st.integers(1, 8), outputs=st.integers(1, 3), seed=seeds)
def test_excess_loss_in_closed_form(rows, size, outputs, seed):
    """excess(t) = sum_i |c_i|^2 (1 - lambda_i / lambda_1)^(2t), c = U^T Y."""
    features, y = gaussian(rows, min(rows, size), seed=seed), gaussian(rows, outputs, seed=seed + 1)
    closed = Probe.fit(features, y, tolerance=1e-14).excess(torch.arange(1, 13))
    stepwise = [excess(features, y, weights) for weights in gradient_descent(features, y, 12)]
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
    curves = [[excess(features, u[:, [i]], w) for w in gradient_descent(features, u[:, [i]], 8)] for i in range(5)]
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
    after_ill = [excess(ill, u[:, :1], w) for w in gradient_descent(ill, u[:, :1], 10)]
    after_well = [excess(well, u[:, 2:], w) for w in gradient_descent(well, u[:, 2:], 10)]
    assert after_ill[0] == pytest.approx(0, abs=1e-20)
    assert after_well == pytest.approx([0.75 ** (2 * t) for t in range(1, 11)])
