"""Spectra, ranks and condition numbers: accuracy where it is hard, conventions, and what has no spectrum."""

import math
import warnings
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from helpers.regularizers import r_ill, r_well
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from immunization.data.task import Split, Task
from immunization.errors import DataError, DegenerateSpectrum
from immunization.theory import regularizers, spectrum


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


def test_long_batches_are_folded_in_blocks():
    """More rows than a cache holds at once: the factor has the same Gram, and the last block may have few rows."""
    features = gaussian(spectrum.CACHED // 4 + 3, 8, seed=0)
    factor, rows = spectrum.triangular_factor(features)
    assert rows == len(features)
    assert_close(factor.T @ factor, features.T @ features, rtol=1e-12, atol=1e-9)
    with pytest.raises(DegenerateSpectrum, match="NaN or infinite"):
        spectrum.triangular_factor(features.index_fill(0, torch.tensor([len(features) - 1]), math.inf))
    large = torch.full((4, 2), 1e308, dtype=torch.float64)  # whose sum is infinite
    assert spectrum.triangular_factor(large)[1] == 4


def test_small_singular_values_survive_where_a_gram_matrix_loses_them():
    """sigma from 1 down to 1e-12: kept to 0.1 % by the triangular factor; the eigenvalues of F^T F are noise there."""
    sigma = torch.logspace(0, -12, 7, dtype=torch.float64)
    features = with_spectrum(sigma, 40, 7, seed=0)
    assert_close(spectrum.singular_values(features.split(9)), sigma, rtol=1e-3, atol=0)
    squared = torch.linalg.eigvalsh(features.T @ features)[0]
    assert abs(squared / sigma[-1] ** 2 - 1) > 1e3


@given(
    rank=st.integers(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), scale=st.floats(-12, 12), seed=seeds
)
def test_numerical_rank_is_numpys(rank, rows, columns, scale, seed):
    features = 10**scale * gaussian(rows, rank, seed=seed) @ gaussian(rank, columns, seed=seed + 1)
    found = spectrum.numerical_rank(torch.linalg.svdvals(features), (rows, columns))
    assert found == np.linalg.matrix_rank(features.numpy()) == rank


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


@given(sigma=spectra(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), seed=seeds)
def test_compress_keeps_the_gram_in_rank_rows(sigma, rows, columns, seed):
    features = with_spectrum(sigma, rows, columns, seed)
    root = spectrum.compress(features.split(5))
    assert root.shape == (len(sigma), columns)
    assert_close(root.T @ root, features.T @ features, rtol=1e-10, atol=1e-12 * sigma[0].item() ** 2)


@given(sigma=spectra(1, 6), rows=st.integers(6, 20), columns=st.integers(6, 12), seed=seeds)
def test_condition_number_is_the_squared_ratio_at_any_rank(sigma, rows, columns, seed):
    kappa = spectrum.condition_number(with_spectrum(sigma, rows, columns, seed))
    assert_close(kappa, (sigma[0] / sigma[-1]).item() ** 2, rtol=1e-9, atol=0)


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


@given(sigma=spectra(), power=st.integers(-300, 300), seed=seeds)
def test_rank_aware_kappa_ignores_scale_and_rotation(sigma, power, seed):
    """c Q F R has the kappa of F for every power of two c and all rotations Q, R, rank-deficient F included."""
    features = with_spectrum(sigma, 12, 10, seed)
    changed = 2.0**power * orthonormal(12, 12, seed + 2) @ features @ orthonormal(10, 10, seed + 3)
    assert_close(spectrum.condition_number(changed), spectrum.condition_number(features), rtol=1e-9, atol=0)


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
    with (
        nullcontext()
        if dtype is torch.float32
        else pytest.warns(UserWarning, match="16 bits show no condition number above")
    ):
        assert_close(spectrum.condition_number(coarse), 9.0, rtol=1e-5, atol=0)
        assert_close(spectrum.condition_number(batch for batch in coarse.split(7)), 9.0, rtol=1e-5, atol=0)
    assert spectrum.condition_number(coarse.double()) > 1e10
    assert spectrum.condition_number(coarse, eps=spectrum.EPS) > 1e10


ROWS = [100, 10**4, 10**5, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (10**6, 10**7))]
STORED = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def streamed(rows: int, sigma: Tensor, change=lambda z: z, dtype=torch.float64):
    """Batches of so many rows with a covariance of these singular values and a mean, changed and then rounded."""
    rotation, chunk = orthonormal(len(sigma), len(sigma), seed=5), 200_000
    for start in range(0, rows, chunk):
        z = gaussian(min(chunk, rows - start), len(sigma), seed=start) * sigma + sigma
        yield change(z @ rotation.T).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_rounding_leaves_noise_that_does_not_grow_with_the_rows(rows):
    """Rank 6 of 8, rounded to float32 and to 16 bits: what rounding adds is a fifth of eps, and no direction."""
    sigma = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    for dtype, eps in STORED.items():
        found = spectrum.singular_values(streamed(rows, sigma, dtype=dtype))
        assert 0.01 * eps < found[6] / found[0] < 0.3 * eps
        assert spectrum.numerical_rank(found, (rows, 8), eps) == 6


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e6])
def test_kappa_of_float32_rows_is_that_of_the_rows_before_rounding(rows, kappa):
    """max(N, D) eps gave 400 for 1e6 with 1e5 rows, and 11 with 1e6; 1e7 rows had rank 0."""
    sigma = torch.logspace(0, -math.log10(kappa) / 2, 8, dtype=torch.float64)
    exact = spectrum.condition_number(streamed(rows, sigma))
    assert exact > kappa
    found = spectrum.condition_number(streamed(rows, sigma, dtype=torch.float32))
    assert found == pytest.approx(exact, rel=1e-4)


DEFICIENT = {
    "twice the same": (7, lambda x: torch.cat([x[:, :7], x[:, 2:3]], 1)),
    "a sum": (7, lambda x: torch.cat([x[:, :7], x[:, :3].sum(1, keepdim=True)], 1)),
    "a difference of large ones": (7, lambda x: torch.cat([x[:, :7] * 1e5, 1e5 * (x[:, :1] - x[:, 1:2])], 1)),
    "one-hot and intercept": (8, lambda x: torch.cat([x[:, :5], torch.eye(3)[x[:, 5:].argmax(1)], x[:, :1] ** 0], 1)),
    "pixels that are 0": (5, lambda x: torch.cat([x[:, :5], 0 * x[:, 5:]], 1)),
    "constants": (6, lambda x: torch.cat([x[:, :5], 0.1 + 0 * x[:, 5:6], 0.3 + 0 * x[:, 6:]], 1)),
}  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", DEFICIENT)
def test_linear_dependence_is_found_in_float32_rows(rows, kind):
    rank, change = DEFICIENT[kind]
    sigma = torch.linspace(2, 1, 8, dtype=torch.float64)
    exact = spectrum.condition_number(streamed(rows, sigma, change), rank=rank)
    found = spectrum.condition_number(streamed(rows, sigma, change, torch.float32))
    assert found == pytest.approx(exact, rel=1e-4)


def test_integers_in_float32_were_not_rounded():
    """One pixel is 1 in one of 2000 rows, the others are up to 255: that direction is as exact as the others."""
    pixels = torch.randint(0, 256, (2000, 300), generator=torch.Generator().manual_seed(0)).float()
    pixels[:, 0] = torch.eye(2000)[0] * 1e-3
    rounded = spectrum.condition_number(pixels)
    pixels[:, 0] = torch.eye(2000)[0]
    assert spectrum.eps_of(pixels) == spectrum.EPS
    pixels[:, 1:] *= 2**14
    assert spectrum.condition_number(pixels) == pytest.approx(spectrum.condition_number(pixels.double()))
    assert rounded < 1e6 < 1e16 < spectrum.condition_number(pixels)
    assert [spectrum.eps_of(torch.full((3, 2), x, dtype=d)) for x, d in [(2.0**23, torch.float32), (0.5, torch.float32),
            (200.0, torch.bfloat16), (3.0, torch.bfloat16)]] == [2.0**-23, 2.0**-23, 2.0**-7, 2.0**-52]  # fmt: skip


def test_a_singular_value_near_the_rounding_of_float32_is_told():
    near, clear = (torch.diag(torch.tensor([1.0, x])) for x in (3e-7, 1e-5))
    with pytest.warns(UserWarning, match="near the rank tolerance"):
        spectrum.condition_number(near)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spectrum.condition_number(near, rank=2)
        spectrum.condition_number(near.double())
        spectrum.condition_number(clear)


def test_features_of_a_net_with_many_rows_are_resolved():
    """1e6 images whose features have kappa 1e6; a folded float32 map loses a direction at 1e-9."""
    images = Split(torch.zeros(1, 1, 1, 1).expand(10**6, 1, 1, 1), torch.zeros(1, dtype=torch.long).expand(10**6))
    task = Task("net", images, images, images, classes=2, width=3, eps=2.0**-23)
    factor = torch.diag(torch.tensor([1.0, 1e-2, 1e-3], dtype=torch.float64))
    assert task.condition_number(factor, task.rank_of(factor)) == pytest.approx(1e6)
    lost = torch.diag(torch.tensor([1.0, 1e-2, 1e-9], dtype=torch.float64))
    assert task.rank_of(lost) == 2
    assert task.condition_number(lost, 3) == task.kappa_bound == pytest.approx(2.0**46 / 3)


@given(scale=st.integers(-8, 8), small=st.sampled_from([1.0, 1e-3, 1e-8]), seed=seeds)
def test_dimensions_outside_do_not_hang_on_the_scales(scale, small, seed):
    """P spans dimensions 0 to 5, H the first two of them and two of the other four."""
    rotation = orthonormal(10, 10, seed=seed)
    p = torch.diag(torch.tensor([1.0, 1.0, 1.0, small, small, small], dtype=torch.float64)) @ rotation[:6]
    h = 10.0**scale * gaussian(4, 4, seed=seed) @ rotation[[0, 1, 8, 9]]
    assert spectrum.dimensions_outside(p, h, rows=100) == 2
    assert spectrum.dimensions_outside(p, h @ rotation[:6].T @ rotation[:6], rows=100) == 0
    assert spectrum.dimensions_outside(rotation, h, rows=100) == 0


def test_dimensions_outside_do_not_hang_on_the_number_of_float32_rows():
    """max(N, D) eps of 1e5 rows took what is 1 % outside for rounding."""
    rotation = orthonormal(4, 4, seed=0)
    p, h = rotation[:3], torch.cat([rotation[:1], 0.01 * rotation[3:]])
    assert spectrum.dimensions_outside(p, h, rows=10**5, eps=2.0**-23) == 1
    assert spectrum.dimensions_outside(p, h[:1].float(), rows=10**5, eps=2.0**-23) == 0


def test_lost_directions_count_as_being_at_the_tolerance():
    sigma = torch.tensor([1.0, 0.1, 1e-3, 0.0], dtype=torch.float64)
    found = [spectrum.condition_number_down_to(sigma, rank, 0.01) for rank in (1, 2, 3, 4)]
    assert found == pytest.approx([100.0, 100.0, 1e4, 1e4])
    assert spectrum.condition_number_down_to(sigma[:2], 3, 0.01) == pytest.approx(1e4)
    with pytest.raises(DegenerateSpectrum, match="all zero"):
        spectrum.condition_number_down_to(torch.zeros(2), 1, 0.01)


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


@pytest.mark.parametrize(
    ("features", "options", "error", "message"),
    [
        (torch.eye(2), {"conditioning": "ridge"}, ValueError, r"'rank' or 'authors'.*'ridge'"),
        *((torch.eye(3), {"rank": rank}, ValueError, "rank must be an integer") for rank in (0, True, 2.5)),
        (torch.eye(3), {"conditioning": "authors", "rank": 2}, ValueError, "takes neither rank nor eps"),
        (torch.empty(0, 3), {"rank": 2}, DegenerateSpectrum, "rank 0"),
        (torch.eye(3, dtype=torch.complex64), {}, DataError, "not complex"),
        (torch.eye(3).double() * 1e200, {"conditioning": "authors"}, DegenerateSpectrum, "overflows"),
        ([torch.ones(4, 3), torch.ones(4, 2)], {}, DataError, "one has 2 columns, those before have 3"),
        *((x, {}, DataError, r"features must be a tensor \[N, D\], or batches of its rows, not ")
          for x in (torch.ones(3), [[1.0, 2.0]], np.ones(3), "rows", None)),
    ],
)  # fmt: skip
def test_what_has_no_condition_number_is_refused(features, options, error, message):
    with pytest.raises(error, match=message):
        spectrum.condition_number(features, **options)


def test_arrays_and_loaders_are_features_too():
    """Whatever holds the rows, kappa and its tolerance are the same: of a loader's batches the inputs count."""
    features = orthonormal(12, 3, seed=0) @ torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    labels, array = torch.arange(12), features.numpy()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=5)
    array.flags.writeable = False  # as of a file that is mapped into memory
    forms = [array, np.asfortranarray(array), array[::-1], pd.DataFrame(array), loader, [(array, labels.numpy())]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in forms:
            assert spectrum.condition_number(form) == pytest.approx(16)
            assert spectrum.rir(form, form, form, form)["rir"] == 1
    low = np.diag(np.array([1, 1e-7, 1e-9])).astype(np.float32)
    assert spectrum.condition_number(low) == spectrum.condition_number(torch.from_numpy(low))
    with pytest.raises(DataError, match="features must be numbers"):
        spectrum.condition_number(np.array([["a", "b"]]))


@pytest.mark.parametrize("other", range(4))
def test_rir_takes_features_of_one_width(other):
    """A baseline of another width is of another layer, or of the inputs; the ratio would mean nothing."""
    given = [torch.randn(20, 8) for _ in range(4)]
    given[other] = [torch.randn(20, 6)]
    with pytest.raises(DataError, match=r"rir: harmful has [68] columns, \w+ has [68]; give features of one width"):
        spectrum.rir(*given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_features_have_no_spectrum(value):
    features = gaussian(6, 3, seed=0)
    features[2, 1] = value
    with pytest.raises(DegenerateSpectrum, match="NaN or infinite"):
        spectrum.condition_number(features)
    functions = (
        r_well,
        lambda x: r_ill(x, 3),
        regularizers.r_well_of_features,
        lambda x: regularizers.r_ill_of_features(x, 3),
        lambda x: regularizers.r_ill_of_features(x, 7),
        lambda x: regularizers.log_condition_number(x, 3),
    )
    for regularizer in functions:  # in training this is what divergence looks like, not a user's flat spectrum
        with pytest.raises(torch.linalg.LinAlgError):
            regularizer(features)


def test_extreme_eigenpairs():
    """Small and large, also where the next eigenvalues are close (as R_well makes them) or rounding noise."""
    small = with_spectrum(torch.tensor([3.0, 2.0, 0.5], dtype=torch.float64), 9, 4, seed=3)
    close = with_spectrum(torch.cat([torch.ones(21), torch.linspace(0, 0.1, 279)]).double().sqrt(), 300, 300, seed=5)
    steep = with_spectrum(torch.logspace(0, -5, 300, dtype=torch.float64), 300, 300, seed=1)
    cases = [(small, -1, 9.0), (small, -3, 0.25), (small, -4, 0.0), (close, -1, 1.0), (steep, -300, 1e-10)]
    for f, index, expected in [*cases, (0 * steep, -1, 0.0)]:
        gram = f.T @ f
        value, vector = spectrum.extreme_eigenpair(gram, index)
        assert value >= 0
        assert_close(value, expected, rtol=1e-12, atol=1e-14)
        assert_close(gram @ vector, expected * vector, rtol=0, atol=1e-13)
        assert_close(vector.norm().item(), 1.0)
