"""The relative immunization ratio and its parts."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.comparisons import compare, eye, f64, regression, task
from helpers.matrices import gaussian, orthonormal, seeds, with_spectrum
from helpers.methods import make_pair
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.func import functional_call

from immunization.data.task import Split, TaskPair
from immunization.evaluation import (
    Comparison,
    RelativeRatio,
    StartRatio,
)
from immunization.models import Linear
from immunization.theory import spectrum

pytestmark = pytest.mark.trains


def test_ratios_are_those_of_the_condition_numbers_of_the_features():
    pair, theta = TaskPair("pair", regression(0), regression(10)), gaussian(5, 5, seed=3)
    metrics = RelativeRatio()(compare(pair, theta)).metrics
    for prefix, split in (("", "train"), ("test/", "test")):
        kappa = {}
        for role in ("harmful", "primary"):
            x = getattr(pair.tasks[role], split).x.numpy()
            kappa[role] = np.linalg.cond(x @ theta.numpy()) ** 2, np.linalg.cond(x) ** 2
            assert metrics[f"{prefix}kappa_{role}"] == pytest.approx(kappa[role][0], rel=1e-9)
            assert metrics[f"{prefix}kappa_{role}_baseline"] == pytest.approx(kappa[role][1], rel=1e-9)
            assert metrics[f"{prefix}ratio_{role}"] == pytest.approx(kappa[role][0] / kappa[role][1], rel=1e-9)
            assert metrics[f"{prefix}rank_{role}"] == 5
        assert metrics[f"{prefix}rir"] == pytest.approx(
            kappa["harmful"][0] / kappa["harmful"][1] * kappa["primary"][1] / kappa["primary"][0], rel=1e-9
        )


def test_the_baseline_itself_has_ratio_one_whether_named_or_not():
    pair = TaskPair("pair", regression(0), regression(10))
    for named in (None, lambda role, split: getattr(pair.tasks[role], split).x):
        comparison = compare(pair, eye(5))
        comparison.model.baseline_features = named or comparison.model.baseline_features
        metrics = RelativeRatio()(comparison).metrics
        for name in ("rir", "ratio_harmful", "ratio_primary"):
            assert all(metrics[f"{prefix}{name}"] == pytest.approx(1, rel=1e-9) for prefix in ("", "test/", "authors/"))


@given(seeds, st.floats(1e-3, 1e3))
def test_rir_ignores_the_scale_and_the_rotation_of_theta(seed, scale):
    pair, theta = TaskPair("pair", regression(0), regression(10)), gaussian(5, 5, seed=seed)
    assume(torch.linalg.cond(theta) < 1e3)
    one, two = (
        RelativeRatio()(compare(pair, t)).metrics for t in (theta, scale * theta @ orthonormal(5, 5, seed=seed + 1))
    )
    for name in ("rir", "ratio_harmful", "ratio_primary", "test/rir"):
        assert two[name] == pytest.approx(one[name], rel=1e-7)


def test_rank_deficient_tasks_keep_the_rank_of_their_inputs_and_are_flagged():
    x = with_spectrum(f64([3.0, 2.0, 1.0]), 30, 6, seed=0)
    pair = TaskPair("pair", task(x, x[:, 0]), regression(10, columns=6))
    measures = RelativeRatio()(compare(pair, gaussian(6, 6, seed=3)))
    sigma = np.linalg.svd((x @ gaussian(6, 6, seed=3)).numpy(), compute_uv=False)
    assert measures.metrics["rank_primary"] == 3
    assert measures.metrics["kappa_primary"] == pytest.approx((sigma[0] / sigma[2]) ** 2, rel=1e-9)
    assert measures.metrics["authors/ratio_primary"] == pytest.approx((sigma[0] / 3.0) ** 2, rel=1e-6)
    assert list(measures.flags) == ["rank_deficient_primary"]
    assert "rank 3 of 6" in measures.reasons["rank_deficient_primary"]
    assert measures.curves["spectrum/primary"]["y"] == pytest.approx(sigma[:3] ** 2)
    assert measures.curves["spectrum/primary/baseline"]["y"] == pytest.approx([9, 4, 1])


def test_an_eigenvalue_that_the_released_code_counts_by_chance_is_flagged():
    """F^T F rounds at 3 eps 1e12 = 7e-4: the eigenvalue 1e-6 may come out above the released code's 1e-6 or below."""
    pair = TaskPair("pair", task(with_spectrum(f64([1e6, 1.0, 1e-3]), 30, 3, seed=0), gaussian(30, seed=1)),
                    regression(10, columns=3))  # fmt: skip
    measures = RelativeRatio()(compare(pair, eye(3)))
    assert list(measures.flags) == ["ridge_rounding_primary"]
    assert "1.0e-06, is within the rounding of F^T F, 6.7e-04" in measures.reasons["ridge_rounding_primary"]


def test_without_test_rows_the_held_out_ratios_are_null():
    measures = RelativeRatio()(compare(TaskPair("pair", regression(0), regression(10, test=0)), eye(5)))
    assert measures.metrics["test/rir"] is None
    assert measures.reasons["test/rir"] == "no test split: harmful"


def test_held_out_inputs_without_a_spectrum_leave_their_ratios_null():
    harmful = dataclasses.replace(regression(10), test=Split(torch.zeros(4, 5).double(), gaussian(4, seed=0)))
    measures = RelativeRatio()(compare(TaskPair("pair", regression(0), harmful), gaussian(5, 5, seed=3)))
    assert measures.metrics["rir"] > 0
    assert measures.metrics["test/rir"] is None
    assert "all zero" in measures.reasons["test/rir"]


@pytest.mark.parametrize("eps", [2.0**-52, 2.0**-23])
def test_authors_convention_sees_every_direction_of_the_inputs(eps):
    x = with_spectrum(
        f64([3.0, 2.0, 4e-7]), 30, 3, seed=0
    )  # the last direction is noise, had it been stored in float32
    theta = torch.linalg.svd(x).Vh.T * f64([1, 1, 1e6])
    primary = task(x, x[:, 0], eps=eps)
    metrics = RelativeRatio()(compare(TaskPair("pair", primary, regression(10, columns=3)), theta)).metrics
    assert metrics["rank_primary"] == (3 if eps < 1e-10 else 2)
    expected = [spectrum.authors_condition_number(f) for f in (x @ theta, x)]
    assert metrics["authors/ratio_primary"] == pytest.approx(expected[0] / expected[1], rel=1e-6)


def test_a_condition_number_lost_in_rounding_is_flagged():
    theta = torch.diag(f64([1, 1, 1, 1, 1e-20]))
    measures = RelativeRatio()(compare(TaskPair("pair", regression(0), regression(10)), theta))
    assert {"noise_floor_primary", "noise_floor_harmful"} <= set(measures.flags)


@pytest.mark.parametrize("small", [1e-7, 1e-12, 0.0])
def test_directions_that_features_lost_count_as_just_above_rounding(small):
    """Where features are no linear map of the inputs, their rank falls: kappa does not fall with it."""
    pair = TaskPair("pair", *(dataclasses.replace(regression(seed), eps=2.0**-23) for seed in (0, 10)))
    model = Linear(pair, bias=True)
    model.extractor.theta.data = torch.diag(f64([1, 1, 1, 1, small]))
    measures = RelativeRatio()(Comparison(pair, model))
    assert measures.metrics["rank_primary"] == 4
    assert measures.metrics["kappa_primary"] == pytest.approx(2.0**46 / 5)
    assert measures.metrics["ratio_primary"] > 1e3
    assert measures.metrics["rir"] is None
    assert "lost directions of the primary task" in measures.reasons["rir"]
    assert {"noise_floor_primary", "noise_floor_harmful"} <= set(measures.flags)
    assert "1 of the 5 directions" in measures.reasons["noise_floor_primary"]


@pytest.mark.parametrize(
    ("small", "rank", "uncertain"), [(1e-5, 5, False), (4e-7, 5, True), (1.5e-7, 4, True), (0, 4, False)]
)
def test_a_singular_value_near_the_rounding_of_stored_inputs_is_flagged(small, rank, uncertain):
    """The tolerance is sqrt(5) 2^-23 = 2.7e-7 of the largest."""
    x = with_spectrum(f64([1.0, 0.5, 0.5, 0.5, small]), 40, 5, seed=0)
    primary = task(x, gaussian(40, seed=1), eps=2.0**-23)
    measures = RelativeRatio()(compare(TaskPair("pair", primary, regression(10)), gaussian(5, 5, seed=3)))
    assert measures.metrics["rank_primary"] == rank
    assert ("rank_uncertain_primary" in measures.flags) == uncertain
    exact = dataclasses.replace(primary, eps=2.0**-52)
    measures = RelativeRatio()(compare(TaskPair("pair", exact, regression(10)), eye(5)))
    assert "rank_uncertain_primary" not in measures.flags


def test_a_bias_is_part_of_the_features():
    pair, theta, bias = TaskPair("pair", regression(0), regression(10)), gaussian(5, 5, seed=3), gaussian(5, seed=4)
    model = Linear(pair, bias=True)
    model.extractor.theta.data, model.extractor.bias.data = theta, bias
    comparison = Comparison(pair, model)
    features = pair.primary.train.x @ theta + bias
    torch.testing.assert_close(comparison.sigma("primary", "train", "immunized"), torch.linalg.svdvals(features))
    torch.testing.assert_close(
        comparison.sigma("primary", "test", "immunized"), torch.linalg.svdvals(pair.primary.test.x @ theta + bias)
    )
    best = torch.linalg.lstsq(features, pair.primary.train.y[:, None]).solution
    torch.testing.assert_close(comparison.probe("primary", "immunized").optimum(), best)


def test_the_score_against_theta_0():
    pair = make_pair()
    torch.manual_seed(0)
    model = Linear(pair, "random")
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    model.extractor.theta.data.copy_(gaussian(4, 4, seed=7))
    metrics = StartRatio()(Comparison(pair, model, start)).metrics
    kappa = {}
    for role, own in (("harmful", pair.harmful), ("primary", pair.primary)):
        before = functional_call(model.extractor, start, (own.train.x,))
        after = model.features(own.train.x)
        kappa[role] = spectrum.condition_number(after) / spectrum.condition_number(before)
        assert metrics[f"ratio_{role}_theta0"] == pytest.approx(kappa[role], rel=1e-9)
        authors = spectrum.authors_condition_number(after) / spectrum.authors_condition_number(before)
        assert metrics[f"authors/ratio_{role}_theta0"] == pytest.approx(authors, rel=1e-9)
    assert metrics["rir_theta0"] == pytest.approx(kappa["harmful"] / kappa["primary"], rel=1e-9)
    assert StartRatio()(Comparison(pair, model)).metrics == {}
