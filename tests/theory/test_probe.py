"""The probe in closed form against gradient descent, least squares and steepest descent done step by step."""

from decimal import Decimal, localcontext
from functools import partial

import pytest
import torch
from helpers.matrices import gaussian, seeds, with_spectrum
from hypothesis import given
from hypothesis import strategies as st

from immunization.errors import DegenerateSpectrum
from immunization.theory import spectrum
from immunization.theory.probe import Probe

FLOOR = 1e-14
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
    torch.testing.assert_close(probe.optimum(), torch.linalg.pinv(f) @ y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(probe.weights(torch.tensor([2**20]))[0], probe.optimum(), rtol=1e-9, atol=1e-11)


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
    torch.testing.assert_close(Probe.fit(f, y, FLOOR).norm_ratio(25), f64(expected), rtol=1e-7, atol=1e-11)


def test_norm_ratio_of_a_flat_spectrum_is_zero_after_one_step():
    ratio = Probe.fit(eye(4), torch.ones(4, 1).double(), FLOOR).norm_ratio(3)
    assert ratio.tolist() == [1, 0, 0, 0]


def test_batches_folded_into_one_factor_give_the_same_probe():
    f, y = problem(0, 3)
    factor, _ = spectrum.triangular_factor(torch.cat([f, y], 1).split(7))
    probe, whole = Probe.fit(factor[:6, :6], factor[:6, 6:], FLOOR), Probe.fit(f, y, FLOOR)
    torch.testing.assert_close(probe.optimum(), whole.optimum())
    torch.testing.assert_close(probe.excess(torch.arange(9)), whole.excess(torch.arange(9)))


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
