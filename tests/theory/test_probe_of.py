"""The probe of features and targets, whole or in batches, against numpy's least squares."""

import numpy as np
import pytest
import torch
from helpers.matrices import gaussian, seeds, with_spectrum
from hypothesis import given
from hypothesis import strategies as st

from immunization.errors import DegenerateSpectrum
from immunization.theory.probe import Probe
from immunization.theory.spectrum import EPS


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
    torch.testing.assert_close(whole.excess(torch.arange(9)), probe.excess(torch.arange(9)), rtol=1e-9, atol=1e-12)


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
    features[1, 1] = factor * 12 * EPS
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
