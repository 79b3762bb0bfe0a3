"""The primary task, and Definition 3.1."""

import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch
from helpers.comparisons import classification, compare, eye, f64, pair_of, regression
from helpers.matrices import gaussian
from helpers.nets import build, open_pair
from scipy import stats
from sklearn.metrics import r2_score

from immunization import evaluation
from immunization.data.task import Split, TaskPair
from immunization.evaluation import (
    Comparison,
    Definition,
    OwnHead,
    PrimaryPerformance,
)
from immunization.evaluation.own_head import head_at_chance
from immunization.evaluation.rir import Ratios

pytestmark = pytest.mark.trains


def test_the_retrained_head_is_least_squares_and_does_not_depend_on_theta():
    primary = regression(0)
    measures = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), gaussian(5, 5, seed=3)))
    head = np.linalg.lstsq(primary.train.x.numpy(), primary.train.y.numpy(), rcond=None)[0]
    y, residual = primary.test.y.numpy(), primary.test.x.numpy() @ head - primary.test.y.numpy()
    for suffix in ("", "_baseline"):
        expected = 1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum()
        assert measures.metrics[f"primary/r2{suffix}"] == pytest.approx(expected)
        assert measures.metrics[f"primary/loss{suffix}"] == pytest.approx((residual**2).mean() / 2)


@pytest.mark.parametrize("perfect", [False, True])
def test_the_interval_of_an_accuracy_is_wilsons(perfect):
    primary = classification(0, classes=3)
    if perfect:  # where resamples of the rows would all say 1
        primary = dataclasses.replace(primary, test=primary.train)
        primary = dataclasses.replace(primary, train=Split(torch.eye(5).double()[:3], torch.arange(3)))
        primary = dataclasses.replace(primary, test=primary.train)
    metrics = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), eye(5))).metrics
    n = len(primary.test)
    expected = stats.binomtest(round(metrics["primary/accuracy"] * n), n).proportion_ci(method="wilson")
    assert (metrics["primary/accuracy"] == 1) == perfect
    for end in ("low", "high"):
        for suffix in ("", "_baseline"):
            assert metrics[f"interval/primary/accuracy{suffix}_{end}"] == pytest.approx(getattr(expected, end))


def test_the_interval_of_r2_is_that_of_resampled_rows():
    primary = regression(0)
    metrics = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), eye(5))).metrics
    head = np.linalg.lstsq(primary.train.x.numpy(), primary.train.y.numpy(), rcond=None)[0]
    y, found = primary.test.y.numpy(), primary.test.x.numpy() @ head
    seed = {"rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state": 0}  # before scipy 1.15
    resample = stats.bootstrap(
        (y, found), r2_score, paired=True, vectorized=False, n_resamples=1000, method="percentile", **seed
    ).confidence_interval
    spread = resample.high - resample.low
    for end in ("low", "high"):
        assert abs(metrics[f"interval/primary/r2_{end}"] - getattr(resample, end)) < 0.15 * spread


def test_the_trained_head_is_measured_where_there_is_one():
    primary = classification(0, classes=3)
    comparison = compare(TaskPair("pair", primary, regression(10)), eye(5))
    comparison.model.set_head(eye(5)[:3])
    expected = (primary.test.x[:, :3].argmax(1) == primary.test.y).double().mean().item()
    assert PrimaryPerformance()(comparison).metrics["primary/head_accuracy"] == expected


@pytest.mark.parametrize(
    ("accuracy", "majority", "said"),
    [
        (1.0, 0.97, None),
        (0.98, 0.95, None),
        (1.0, 1.0, None),
        (0.25, 0.25, "the most frequent class has 0.250"),
        (0.9, 0.95, "the most frequent class has 0.950"),
        (0.24, 0.2, "chance is 0.200"),
    ],
)
def test_a_head_that_guesses_the_most_frequent_class_is_at_chance(accuracy, majority, said):
    reason = head_at_chance(accuracy, 0.2, majority)
    assert reason is None if said is None else said in reason


def test_a_net_whose_own_head_is_at_chance_is_flagged(folders):
    model, tasks = build(open_pair(folders)).read(open_pair(folders), True)
    untrained = OwnHead()(Comparison(tasks, model))
    assert untrained.metrics["primary/head_accuracy_baseline"] < 0.3
    assert list(untrained.flags) == ["head_at_chance"]
    assert "chance is 0.250: it was not trained on this task" in untrained.reasons["head_at_chance"]
    comparison = Comparison(tasks, model)
    model.head.omega.data = comparison.probe("primary", "baseline").optimum().T
    assert not OwnHead()(comparison).flags


def test_without_a_held_out_measure_the_primary_ones_are_null():
    flat = dataclasses.replace(regression(0), test=Split(gaussian(4, 5, seed=0), torch.ones(4).double()))
    for primary, words in ((regression(0, test=0), "no test split"), (flat, "all test targets")):
        measures = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), eye(5)))
        assert measures.metrics["primary/r2"] is None
        assert words in measures.reasons["primary/loss_baseline"]


@pytest.mark.parametrize(("second", "holds"), [(2.0, True), (0.5, False)])
def test_the_definition_is_of_every_harmful_task(monkeypatch, second, holds):
    ratios = {"harmful": 2.0, "harmful_8": second}

    def of(comparison, role="harmful"):
        return ratios_of({(role, "immunized"): ratios[role], ("primary", "immunized"): 0.5}, role)

    monkeypatch.setattr(evaluation.primary, "condition_ratios", of)
    pair = TaskPair("pair", classification(0, 2), regression(10), more={"harmful_8": regression(11)})
    metrics = Definition()(compare(pair, eye(5))).metrics
    assert (metrics["definition/a"], metrics["ratio_harmful"]) == (holds, 2.0)


def ratios_of(kappa: dict, role: str = "harmful") -> Ratios:
    """RIR and the ratios of both tasks, of baselines of kappa 1."""
    return Ratios({(role, "baseline"): 1.0 for role, _ in kappa} | kappa, role)


def definition(monkeypatch, harmful=2.0, primary=1.0, after=0.9, before=0.9, classes=2) -> dict[str, float | None]:
    """The verdict for the given ratios and held-out measures."""
    values = ratios_of({("harmful", "immunized"): harmful, ("primary", "immunized"): primary})
    monkeypatch.setattr(evaluation.primary, "condition_ratios", lambda comparison, role="harmful": values)
    monkeypatch.setattr(
        evaluation.primary,
        "retrained_head",
        lambda _, stage: (after, before)[stage == "baseline"],
    )
    primary_task = classification(0, classes) if classes else regression(0)
    return Definition()(compare(TaskPair("pair", primary_task, regression(10)), eye(5))).metrics


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({}, "abc"),
        ({"harmful": 1 + 1e-7}, "bc"),
        ({"primary": 1 + 1e-7}, "abc"),
        ({"primary": 1 + 1e-5}, "ac"),
        ({"after": 0.96, "before": 0.97}, "abc"),
        ({"after": 0.95, "before": 0.97}, "ab"),
        ({"after": 1.0, "before": 0.9}, "abc"),
        ({"after": 0.496, "before": 0.5, "classes": 0}, "abc"),
        ({"after": 0.494, "before": 0.5, "classes": 0}, "ab"),
        ({"harmful": math.inf}, "abc"),
    ],
)
def test_definition(monkeypatch, values, verdict):
    metrics = definition(monkeypatch, **values)
    assert "".join(key for key in "abc" if metrics[f"definition/{key}"]) == verdict
    assert metrics["definition/immunized"] == (verdict == "abc")
    rir = values.get("harmful", 2.0) / values.get("primary", 1.0)
    kept = rir if "c" in verdict else 0  # what a search for the best RIR may count
    assert metrics["definition/rir_kept"] == (kept if math.isfinite(kept) else None)


def test_definition_without_test_rows_is_open_only_where_the_spectra_pass():
    pair = TaskPair("pair", regression(0, test=0), regression(10))
    metrics = Definition()(compare(pair, eye(5))).metrics
    assert metrics["definition/c"] is None
    assert (metrics["definition/a"], metrics["definition/b"], metrics["definition/immunized"]) == (0, 1, 0)
    pair = pair_of(torch.diag(f64([10.0, 1.0])), torch.diag(f64([2.0, 1.0])))
    metrics = Definition()(compare(pair, torch.diag(f64([0.1, 1.0])))).metrics
    assert (metrics["ratio_harmful"], metrics["ratio_primary"]) == pytest.approx((25 / 4, 0.01))
    assert (metrics["definition/a"], metrics["definition/b"], metrics["definition/immunized"]) == (1, 1, None)
