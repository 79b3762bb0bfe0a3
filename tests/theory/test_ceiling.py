"""The ceiling of the relative immunization ratio, and what no invertible map can prevent (see `docs/theory.md`)."""

import math

import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, with_spectrum
from helpers.spectra import ceiling, inverse_root, kappa
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.theory import spectrum


def optimal(k_p, k_h, rank, target, seed):
    """K_P^-1/2 Q Delta R with kappa(Delta^2) = target * kappa(K_P), spread over the first `rank` directions."""
    root = inverse_root(k_p)
    q = torch.linalg.eigh(root @ k_h @ root).eigenvectors.flip(-1)
    size, spread = len(k_p), math.sqrt(target * kappa(k_p))
    delta = torch.ones(size, dtype=torch.float64)
    delta[:rank] = torch.logspace(math.log10(spread), 0, rank, dtype=torch.float64)
    return root @ q * delta @ orthonormal(size, size, seed)


@st.composite
def pairs(draw):
    """Roots X_P [D + 2, D] of full rank and X_H [N, D] of rank 2 to D."""
    size, seed = draw(st.integers(2, 6)), draw(seeds)
    scales = torch.logspace(0, draw(st.floats(0, 1.5)), size, dtype=torch.float64)
    return gaussian(size + 2, size, seed=seed) * scales, gaussian(draw(st.integers(2, size)), size, seed=seed + 1)


@given(pair=pairs(), seed=seeds, decades=st.floats(0, 2))
def test_no_map_exceeds_the_ceiling(pair, seed, decades):
    """kappa(H_H) <= kappa(M) kappa(H_P), hence RIR <= RIR*, for every invertible theta."""
    x_p, x_h = pair
    size = x_p.shape[1]
    theta = with_spectrum(torch.logspace(0, -decades, size, dtype=torch.float64), size, size, seed)
    found = spectrum.rir(x_h @ theta, x_h, x_p @ theta, x_p)["rir"]
    assert found <= ceiling(x_p.T @ x_p, x_h.T @ x_h) * (1 + 1e-6)


@given(pair=pairs(), seed=seeds, share=st.floats(0, 1))
def test_the_ceiling_is_attained_at_any_primary_ratio(pair, seed, share):
    """K_P^-1/2 Q Delta R reaches RIR* for every (ii) in [1/kappa(K_P), 1], rank-deficient K_H included."""
    x_p, x_h = pair
    k_p, k_h = x_p.T @ x_p, x_h.T @ x_h
    target = kappa(k_p) ** (share - 1)
    theta = optimal(k_p, k_h, len(x_h), target, seed)
    found = spectrum.rir(x_h @ theta, x_h, x_p @ theta, x_p)
    assert found["ratio_primary"] == pytest.approx(target, rel=1e-6)
    assert found["rir"] == pytest.approx(ceiling(k_p, k_h), rel=1e-6)


def test_shared_inputs_admit_no_immunization():
    """K_P = K_H: RIR is 1 whatever theta is, and so is the ceiling."""
    x, theta = gaussian(9, 4, seed=0), gaussian(4, 4, seed=1)
    assert spectrum.rir(x @ theta, x, x @ theta, x)["rir"] == 1
    assert ceiling(x.T @ x, x.T @ x) == pytest.approx(1)


@given(stretch=st.floats(1, 1e4), seed=seeds)
def test_ratio_is_unbounded_outside_the_primary_range(stretch, seed):
    """n in the null space of K_P but not of K_H: theta = I + (t - 1) n n^T leaves H_P and stretches kappa(H_H) by at
    least t^2 n^T K_H n / lambda_1(K_H) (rank(K_H) >= 2)."""
    x_p, x_h = gaussian(3, 5, seed=seed), gaussian(8, 5, seed=seed + 1)
    n = torch.linalg.svd(x_p).Vh[-1]
    theta = torch.eye(5, dtype=torch.float64) + (stretch - 1) * torch.outer(n, n)
    assert_close(x_p @ theta, x_p)
    lower = stretch**2 * (x_h @ n).square().sum() / torch.linalg.matrix_norm(x_h, 2) ** 2
    assert spectrum.condition_number(x_h @ theta, rank=5) >= lower.item() * (1 - 1e-6)


@given(seed=seeds, decades=st.floats(0, 4))
def test_direct_solvers_and_whitening_undo_any_invertible_map(seed, decades):
    """Least squares predicts the same through X theta as through X; whitened features have kappa = 1 again."""
    x, y, new = gaussian(12, 4, seed=seed), gaussian(12, 1, seed=seed + 1), gaussian(5, 4, seed=seed + 2)
    theta = with_spectrum(torch.logspace(0, -decades, 4, dtype=torch.float64), 4, 4, seed)
    features = x @ theta
    assert_close(
        new @ theta @ torch.linalg.lstsq(features, y).solution,
        new @ torch.linalg.lstsq(x, y).solution,
        rtol=1e-5,
        atol=1e-6,
    )
    whitened = features @ torch.linalg.inv(torch.linalg.qr(features).R)
    assert spectrum.condition_number(whitened) == pytest.approx(1)


def test_column_scaling_undoes_a_diagonal_map_but_not_a_rotated_one():
    """Why theta ends in a random rotation R: the spectrum is the same, the shortcut of diagonal attackers is gone."""
    x = orthonormal(40, 6, seed=0)
    theta = torch.diag(torch.logspace(0, -3, 6, dtype=torch.float64))
    rotated = theta @ orthonormal(6, 6, seed=1)

    def scaled(features):
        return spectrum.condition_number(features / features.norm(dim=0))

    assert spectrum.condition_number(x @ theta) == pytest.approx(1e6)
    assert spectrum.condition_number(x @ rotated) == pytest.approx(1e6)
    assert scaled(x @ theta) == pytest.approx(1)
    assert scaled(x @ rotated) > 1e4


def test_authors_ratio_is_moved_by_inflating_the_features():
    """Rank-deficient features, doubled: ratios (i) and (ii) of the released code are 4, the rank-aware ones 1."""
    x_p, x_h = gaussian(10, 30, seed=0), gaussian(10, 30, seed=1)
    authors = spectrum.rir(2 * x_h, x_h, 2 * x_p, x_p, conditioning="authors")
    assert (authors["ratio_harmful"], authors["ratio_primary"]) == pytest.approx((4, 4), rel=1e-4)
    assert spectrum.rir(2 * x_h, x_h, 2 * x_p, x_p)["ratio_harmful"] == pytest.approx(1)
