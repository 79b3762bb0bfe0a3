"""The closed form of the largest RIR: it attains the ceiling, nothing exceeds it, and what it cannot do is said."""

import math

import pytest
import torch
from helpers.matrices import gaussian, seeds, spectra, with_spectrum
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from immunization.data import digits, house_prices
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError, DataError, DegenerateSpectrum
from immunization.evaluation import Alignment, Ceiling, Comparison, PrimaryPerformance, RelativeRatio
from immunization.methods import ClosedForm
from immunization.methods.linear_map import optimal_map
from immunization.models import Linear
from immunization.theory import spectrum

pytestmark = pytest.mark.trains

kappa = spectrum.condition_number
quick = settings(max_examples=25)


def roots(seed, size, rank=None, decades=1.5):
    """Two [N, D] matrices with unrelated singular vectors; the harmful one has rank `rank`."""
    primary = torch.logspace(0, -decades, size, dtype=torch.float64)
    return with_spectrum(primary, 2 * size, size, seed), with_spectrum(primary[:rank], 2 * size, size, seed + 7)


def ceiling(p, h, rank):
    inner = torch.linalg.svdvals(h @ torch.linalg.pinv(p))
    return spectrum.condition_number_of(inner, rank) * kappa(p) / kappa(h, rank=rank)


def immunized(pair, method, seed=0):
    torch.manual_seed(seed)
    model = Linear(pair)
    method.setup(model, pair)
    method.finish(model)
    return model


def task(name, x, generator):
    y = torch.randn(len(x), generator=generator, dtype=torch.float64)
    split = Split(x, y)
    return Task(name, split, split, split)


def pair_of(p, h):
    g = torch.Generator().manual_seed(0)
    return TaskPair("random", task("p", p, g), task("h", h, g))


@quick
@given(
    seeds,
    st.integers(2, 8),
    st.floats(0, 1),
    st.sampled_from(["geometric", "linear", "step"]),
    st.booleans(),
    st.integers(2, 8),
)
def test_attains_the_ceiling_at_any_primary_ratio(seed, size, share, spread, rotate, rank):
    rank = min(rank, size)
    p, h = roots(seed, size, rank)
    ratio = kappa(p) ** -share  # from 1 down to 1 / kappa
    theta = optimal_map(p, h, ratio, spread=spread, generator=torch.Generator().manual_seed(seed) if rotate else None)
    after = spectrum.rir(h @ theta, h, p @ theta, p)
    harmful = kappa(h @ theta, rank=rank) / kappa(h, rank=rank)
    assert after["ratio_primary"] == pytest.approx(ratio, rel=1e-6)
    assert harmful / after["ratio_primary"] == pytest.approx(ceiling(p, h, rank), rel=1e-6)
    assert (p @ theta).norm() == pytest.approx(p.norm().item())  # the mean square of the features


def test_in_a_run_the_evaluation_finds_the_ceiling_attained():
    pair = digits(seed=0, common_range=True)
    model = immunized(pair, ClosedForm())
    comparison = Comparison(pair, model)
    metrics = Ceiling()(comparison).metrics | RelativeRatio()(comparison).metrics
    assert metrics["rir"] == pytest.approx(metrics["ceiling/rir"], rel=1e-6)
    assert metrics["ratio_primary"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("preparation", "dim", "kappas", "ceiling"),
    [
        ({"normalize": "each", "keep_id": True}, 71, (207.6, 156.9, 49.11), 64.99),
        ({"normalize": "shared", "keep_id": False}, 74, (8654, 6206, 4.346e6), 6.059e6),
    ],
)
def test_published_ceilings_of_house_prices_are_attained(data_dir, preparation, dim, kappas, ceiling):
    """kappa of K_P, of K_H and of M = K_P^-1/2 K_H K_P^-1/2, to the four digits that are published."""
    options = {"root": str(data_dir / "house_prices"), "download": False, "test_fraction": 0.0, "val_fraction": 0.0}
    pair = house_prices(seed=0, **options, **preparation, common_range=True)
    assert (len(pair.primary.train), len(pair.harmful.train), pair.dim) == (309, 1151, dim)
    comparison = Comparison(pair, immunized(pair, ClosedForm()))
    metrics = {}
    for measure in (RelativeRatio(), Ceiling(), Alignment()):
        metrics |= measure(comparison).metrics
    names = ("kappa_primary_baseline", "kappa_harmful_baseline", "alignment/kappa_M", "ceiling/rir")
    assert [float(f"{metrics[name]:.4g}") for name in names] == [*kappas, ceiling]
    assert metrics["rir"] == pytest.approx(metrics["ceiling/rir"], rel=1e-4)


def test_head_keeps_the_predictions_of_least_squares_on_the_inputs():
    pair = digits(seed=0)
    model = immunized(pair, ClosedForm())
    metrics = PrimaryPerformance()(Comparison(pair, model)).metrics
    assert metrics["primary/head_accuracy"] == metrics["primary/accuracy_baseline"]


def test_outside_of_the_primary_range_the_primary_ratio_still_holds_and_a_flag_says_so():
    pair, method = digits(seed=0), ClosedForm(primary_ratio=0.1)
    model = immunized(pair, method)
    metrics = RelativeRatio()(Comparison(pair, model)).metrics
    assert metrics["ratio_primary"] == pytest.approx(0.1, rel=1e-6)
    assert "outside of range(K_P)" in method.flags["common_range"]
    assert torch.linalg.matrix_rank(model.extractor.theta) == pair.dim
    # directions without primary inputs stay orthogonal to the primary features, and keep their length
    p = pair.primary.root
    null = torch.linalg.svd(p).Vh[len(p) :]
    features = null @ model.extractor.theta
    assert_close(features @ features.T, torch.eye(len(null), dtype=torch.float64))
    assert (p @ model.extractor.theta @ features.T).abs().max() < 1e-10 * p.norm()


def test_rank_deficient_primary_task_that_holds_the_harmful_range():
    basis = torch.linalg.qr(gaussian(7, 4, seed=1)).Q.T  # both tasks live in 4 of 7 dimensions
    p, h = (root @ basis for root in roots(3, 4))
    pair, method = pair_of(p, h), ClosedForm()
    model = immunized(pair, method)
    comparison = Comparison(pair, model)
    metrics = Ceiling()(comparison).metrics | RelativeRatio()(comparison).metrics
    assert metrics["rir"] == pytest.approx(metrics["ceiling/rir"], rel=1e-6)
    assert not method.flags


def test_harmful_task_of_rank_one_is_flagged():
    p, h = roots(0, 4, rank=1)
    method = ClosedForm()
    immunized(pair_of(p, h), method)
    assert "harmful_rank_one" in method.flags


@quick
@given(spectra(smallest=3, decades=5), seeds, st.floats(-8, 0), st.floats(0, 1))
def test_ridge_keeps_the_primary_ratio_below_its_target(sigma, seed, log_ridge, share):
    p = with_spectrum(sigma, 20, len(sigma), seed)
    h = gaussian(20, len(sigma), seed=seed + 1)
    ratio = kappa(p) ** -share
    ridge = 10**log_ridge
    theta = optimal_map(p, h, ratio, ridge=ridge)
    regularized = (1 + ridge) / (1 / kappa(p) + ridge)
    assert kappa(p @ theta) / kappa(p) <= max(ratio, 1 / regularized) * (1 + 1e-6)


@pytest.mark.parametrize("ratio", [0.0, 1e-9, 1.5, math.inf, math.nan, -1.0])
def test_primary_ratio_outside_of_its_interval(ratio):
    with pytest.raises(ConfigError, match=r"method\.primary_ratio"):
        immunized(pair_of(*roots(0, 4)), ClosedForm(primary_ratio=ratio))


def test_bad_input():
    p, h = roots(0, 4)
    with pytest.raises(ConfigError, match=r"method\.ridge"):
        ClosedForm(ridge=-1e-3)
    with pytest.raises(ConfigError, match=r"optimal_map\.spread"):
        optimal_map(p, h, spread="even")
    with pytest.raises(DegenerateSpectrum, match="primary features are all zero"):
        optimal_map(torch.zeros(3, 4), h)
    with pytest.raises(DegenerateSpectrum, match="harmful features hold NaN"):
        optimal_map(p, h * math.nan)
    with pytest.raises(DataError, match="4 and 3"):
        optimal_map(p, h[:, :3])
    with pytest.raises(DataError, match="different numbers of input features"):
        pair_of(p, h[:, :3])
    zero = pair_of(torch.zeros_like(p), h)
    with pytest.raises(DataError, match="rank 0"):
        ClosedForm().setup(Linear(zero), zero)
    pair = pair_of(p, h)
    biased = Linear(pair, bias=True)
    with pytest.raises(ConfigError, match=r"model\.bias=false"):
        ClosedForm().setup(biased, pair)
