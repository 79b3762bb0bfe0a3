"""R_well, R_ill and log kappa: values and gradients against autograd, finite differences and spectra."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers.autograd import gradient, log_kappa_by_autograd, r_ill_by_autograd, r_well_by_autograd
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from helpers.regularizers import r_ill, r_well
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from immunization.errors import DegenerateSpectrum
from immunization.theory import regularizers

shapes = pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)], ids=["tall", "wide", "square"])
POWERS = (4, 10, math.inf)


@shapes
def test_gradients_against_finite_differences(shape):
    s = gaussian(*shape, seed=5).requires_grad_()
    rank = min(shape)
    for power in POWERS:
        assert gradcheck(lambda x, p=power: r_well(x, rank, p), s)
        assert gradcheck(lambda x, p=power: regularizers.r_well_of_features(x, rank=rank, power=p), s)
        assert gradcheck(lambda x, p=power: regularizers.log_condition_number(x, rank, p), s)
    assert gradcheck(r_ill, s)
    assert gradcheck(regularizers.r_well_of_features, s)
    assert gradcheck(lambda x: regularizers.r_ill_of_features(x, rank), s)


@given(sigma=spectra(2, 5, decades=2.0), seed=seeds, shape=st.sampled_from([(12, 5), (5, 12), (6, 6)]))
def test_gradients_against_autograd(sigma, seed, shape):
    """General S and H = F^T F, full and deficient rank: the closed forms agree with autograd through svdvals."""
    s, k = with_spectrum(sigma, *shape, seed), len(sigma)
    pairs = [
        (r_well, r_well_by_autograd),
        (lambda x: r_ill(x, k), lambda x: r_ill_by_autograd(x, k)),
        (regularizers.r_well_of_features, lambda x: r_well_by_autograd(x.T @ x)),
        (lambda x: regularizers.r_ill_of_features(x, k), lambda x: r_ill_by_autograd(x.T @ x, k)),
    ]
    for p in POWERS:
        pairs += [
            (lambda x, p=p: r_well(x, k, p), lambda x, p=p: r_well_by_autograd(x, k, p)),
            (
                lambda x, p=p: regularizers.r_well_of_features(x, rank=k, power=p),
                lambda x, p=p: r_well_by_autograd(x.T @ x, k, p),
            ),
            (lambda x, p=p: regularizers.log_condition_number(x, k, p), lambda x, p=p: log_kappa_by_autograd(x, k, p)),
        ]
    for exact, naive in pairs:
        assert_close(exact(s), naive(s), rtol=1e-7, atol=1e-10)
        (found,), (expected,) = gradient(exact, s), gradient(naive, s)
        assert_close(found, expected, rtol=1e-6, atol=1e-7 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("shape", "power"),
    [
        *itertools.product([(300, 280), (280, 300), (200, 300)], [10, math.inf]),
        *(((3, 3), power) for power in (2, 6, 8, 10, 64, math.inf)),
    ],
    ids=str,
)
def test_the_slopes_are_those_of_the_spectrum(shape, power):
    """Large and small, wide and tall: dR/dH = V diag(r'(lambda)) V^T, whichever Gram and solver is taken for it."""
    rank = min(shape)
    sigma = torch.logspace(1, -1, rank, dtype=torch.float64)
    f = with_spectrum(sigma, *shape, seed=3)
    _, _, vh = torch.linalg.svd(f, full_matrices=False)
    eigenvalues = sigma**2
    mean = eigenvalues[0] if power == math.inf else eigenvalues.pow(power).mean() ** (1 / power)
    of_well = (mean ** (2 - power) * eigenvalues.pow(power - 1) if power < math.inf else 0 * eigenvalues) - eigenvalues
    of_well = of_well / rank + (eigenvalues[0] * (torch.arange(rank) == 0) if power == math.inf else 0)
    denominator = eigenvalues.square().sum() / (2 * rank) - eigenvalues[-1] ** 2 / 2
    of_ill = (eigenvalues[-1] * (torch.arange(rank) == rank - 1) - eigenvalues / rank) / denominator**2
    values = (mean**2 / 2 - eigenvalues.square().sum() / (2 * rank), 1 / denominator)
    functions = (
        partial(regularizers.r_well_of_features, rank=rank, power=power),
        partial(regularizers.r_ill_of_features, rank=rank),
    )
    sizes = eigenvalues[0] / rank, eigenvalues[0] / rank / denominator**2
    for function, value, weights, size in zip(functions, values, (of_well, of_ill), sizes, strict=True):
        expected = vh.T * weights @ vh
        leaf, theta = f.clone().requires_grad_(), torch.eye(shape[1], dtype=torch.float64, requires_grad=True)
        found = function(f, theta=theta)
        (of_leaf,), (of_theta,) = (torch.autograd.grad(*args) for args in ((function(leaf), leaf), (found, theta)))
        assert_close(found.item(), value.item(), rtol=1e-10, atol=1e-9 * eigenvalues[0].item() ** 2)
        assert_close(of_theta / 2, expected, rtol=0, atol=1e-10 * size.item())
        assert_close(of_leaf / 2, f @ expected, rtol=0, atol=1e-10 * size.item() * sigma[0].item())


def test_features_keep_their_dtype():
    features = gaussian(9, 4, seed=1).float().requires_grad_()
    for value in (regularizers.r_well_of_features(features), regularizers.r_ill_of_features(features, 4)):
        assert value.dtype == torch.float32
        (found,) = torch.autograd.grad(value, features)
        assert found.dtype == torch.float32


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
@pytest.mark.parametrize("gap", [1e-4, 1e-8, 1e-12, 0.0])
def test_gradients_stay_finite_as_extreme_values_merge(gap, shape):
    """Where sigma_1 or sigma_k is (nearly) repeated the closed form picks one subgradient: bounded, no 1/gap."""
    sigma = torch.tensor([2.0, 2.0 - gap, 1.0 + gap, 1.0], dtype=torch.float64)
    features = with_spectrum(sigma, *shape, seed=4)
    for function in (regularizers.r_well_of_features, lambda x: regularizers.r_ill_of_features(x, 4)):
        (found,) = gradient(function, features)
        assert found.norm() < 100
    (found,) = gradient(lambda x: regularizers.log_condition_number(x, 4), features)
    assert_close(found.norm().item(), 2 * math.sqrt(1 / 4 + 1), rtol=1e-6, atol=0)  # |(u_1 v_1^T/2 - u_4 v_4^T) * 2|


def test_rank_above_the_number_of_rows_is_pure_inflation():
    """The released code's k = D with N < D rows: sigma_k = 0, so R_ill = 2 D / ||H||_F^2 and only the norm matters."""
    features = gaussian(5, 9, seed=6)
    naive = lambda x: 2 * 9 / (x @ x.T).square().sum()  # noqa: E731
    assert_close(regularizers.r_ill_of_features(features, 9), naive(features))
    assert_close(gradient(lambda x: regularizers.r_ill_of_features(x, 9), features), gradient(naive, features))


@pytest.mark.parametrize("columns", [1, 2, 5, 20, 100, 300])
def test_flat_spectrum_has_no_r_ill(columns):
    """kappa = 1, exactly (identity) or up to rounding (rotations, whitened features), is an error and not 1e15."""
    whitened = with_spectrum(torch.ones(columns, dtype=torch.float64), 2 * columns, columns, seed=columns)
    for flat in (torch.eye(columns, dtype=torch.float64), orthonormal(columns, columns, seed=0), whitened, whitened.T):
        with pytest.raises(DegenerateSpectrum, match="R_ill is infinite"):
            r_ill(flat)
        with pytest.raises(DegenerateSpectrum, match="R_ill is infinite"):
            regularizers.r_ill_of_features(1e-3 * flat, columns)


def test_the_edges_of_r_ill():
    """A spread of 1e-8 is far above rounding: R_ill is large, and right. Rank 1, rank 0 and an overflow have none."""
    nearly = torch.diag(torch.tensor([1 + 1e-8, 1.0], dtype=torch.float64))
    assert_close(regularizers.r_ill_of_features(nearly, 2).item(), 1e8, rtol=1e-6, atol=0)
    with pytest.raises(DegenerateSpectrum, match="R_ill is infinite"):
        regularizers.r_ill_of_features(torch.ones(4, 3, dtype=torch.float64), 1)
    with pytest.raises(DegenerateSpectrum, match="rank 0"):
        regularizers.r_ill_of_features(torch.zeros(5, 3, dtype=torch.float64), 3)
    with pytest.raises(torch.linalg.LinAlgError, match="overflowing"):
        regularizers.r_ill_of_features(1e90 * gaussian(6, 3, seed=0), 3)


def test_log_condition_number_needs_its_rank():
    features = torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))
    assert_close(regularizers.log_condition_number(features, 2).item(), math.log(4))
    with pytest.raises(DegenerateSpectrum, match="fewer than 3"):
        regularizers.log_condition_number(features, 3)


@pytest.mark.parametrize("scale", [1e39, 1e-43])
def test_features_whose_r_ill_leaves_the_range_of_floats_are_named(scale):
    features = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match="leaves the range of float64"):
        regularizers.r_ill_slope((scale * features).T @ (scale * features), 5)


@pytest.mark.parametrize("power", POWERS)
def test_a_value_too_large_for_float32_is_infinite(power):
    """And no error of its own: the training sees a loss that is not finite, and says that it diverged."""
    features = (1e12 * gaussian(12, 5, seed=1)).float()
    assert regularizers.r_well_of_features(features, power=power).item() == math.inf
