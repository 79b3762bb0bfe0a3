"""Spectra, ranks and condition numbers, and gradients of regularizers against independent ones."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from immunization.errors import DegenerateSpectrum
from immunization.theory import eigenpairs, preconditioning, products, regularizers, spectrum

few = settings(max_examples=30)
shapes = pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)], ids=["tall", "wide", "square"])


def gradient(function, *inputs):
    """Gradients of a scalar function with respect to all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


# --- Spectra and ranks ------------------------------------------------------------------------------------------------


@few
@given(rows=st.integers(1, 30), columns=st.integers(1, 12), cuts=st.lists(st.integers(0, 30), max_size=6), seed=seeds)
def test_streamed_factor_is_that_of_the_whole(rows, columns, cuts, seed):
    """TSQR: any split into batches, empty ones included, in any order of sizes, folds into the same Gram matrix."""
    features = gaussian(rows, columns, seed=seed)
    batches = torch.tensor_split(features, sorted(cuts))
    factor, count = spectrum.triangular_factor(batch for batch in batches)
    assert count == rows
    assert factor.shape == (min(rows, columns), columns)
    assert_close(factor.T @ factor, features.T @ features)
    sigma = spectrum.singular_values(batches)
    assert_close(sigma, torch.from_numpy(np.linalg.svd(features.numpy(), compute_uv=False)))
    assert_close(sigma, spectrum.singular_values(features))


def test_streaming_holds_one_batch_at_a_time():
    """The iterable is consumed lazily, and float32 or float16 batches are folded in float64."""

    def batches():
        for seed in range(50):
            yield gaussian(7, 20, seed=seed).half()

    whole = torch.cat([batch.double() for batch in batches()])
    assert_close(spectrum.singular_values(batches()), torch.linalg.svdvals(whole))


def test_small_singular_values_survive_where_a_gram_matrix_loses_them():
    """sigma from 1 down to 1e-12: kept to 0.1 % by the triangular factor; the eigenvalues of F^T F are noise there."""
    sigma = torch.logspace(0, -12, 7, dtype=torch.float64)
    features = with_spectrum(sigma, 40, 7, seed=0)
    assert_close(spectrum.singular_values(features.split(9)), sigma, rtol=1e-3, atol=0)
    squared = torch.linalg.eigvalsh(features.T @ features)[0]
    assert abs(squared / sigma[-1] ** 2 - 1) > 1e3


@few
@given(
    rank=st.integers(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), scale=st.floats(-12, 12), seed=seeds
)
def test_numerical_rank_is_numpys(rank, rows, columns, scale, seed):
    features = 10**scale * gaussian(rows, rank, seed=seed) @ gaussian(rank, columns, seed=seed + 1)
    found = spectrum.numerical_rank(torch.linalg.svdvals(features), (rows, columns))
    assert found == np.linalg.matrix_rank(features.numpy()) == rank


@few
@given(rank=st.integers(1, 6), seed=seeds)
def test_rank_of_features_that_were_float32(rank, seed):
    """Rounding to float32 leaves singular values near 1e-7, which only float32's epsilon recognizes as noise."""
    features = with_spectrum(torch.linspace(2, 1, rank, dtype=torch.float64), 20, 9, seed).float().double()
    assert len(spectrum.compress(features, eps=torch.finfo(torch.float32).eps)) == rank
    assert len(spectrum.compress(features)) == 9


def test_rank_of_nothing():
    assert spectrum.numerical_rank(torch.zeros(3), (5, 3)) == 0
    assert spectrum.numerical_rank(torch.zeros(0), (0, 3)) == 0
    assert spectrum.compress(torch.zeros(5, 3)).shape == (0, 3)


@few
@given(sigma=spectra(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), seed=seeds)
def test_compress_keeps_the_gram_in_rank_rows(sigma, rows, columns, seed):
    features = with_spectrum(sigma, rows, columns, seed)
    root = spectrum.compress(features.split(5))
    assert root.shape == (len(sigma), columns)
    assert_close(root.T @ root, features.T @ features, rtol=1e-10, atol=1e-12 * sigma[0].item() ** 2)


def test_extreme_eigenpairs():
    gram = with_spectrum(torch.tensor([3.0, 2.0, 0.5], dtype=torch.float64), 9, 4, seed=3)
    gram = gram.T @ gram
    for index, expected in ((-1, 9.0), (-3, 0.25), (-4, 0.0)):
        value, vector = eigenpairs.extreme_eigenpair(gram, index)
        assert value >= 0
        assert_close(value, expected, rtol=1e-12, atol=1e-14)
        assert_close(gram @ vector, expected * vector, rtol=0, atol=1e-13)
        assert_close(vector.norm().item(), 1.0)


@pytest.mark.parametrize("second", [0.5, 0.999, 1 - 1e-9, 1.0, 0.0], ids="second={}".format)
def test_the_largest_eigenpair_of_a_large_matrix(second):
    """By Lanczos iterations, also where the next eigenvalues are close (as R_well makes them) or all others are 0."""
    size = eigenpairs.LANCZOS + 44
    sigma = (
        torch.cat([torch.ones(1), torch.full((20,), second), second * torch.linspace(0, 0.1, size - 21)])
        .double()
        .sqrt()
    )
    gram = with_spectrum(sigma, size, size, seed=5)
    gram = gram.T @ gram
    value, vector = eigenpairs.extreme_eigenpair(gram, -1)
    assert_close(value, 1.0, rtol=1e-12, atol=0)
    assert_close(gram @ vector, vector, rtol=0, atol=1e-12)
    assert_close(vector.norm().item(), 1.0)


def test_an_eigenpair_of_a_large_zero_matrix():
    value, vector = eigenpairs.extreme_eigenpair(torch.zeros(300, 300, dtype=torch.float64), -1)
    assert value == 0
    assert_close(vector.norm().item(), 1.0)


# --- Condition numbers ------------------------------------------------------------------------------------------------


@few
@given(sigma=spectra(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), seed=seeds)
def test_condition_number_is_the_squared_ratio_at_any_rank(sigma, rows, columns, seed):
    kappa = spectrum.condition_number(with_spectrum(sigma, rows, columns, seed))
    assert_close(kappa, (sigma[0] / sigma[-1]).item() ** 2, rtol=1e-9, atol=0)


@few
@given(seed=seeds, columns=st.integers(1, 8))
def test_condition_number_is_numpys_at_full_rank(seed, columns):
    features = gaussian(columns + 4, columns, seed=seed)
    expected = np.linalg.cond(features.numpy()) ** 2
    assert_close(spectrum.condition_number(features), expected, rtol=1e-9, atol=0)
    assert_close(spectrum.condition_number(features, conditioning="authors"), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("sigma", "kappa"),
    [([2.0, 2.0, 2.0], 1.0), ([2.0, 2.0, 1.0], 4.0), ([2.0, 1.0, 1.0], 4.0), ([1.0 + 1e-12, 1.0, 1.0 - 1e-12], 1.0)],
)
def test_condition_number_of_repeated_and_nearly_repeated_values(sigma, kappa):
    features = with_spectrum(torch.tensor(sigma, dtype=torch.float64), 9, 5, seed=1)
    assert_close(spectrum.condition_number(features), kappa, rtol=1e-11, atol=0)


@few
@given(sigma=spectra(), power=st.integers(-300, 300), seed=seeds)
def test_rank_aware_kappa_ignores_scale_and_rotation(sigma, power, seed):
    """c Q F R has the kappa of F for every power of two c and all rotations Q, R, rank-deficient F included."""
    features = with_spectrum(sigma, 12, 10, seed)
    changed = 2.0**power * orthonormal(12, 12, seed + 2) @ features @ orthonormal(10, 10, seed + 3)
    assert_close(spectrum.condition_number(changed), spectrum.condition_number(features), rtol=1e-9, atol=0)


@few
@given(sigma=spectra(2, 6, decades=2.0), seed=seeds)
def test_authors_kappa_of_rank_deficient_features_is_a_scale(sigma, seed):
    """Null eigenvalues count as 1e-6: the value is sigma_1^2 / 1e-6, whatever sigma_k is; doubling F makes it 4x."""
    features = with_spectrum(10 * sigma, 12, 30, seed)
    kappa = spectrum.condition_number(features, conditioning="authors")
    assert_close(kappa, (10 * sigma[0].item()) ** 2 / 1e-6, rtol=1e-3, atol=0)
    doubled = spectrum.condition_number(2 * features, conditioning="authors")
    assert_close(doubled / kappa, 4.0, rtol=1e-3, atol=0)


@pytest.mark.parametrize("seed", range(10))
def test_authors_kappa_of_one_null_direction_does_not_hang_on_its_rounding(seed):
    """Eigenvalues of H + 1e-6 I as computed put it below 1e-6 half of the time, and kappa then at 100."""
    features = with_spectrum(torch.tensor([10.0, 3.0, 1.0], dtype=torch.float64), 12, 4, seed)
    kappa = spectrum.condition_number(features, conditioning="authors")
    assert_close(kappa, 1e8, rtol=1e-6, atol=0)


def test_known_rank_is_kept_where_the_tolerance_would_lose_it():
    """An invertible theta keeps the rank of the inputs; its features may fall below the tolerance all the same."""
    features = torch.diag(torch.tensor([1.0, 1e-3, 1e-17], dtype=torch.float64))
    assert_close(spectrum.condition_number(features), 1e6)
    assert_close(spectrum.condition_number(features, rank=3), 1e34)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_below_double_precision_are_ranked_by_single(dtype):
    """Rank 2 in float32 leaves rounding noise, which float64's epsilon would count as eight more directions."""
    exact = with_spectrum(torch.tensor([3.0, 1.0], dtype=torch.float64), 30, 10, seed=1)
    coarse = exact.float() if dtype is torch.float32 else torch.diag(torch.tensor([3.0, 1.0, 1e-7])).to(dtype)
    assert_close(spectrum.condition_number(coarse), 9.0, rtol=1e-5, atol=0)
    assert_close(spectrum.condition_number(batch for batch in coarse.split(7)), 9.0, rtol=1e-5, atol=0)
    assert spectrum.condition_number(coarse.double()) > 1e10
    assert spectrum.condition_number(coarse, eps=spectrum.EPS) > 1e10


def test_condition_number_beyond_float64_is_infinite():
    sigma = torch.tensor([1.0, 1e-200, 0.0], dtype=torch.float64)
    assert spectrum.condition_number_of(sigma, 2) == math.inf
    assert spectrum.condition_number_of(sigma, 3) == math.inf


def test_rir_and_its_parts():
    """Eq. 15: kappas 36 and 9 of the harmful, 4 and 16 of the primary features give 4 / (1/4) = 16."""
    harmful, harmful_0, primary, primary_0 = (torch.diag(torch.tensor([s, 1.0])) for s in (6.0, 3.0, 2.0, 4.0))
    assert spectrum.rir(harmful, harmful_0, primary, primary_0) == pytest.approx(
        {"rir": 16.0, "ratio_harmful": 4.0, "ratio_primary": 0.25}
    )
    authors = spectrum.rir(harmful, harmful_0, primary, primary_0, conditioning="authors")
    assert authors["rir"] == pytest.approx(16.0, rel=1e-4)


@pytest.mark.parametrize("conditioning", ["rank", "authors"])
@pytest.mark.parametrize("features", [torch.zeros(4, 3), torch.zeros(0, 3), []], ids=["zero", "no rows", "no batches"])
def test_no_condition_number_without_a_spectrum(features, conditioning):
    with pytest.raises(DegenerateSpectrum):
        spectrum.condition_number(features, conditioning=conditioning)


def test_unknown_conditioning_is_refused():
    with pytest.raises(ValueError, match=r"'rank' or 'authors'.*'ridge'"):
        spectrum.condition_number(torch.eye(2), conditioning="ridge")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_features_have_no_spectrum(value):
    features = gaussian(6, 3, seed=0)
    features[2, 1] = value
    with pytest.raises(DegenerateSpectrum, match="NaN or infinite"):
        spectrum.condition_number(features)
    functions = (
        regularizers.r_well,
        lambda x: regularizers.r_ill(x, 3),
        regularizers.r_well_of_features,
        lambda x: regularizers.r_ill_of_features(x, 3),
        lambda x: regularizers.r_ill_of_features(x, 7),
        lambda x: regularizers.log_condition_number(x, 3),
    )
    for regularizer in functions:  # in training this is what divergence looks like, not a user's flat spectrum
        with pytest.raises(torch.linalg.LinAlgError):
            regularizer(features)


def test_overflowing_hessian_is_not_mistaken_for_a_flat_one():
    with pytest.raises(torch.linalg.LinAlgError, match="overflowing"):
        regularizers.r_ill_of_features(1e90 * gaussian(6, 3, seed=0), 3)


# --- Regularizers: values and gradients -------------------------------------------------------------------------------


POWERS = (4, 10, math.inf)


def r_well_by_autograd(s, rank=None, power=math.inf):
    sigma = torch.linalg.svdvals(s)[: rank or min(s.shape)]
    mean = sigma[0] if power == math.inf else sigma.pow(power).mean() ** (1 / power)
    return mean**2 / 2 - sigma.square().sum() / (2 * (rank or min(s.shape)))


def log_kappa_by_autograd(s, rank, power):
    sigma = torch.linalg.svdvals(s)[:rank]
    if power == math.inf:
        return 2 * (sigma[0] / sigma[-1]).log()
    return (sigma.pow(2 * power).mean().log() + sigma.pow(-2 * power).mean().log()) / power


def r_ill_by_autograd(s, rank):
    sigma = torch.linalg.svdvals(s)
    return 1 / (sigma.square().sum() / (2 * rank) - sigma[rank - 1] ** 2 / 2)


@shapes
def test_gradients_against_finite_differences(shape):
    s = gaussian(*shape, seed=5).requires_grad_()
    rank = min(shape)
    for power in POWERS:
        assert gradcheck(lambda x, p=power: regularizers.r_well(x, rank, p), s)
        assert gradcheck(lambda x, p=power: regularizers.r_well_of_features(x, rank=rank, power=p), s)
        assert gradcheck(lambda x, p=power: regularizers.log_condition_number(x, rank, p), s)
    assert gradcheck(regularizers.r_ill, s)
    assert gradcheck(regularizers.r_well_of_features, s)
    assert gradcheck(lambda x: regularizers.r_ill_of_features(x, rank), s)


@few
@given(sigma=spectra(2, 5, decades=2.0), seed=seeds, shape=st.sampled_from([(12, 5), (5, 12), (6, 6)]))
def test_gradients_against_autograd(sigma, seed, shape):
    """General S and H = F^T F, full and deficient rank: the closed forms agree with autograd through svdvals."""
    s, k = with_spectrum(sigma, *shape, seed), len(sigma)
    pairs = [
        (regularizers.r_well, r_well_by_autograd),
        (lambda x: regularizers.r_ill(x, k), lambda x: r_ill_by_autograd(x, k)),
        (regularizers.r_well_of_features, lambda x: r_well_by_autograd(x.T @ x)),
        (lambda x: regularizers.r_ill_of_features(x, k), lambda x: r_ill_by_autograd(x.T @ x, k)),
    ]
    for p in POWERS:
        pairs += [
            (lambda x, p=p: regularizers.r_well(x, k, p), lambda x, p=p: r_well_by_autograd(x, k, p)),
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


@pytest.mark.parametrize("shape", [(300, 280), (280, 300), (200, 300), (3, 3)], ids=str)
@pytest.mark.parametrize("power", [2, 6, 8, 10, 64, math.inf])
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
    slopes = (partial(regularizers.r_well_slope, rank=rank, power=power), partial(regularizers.r_ill_slope, rank=rank))
    sizes = eigenvalues[0] / rank, eigenvalues[0] / rank / denominator**2
    for slope_of, value, weights, size in zip(slopes, values, (of_well, of_ill), sizes, strict=True):
        found, slope = regularizers.hessian_slope(f, partial(slope_of, weight=0.5))
        expected = vh.T * weights @ vh / 2
        assert_close(found, value.item(), rtol=1e-10, atol=1e-9 * eigenvalues[0].item() ** 2)
        assert_close(slope, expected, rtol=0, atol=1e-10 * size.item())


@pytest.mark.parametrize("shape", [(300, 300), (270, 300), (20, 30)])
def test_a_triangular_root_is_multiplied_as_any_matrix(shape):
    root, theta = gaussian(*shape, seed=0).triu(), gaussian(shape[1], shape[1], seed=1)
    assert_close(products.triangular_product(root, theta), root @ theta)
    assert_close(products.triangular_product(root, theta.T), root @ theta.T)
    assert_close(products.triangular_product(root.float(), theta.float()), root.float() @ theta.float())


def test_the_smallest_pair_of_a_large_matrix_keeps_its_digits():
    """Cholesky and Lanczos on the inverse; a singular matrix is left to LAPACK's eigensolver."""
    sigma = torch.logspace(0, -5, 300, dtype=torch.float64)
    f = with_spectrum(sigma, 300, 300, seed=1)
    value, v = eigenpairs.extreme_eigenpair(f.T @ f, -300)
    assert value == pytest.approx(1e-10, rel=1e-5)
    assert (f @ v).norm().item() == pytest.approx(1e-5, rel=1e-5)
    value, v = eigenpairs.extreme_eigenpair(f[:290].T @ f[:290], -300)
    assert value < 1e-15
    assert v.norm().item() == pytest.approx(1)


def test_upstream_gradient_scales_the_regularizers():
    s = gaussian(7, 4, seed=2)
    for function in (regularizers.r_well, regularizers.r_ill, regularizers.r_well_of_features):
        (plain,), (tripled,) = gradient(function, s), gradient(lambda x, f=function: 3 * f(x), s)
        assert_close(tripled, 3 * plain)


def test_rank_of_r_ill_is_found_where_it_is_not_given():
    s = with_spectrum(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), 8, 6, seed=0)
    assert_close(regularizers.r_ill(s), regularizers.r_ill(s, 3))
    assert_close(regularizers.r_ill(s).item(), 1 / (14 / 6 - 1 / 2))


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
            regularizers.r_ill(flat)
        with pytest.raises(DegenerateSpectrum, match="R_ill is infinite"):
            regularizers.r_ill_of_features(1e-3 * flat, columns)


def test_nearly_flat_spectrum_is_not_refused():
    """A spread of 1e-8 is far above rounding: R_ill is large, and right."""
    features = torch.diag(torch.tensor([1 + 1e-8, 1.0], dtype=torch.float64))
    assert_close(regularizers.r_ill_of_features(features, 2).item(), 1e8, rtol=1e-6, atol=0)


def test_r_ill_of_zero_and_of_rank_one():
    for s in (torch.zeros(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(DegenerateSpectrum):
            regularizers.r_ill(s)


def test_log_condition_number_needs_its_rank():
    features = torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))
    assert_close(regularizers.log_condition_number(features, 2).item(), math.log(4))
    with pytest.raises(DegenerateSpectrum, match="fewer than 3"):
        regularizers.log_condition_number(features, 3)


# --- Preconditioned gradients -----------------------------------------------------------------------------------------


def each_regularizer(rank):
    return {
        "r_well": (regularizers.r_well_of_features, lambda h: r_well_by_autograd(h)),
        "r_ill": (
            lambda f, theta=None: regularizers.r_ill_of_features(f, rank, theta),
            lambda h: r_ill_by_autograd(h, rank),
        ),
    }


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
@pytest.mark.parametrize("rows", [20, 6])
def test_cancelled_gradient_is_the_inverse_of_k_times_autograds(name, rows):
    """K^-1 grad_theta R(theta^T K theta), K^-1 by a solve, against 2 theta (...), in which K has cancelled."""
    x, theta = gaussian(rows, 6, seed=1), gaussian(6, 6, seed=2)
    exact, naive = each_regularizer(6)[name]
    k = x.T @ x
    (plain,) = gradient(lambda t: naive(t.T @ k @ t), theta)
    (found,) = gradient(lambda t: exact(x @ t, t), theta)
    assert_close(found, torch.linalg.solve(k, plain), rtol=1e-6, atol=1e-7 * found.abs().max().item())


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
@pytest.mark.parametrize("rows", [20, 4])
def test_ridge_and_pseudo_inverse_of_a_regularizer(name, rows):
    """The same through `preconditioned_product`: (K + r I)^-1 grad and K^+ grad, for regular and singular K."""
    x, theta = gaussian(rows, 6, seed=1), gaussian(6, 6, seed=2)
    exact, naive = each_regularizer(min(rows, 6))[name]
    k = x.T @ x
    (plain,) = gradient(lambda t: naive(t.T @ k @ t), theta)
    inverses = {
        "ridge": torch.linalg.inv(k + 0.3 * torch.eye(6, dtype=k.dtype)),
        "pinv": torch.linalg.pinv(k, hermitian=True),
    }
    for mode, inverse in inverses.items():
        (found,) = gradient(lambda t, m=mode: exact(preconditioning.preconditioned_product(x, t, m, ridge=0.3)), theta)
        assert_close(found, inverse @ plain, rtol=1e-6, atol=1e-7 * found.abs().max().item())


@pytest.mark.parametrize("name", ["r_well", "r_ill"])
def test_pseudo_inverse_projects_the_cancelled_gradient(name):
    """Singular K: K^+ grad = Pi 2 theta (...), Pi the projector on range(K); both move H = theta^T K theta alike."""
    x, theta = gaussian(4, 6, seed=1), gaussian(6, 6, seed=2)
    exact, _ = each_regularizer(4)[name]
    (cancelled,) = gradient(lambda t: exact(x @ t, t), theta)
    (projected,) = gradient(lambda t: exact(preconditioning.preconditioned_product(x, t, "pinv")), theta)
    assert_close(projected, torch.linalg.pinv(x) @ x @ cancelled)
    assert_close(x @ projected, x @ cancelled)


@pytest.mark.parametrize("rows", [20, 4])
def test_preconditioned_product_of_any_upstream(rows):
    """Forward x theta; backward the gradient x^T g times the inverse on either side; x receives none."""
    x, theta, upstream = gaussian(rows, 5, seed=1), gaussian(5, 5, seed=2), gaussian(rows, 5, seed=3)
    k, plain = x.T @ x, x.T @ upstream
    inverse = torch.linalg.inv(k + 2 * torch.eye(5, dtype=k.dtype))
    expected = {
        ("none", "input"): plain,
        ("ridge", "input"): inverse @ plain,
        ("ridge", "output"): plain @ inverse,
        ("pinv", "input"): torch.linalg.pinv(k, hermitian=True) @ plain,
    }
    for (mode, side), gradient_expected in expected.items():
        leaf = theta.clone().requires_grad_()
        product = preconditioning.preconditioned_product(x, leaf, mode, ridge=2.0, side=side)
        assert_close(product, x @ theta)
        product.backward(upstream)
        assert_close(leaf.grad, gradient_expected)


@pytest.mark.parametrize(("mode", "side"), [("cancelled", "input"), ("pinv", "output")])
def test_preconditioners_that_do_not_exist_are_refused(mode, side):
    with pytest.raises(ValueError, match=mode if mode == "cancelled" else side):
        preconditioning.preconditioned_product(gaussian(5, 3, seed=1), gaussian(3, 3, seed=2), mode, side=side)


@pytest.mark.parametrize("rows", [20, 4], ids=["K", "push-through"])
def test_singular_k_without_ridge_is_named(rows):
    x = gaussian(rows, 2, seed=1) @ gaussian(2, 5, seed=2)
    theta = gaussian(5, 5, seed=3).requires_grad_()
    product = preconditioning.preconditioned_product(x, theta, "ridge", ridge=0.0)
    with pytest.raises(DegenerateSpectrum, match=r"K is singular and method\.ridge=0 too small"):
        product.sum().backward()


def test_zero_features_have_no_r_ill():
    zero = torch.zeros(5, 3, dtype=torch.float64)
    for function in (regularizers.r_ill, lambda f: regularizers.r_ill_of_features(f, 3)):
        with pytest.raises(DegenerateSpectrum, match="rank 0"):
            function(zero)


def test_features_whose_gram_overflows_are_named():
    with pytest.raises(DegenerateSpectrum, match="overflows"):
        spectrum.condition_number(torch.eye(3, dtype=torch.float64) * 1e200, conditioning="authors")
