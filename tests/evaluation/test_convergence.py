"""Learning curves and norm ratios against probes trained step by step."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from helpers.comparisons import classification, compare, eye, f64, regression, task
from helpers.matrices import gaussian
from torch import Tensor

from immunization import evaluation
from immunization.data.task import TaskPair
from immunization.evaluation import (
    Comparison,
    LearningCurves,
    NormRatio,
)
from immunization.evaluation.convergence import faster, held_out_curve, not_slower, relative_deviation, steps_to
from immunization.evaluation.measures import Measures
from immunization.runs.numbers import number
from immunization.runs.records import Record, from_flat

pytestmark = pytest.mark.trains

OCTAVES = 5


def test_grid_is_that_of_the_conventions():
    grid = LearningCurves().grid.tolist()
    assert grid == [round(2 ** (j / 4)) for j in range(81)]
    assert (grid[0], grid[-1], len(grid)) == (1, 2**20, 81)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_curves_are_those_of_a_probe_trained_step_by_step(classes, monkeypatch):
    monkeypatch.setattr(evaluation.convergence, "CHUNK", 400)  # several chunks
    harmful = classification(0, classes) if classes else regression(0)
    theta = gaussian(5, 5, seed=3)
    measures = LearningCurves(octaves=OCTAVES)(compare(TaskPair("pair", regression(10), harmful), theta))
    grid = measures.curves["probe/harmful"]["x"]
    curves = {}
    for suffix, map_ in (("", theta), ("/baseline", eye(5))):
        f, held_out = harmful.train.x @ map_, harmful.test.x @ map_
        y, rate = harmful.targets(harmful.train.y), torch.linalg.matrix_norm(f, 2) ** -2
        least = (f @ torch.linalg.lstsq(f, y).solution - y).square().sum()
        first, w = y.square().sum() - least, torch.zeros(5, y.shape[1]).double()
        curve, excess = {}, {}
        for t in range(1, grid[-1] + 1):
            w = w - rate * f.T @ (f @ w - y)
            curve[t] = harmful.measure(held_out @ w, harmful.test.y).item()
            excess[t] = (((f @ w - y).square().sum() - least) / first).item()
        curves[suffix] = np.array([curve[t] for t in grid])
        assert measures.curves[f"probe/harmful{suffix}"]["y"] == pytest.approx(curves[suffix], abs=1e-12)
        assert measures.curves[f"excess/harmful{suffix}"]["y"] == pytest.approx([excess[t] for t in grid], abs=1e-12)
    before, after = curves["/baseline"], curves[""]
    threshold = harmful.chance + 0.9 * (before.max() - harmful.chance)
    steps = [
        next((t for t, m in zip(grid, curve, strict=True) if m >= threshold), grid[-1]) for curve in (after, before)
    ]
    assert measures.metrics["steps_ratio/harmful"] == steps[0] / steps[1]
    cut = before.argmax() + 1
    assert measures.metrics["rfd/harmful"] == pytest.approx(
        ((before - after) / before)[:cut][before[:cut] > 0.05].mean()
    )


def test_steps_and_deviation_of_a_case_done_by_hand():
    grid = torch.tensor([1, 2, 4, 8])
    before = f64([0.02, 0.5, 0.8, 0.8])
    after = f64([0.9, 0.4, 0.9, 0.1])
    assert [steps_to(f64(threshold), before, grid) for threshold in (0.02, 0.5, 0.80, 0.81)] == [1, 2, 4, math.inf]
    # up to the first maximum (t = 4), without t = 1, where the baseline is below 0.05: (0.1/0.5 - 0.1/0.8) / 2
    assert relative_deviation(before, after) == pytest.approx((0.2 - 0.125) / 2)
    assert relative_deviation(before / 100, after).isnan()
    curves = torch.stack([before, before / 100]), torch.stack([after, after])
    assert relative_deviation(*curves).tolist() == pytest.approx([(0.2 - 0.125) / 2, math.nan], nan_ok=True)


def test_the_deviation_ends_where_the_baseline_has_converged():
    """Wherever rounding puts the largest of many values that are all 1."""
    before, after = f64([0.5, 1, 1, 1, 1]), f64([0.25, 0.5, 0.75, 1, 1])
    for highest in (1, 4):
        rounded = before.clone()
        rounded[highest] += 2e-16 * 2
        assert relative_deviation(rounded, after) == pytest.approx(0.5)


def two_directions(theta: Tensor) -> Comparison:
    """A harmful task whose labels lie along its second feature alone; theta may hide that one."""
    x = gaussian(200, 2, seed=0)
    harmful = task(x, (x[:, 1] > 0).long(), test=100, classes=2)
    return compare(TaskPair("pair", harmful, harmful), theta)


def test_a_probe_that_never_learns_counts_as_the_last_step_and_is_flagged():
    measures = LearningCurves()(two_directions(torch.diag(f64([1.0, 1e-7]))))
    before = torch.tensor(measures.curves["probe/harmful/baseline"]["y"])
    first = steps_to(0.5 + 0.9 * (before.max() - 0.5), before, LearningCurves().grid)
    assert measures.metrics["steps_ratio/harmful"] == 2**20 / first
    assert {"capped_harmful", "capped_primary"} <= set(measures.flags)
    ends = [f"interval/steps_ratio/{role}_{end}" for role in ("primary", "harmful") for end in ("low", "high")]
    assert measures.about["intervals_capped"] == ends
    ratio = number(measures.metrics["steps_ratio/primary"])
    assert f"takes > {ratio} times" in measures.reasons["primary_slower"]
    assert LearningCurves()(two_directions(eye(2))).flags.keys() == {"harmful_not_slower"}


def interval(curves: LearningCurves, rows: int, before: Tensor, after: Tensor, value: float) -> tuple[Record, Measures]:
    """A harmful steps ratio of this value with its interval, of the scores [T, `rows`] of both probes."""
    harmful, measures = task(gaussian(120, 2, seed=0), (torch.arange(120) % 2).long(), test=rows, classes=2), Measures()
    ratio, rfd = (Record(name, value, "harmful", split="test") for name in ("steps_ratio", "rfd"))
    scores = {"immunized": after, "baseline": before}
    return curves._with_intervals(ratio, rfd, harmful, scores, measures)[0], measures


def test_an_end_that_some_resamples_never_come_to_is_a_lower_bound():
    """A probe that comes to the bar on all test rows, but not on some resamples."""
    curves = LearningCurves(octaves=OCTAVES, share=0.8)
    before = torch.ones(len(curves.grid), 100).double()
    after = before.clone()
    after[:, :7] = 0  # below 90 % of the rows on some resamples
    ratio, measures = interval(curves, 100, before, after, 1.0)
    assert measures.about["intervals_capped"] == ["interval/steps_ratio/harmful_high"]
    assert ratio.low == 1


def test_resamples_below_chance_give_no_ratio_of_0():
    """A baseline that is right on 12 of 20 rows of two classes, from t = 1 on; theta_I from t = 4 on."""
    curves = LearningCurves(octaves=OCTAVES)
    before = torch.zeros(len(curves.grid), 20).double()
    before[:, :12] = 1
    after = before.clone()
    after[curves.grid < 4] = 0
    ratio, _ = interval(curves, 20, before, after, 4.0)
    assert (ratio.low, ratio.high) == (1, 4)  # 1 where neither of them comes to the bar


def test_a_harmful_task_that_is_learned_sooner_is_flagged():
    x = gaussian(200, 2, seed=0) * f64([1.0, 0.01])
    harmful, primary = (task(x, (x[:, place] > 0).long(), test=100, classes=2) for place in (1, 0))
    pair = TaskPair("pair", primary, harmful)
    measures = LearningCurves()(compare(pair, torch.diag(f64([1.0, 100.0]))))
    assert measures.metrics["steps_ratio/harmful"] < 0.1
    assert list(measures.flags) == ["harmful_faster", "harmful_not_slower"]
    assert f"the harmful task in {measures.metrics['steps_ratio/harmful']:.3g} of" in measures.reasons["harmful_faster"]
    rotation = torch.linalg.qr(gaussian(2, 2, seed=1)).Q  # the same curves, up to rounding
    assert "harmful_faster" not in LearningCurves()(compare(pair, rotation)).flags


def probed(metrics: dict[str, float | None]) -> Measures:
    return Measures(from_flat(metrics, {}))


def ratios(harmful: float | None, **others: float) -> Measures:
    return probed({f"steps_ratio/{role}": ratio for role, ratio in {"harmful": harmful, **others}.items()})


def test_one_step_of_the_grid_is_within_rounding():
    grid = sorted(set(LearningCurves().grid.tolist()))
    pairs = itertools.pairwise(grid)
    assert not any(faster(ratios(a / b), ["harmful"]) for a, b in pairs if a >= 4)
    assert all(faster(ratios(a / b), ["harmful"]) for a, b in zip(grid, grid[2:], strict=False))
    assert "the unseen task in 0.5 of" in faster(ratios(None, unseen=0.5), ["harmful", "unseen"])


def test_reasons_mark_lower_bounds():
    measures = ratios(0.5)
    measures.flag("capped_harmful", "never reached")
    assert "the harmful task in > 0.5 of" in faster(measures, ["harmful"])
    assert "the harmful task in > 0.5 times" in not_slower(measures, ["harmful"])


def test_labels_that_cannot_be_learned_give_null_and_a_flag():
    x = gaussian(120, 3, seed=0)
    labels = (x[:, 0] > 0).long()
    labels[60:] = 1 - labels[60:]  # the test split contradicts what training teaches
    contrary = task(x, labels, test=60, classes=2)
    pair = TaskPair("pair", contrary, dataclasses.replace(contrary, constant=True))
    measures = LearningCurves()(compare(pair, eye(3)))
    assert measures.metrics["steps_ratio/primary"] is None
    assert list(measures.flags) == ["baseline_at_chance_primary"]
    assert "chance + 0.05" in measures.reasons["steps_ratio/primary"]
    assert measures.metrics["steps_ratio/harmful"] is measures.metrics["rfd/harmful"] is None
    assert "labels of the harmful task are equal" in measures.reasons["rfd/harmful"]


def test_without_test_rows_only_the_training_curves_remain():
    pair = TaskPair("pair", regression(0), regression(10, test=0))
    measures = LearningCurves(octaves=OCTAVES)(compare(pair, eye(5)))
    assert "excess/harmful/baseline" in measures.curves
    assert "probe/harmful" not in measures.curves
    assert measures.reasons["steps_ratio/harmful"] == "the harmful task has no test split"


def test_norm_ratio_curves_start_at_one_and_fall():
    measures = NormRatio(steps=20)(compare(TaskPair("pair", regression(0), regression(10)), gaussian(5, 5, seed=3)))
    assert set(measures.curves) == {f"norm_ratio/{r}{s}" for r in ("primary", "harmful") for s in ("", "/baseline")}
    for curve in measures.curves.values():
        assert (curve["x"], curve["y"][0]) == (list(range(21)), 1)
        assert np.all(np.diff(curve["y"]) <= 1e-15)


def test_chunks_of_the_grid_change_nothing(monkeypatch):
    harmful, grid = classification(0, classes=3), LearningCurves().grid
    probe = compare(TaskPair("pair", harmful, harmful), eye(5)).probe("harmful", "baseline")
    whole = held_out_curve(probe, harmful, harmful.test.x, grid)
    monkeypatch.setattr(evaluation.convergence, "CHUNK", 1)
    for part, expected in zip(held_out_curve(probe, harmful, harmful.test.x, grid), whole, strict=True):
        assert torch.equal(part, expected)
