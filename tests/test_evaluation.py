"""Every measure against a direct computation, its conventions, and what happens where it does not exist."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import hydra.utils
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import gaussian, orthonormal, seeds, spectra, with_spectrum
from omegaconf import OmegaConf
from torch import Tensor

from immunization import data, evaluation
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.evaluation import (
    Alignment,
    Ceiling,
    Comparison,
    Definition,
    LearningCurves,
    Measures,
    NormRatio,
    PrimaryPerformance,
    RelativeRatio,
)
from immunization.evaluation.convergence import held_out_curve, relative_deviation, steps_to
from immunization.models import Linear
from immunization.theory import regularizers, spectrum

CONFIGS = sorted((Path(__file__).parents[1] / "conf" / "evaluation").glob("*.yaml"))
OCTAVES = 5
f64, eye = partial(torch.tensor, dtype=torch.float64), partial(torch.eye, dtype=torch.float64)


def task(x: Tensor, y: Tensor, test: int = 0, **options) -> Task:
    """The first rows train, the last `test` ones test; none validate."""
    cut = len(x) - test
    return Task("task", Split(x[:cut], y[:cut]), Split(x[:0], y[:0]), Split(x[cut:], y[cut:]), **options)


def regression(seed: int, test: int = 20, columns: int = 5) -> Task:
    x = gaussian(60, columns, seed=seed)
    y = x @ gaussian(columns, seed=seed + 1) + 0.5 * gaussian(60, seed=seed + 2)
    return task(x, y, test)


def classification(seed: int, classes: int, test: int = 40, columns: int = 5) -> Task:
    x = gaussian(120, columns, seed=seed)
    y = (x[:, :classes] + 0.3 * gaussian(120, classes, seed=seed + 1)).argmax(1)
    return task(x, y, test, classes=classes)


def compare(pair: TaskPair, theta: Tensor) -> Comparison:
    model = Linear(pair)
    model.extractor.theta.data = theta
    return Comparison(pair, model)


def pair_of(k_p: Tensor, k_h: Tensor) -> TaskPair:
    """Tasks without test rows whose inputs are the given matrices."""
    return TaskPair("pair", *(task(x, torch.ones(len(x)).double()) for x in (k_p, k_h)))


# --- Measures ------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_become_null_with_a_reason():
    measures = Measures()
    for name, value in {"a": 1.0, "b": math.nan, "c": math.inf}.items():
        measures.put(name, value)
    assert measures.metrics == {"a": 1.0, "b": None, "c": None}
    assert set(measures.reasons) == {"b", "c"}


def test_merging_keeps_every_part_and_no_flag_twice():
    one, two = Measures({"a": 1.0}, flags=["x"]), Measures({"b": 2.0}, {"x": "why"}, flags=["x", "y"])
    one.merge(two)
    assert one == Measures({"a": 1.0, "b": 2.0}, {"x": "why"}, flags=["x", "y"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_holds_the_defaults_of_its_class_under_its_own_name(path):
    ((name, node),) = OmegaConf.load(path).items()
    built = hydra.utils.instantiate(node)
    assert name == path.stem
    assert str(vars(built)) == str(vars(type(built)()))


def test_every_evaluation_has_a_config():
    targets = {next(iter(OmegaConf.load(path).values()))._target_.split(".")[-1] for path in CONFIGS}
    assert targets == set(evaluation.__all__) - {"Comparison", "Measures", "Probe"}


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: NormRatio(steps=0), "norm_ratio.steps"),
        (lambda: LearningCurves(octaves=0), "learning_curves.octaves"),
        (lambda: LearningCurves(share=1.1), "learning_curves.share"),
        (lambda: Alignment(energy=0.0), "alignment.energy"),
        (lambda: Definition(tolerance=-0.1), "definition.tolerance"),
    ],
)
def test_a_value_that_cannot_work_is_named(build, key):
    with pytest.raises(ConfigError, match=key):
        build()


def test_everything_on_digits_is_strict_json_with_a_reason_for_every_null():
    pair = data.digits(seed=0, benign=2)
    comparison, measures = compare(pair, gaussian(pair.dim, pair.dim, seed=1)), Measures()
    for path in CONFIGS:
        ((_, node),) = OmegaConf.load(path).items()
        measures.merge(hydra.utils.instantiate(node)(comparison))
    json.dumps([measures.metrics, measures.reasons, measures.curves, measures.flags], allow_nan=False)
    assert {name for name, value in measures.metrics.items() if value is None} <= set(measures.reasons)
    assert set(measures.flags) <= set(measures.reasons)
    assert {f"steps_ratio/{role}" for role in pair.tasks} <= set(measures.metrics)
    assert all(len(curve["x"]) == len(curve["y"]) for curve in measures.curves.values())


# --- RIR -----------------------------------------------------------------------------------------------------------


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
    assert measures.flags == ["rank_deficient_primary"]
    assert "rank 3 of 6" in measures.reasons["rank_deficient_primary"]
    assert measures.curves["spectrum/primary"]["y"] == pytest.approx(sigma[:3] ** 2)
    assert measures.curves["spectrum/primary/baseline"]["y"] == pytest.approx([9, 4, 1])


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
        f64([3.0, 2.0, 4e-6]), 30, 3, seed=0
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


def test_a_bias_is_part_of_the_features():
    pair, theta, bias = TaskPair("pair", regression(0), regression(10)), gaussian(5, 5, seed=3), gaussian(5, seed=4)
    model = Linear(pair, bias=True)
    model.extractor.theta.data, model.extractor.bias.data = theta, bias
    comparison = Comparison(pair, model)
    features = pair.primary.train.x @ theta + bias
    torch.testing.assert_close(comparison.sigma("primary", "train", "after"), torch.linalg.svdvals(features))
    torch.testing.assert_close(
        comparison.sigma("primary", "test", "after"), torch.linalg.svdvals(pair.primary.test.x @ theta + bias)
    )
    best = torch.linalg.lstsq(features, pair.primary.train.y[:, None]).solution
    torch.testing.assert_close(comparison.probe("primary", "after").optimum(), best)


# --- Primary task and Definition 3.1 -------------------------------------------------------------------------------


def test_the_retrained_head_is_least_squares_and_does_not_depend_on_theta():
    primary = regression(0)
    measures = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), gaussian(5, 5, seed=3)))
    head = np.linalg.lstsq(primary.train.x.numpy(), primary.train.y.numpy(), rcond=None)[0]
    y, residual = primary.test.y.numpy(), primary.test.x.numpy() @ head - primary.test.y.numpy()
    for suffix in ("", "_baseline"):
        expected = 1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum()
        assert measures.metrics[f"primary/r2{suffix}"] == pytest.approx(expected)
        assert measures.metrics[f"primary/loss{suffix}"] == pytest.approx((residual**2).mean() / 2)


def test_the_trained_head_is_measured_where_there_is_one():
    primary = classification(0, classes=3)
    comparison = compare(TaskPair("pair", primary, regression(10)), eye(5))
    comparison.model.set_head(eye(5)[:3])
    expected = (primary.test.x[:, :3].argmax(1) == primary.test.y).double().mean().item()
    assert PrimaryPerformance()(comparison).metrics["primary/head_accuracy"] == expected


def test_without_a_held_out_measure_the_primary_ones_are_null():
    flat = dataclasses.replace(regression(0), test=Split(gaussian(4, 5, seed=0), torch.ones(4).double()))
    for primary, words in ((regression(0, test=0), "no test split"), (flat, "all test targets")):
        measures = PrimaryPerformance()(compare(TaskPair("pair", primary, regression(10)), eye(5)))
        assert measures.metrics["primary/r2"] is None
        assert words in measures.reasons["primary/loss_baseline"]


def definition(monkeypatch, harmful=2.0, primary=1.0, after=0.9, before=0.9, classes=2) -> dict[str, float | None]:
    """The verdict for the given ratios and held-out measures."""
    values = {"ratio_harmful": harmful, "ratio_primary": primary, "rir": harmful / primary}
    monkeypatch.setattr(evaluation.primary, "condition_ratios", lambda comparison: values)
    monkeypatch.setattr(
        evaluation.primary,
        "retrained_head",
        lambda _, state: dict.fromkeys(("accuracy", "r2"), (after, before)[state == "before"]),
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


# --- Convergence ---------------------------------------------------------------------------------------------------


def test_grid_is_that_of_the_conventions():
    grid = LearningCurves().grid.tolist()
    assert grid == [round(2 ** (j / 4)) for j in range(81)]
    assert (grid[0], grid[-1], len(grid)) == (1, 2**20, 81)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_curves_are_those_of_a_probe_trained_step_by_step(classes, monkeypatch):
    monkeypatch.setattr(evaluation.convergence, "CHUNK", 400)  # several chunks
    harmful = classification(0, classes) if classes else regression(0)
    theta = gaussian(5, 5, seed=3)
    measures = LearningCurves(OCTAVES)(compare(TaskPair("pair", regression(10), harmful), theta))
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
    assert [steps_to(threshold, before, grid) for threshold in (0.02, 0.5, 0.80, 0.81)] == [1, 2, 4, None]
    # up to the first maximum (t = 4), without t = 1, where the baseline is below 0.05: (0.1/0.5 - 0.1/0.8) / 2
    assert relative_deviation(before, after) == pytest.approx((0.2 - 0.125) / 2)
    assert relative_deviation(before / 100, after) is None


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
    first = steps_to(0.5 + 0.9 * (before.max().item() - 0.5), before, LearningCurves().grid)
    assert measures.metrics["steps_ratio/harmful"] == 2**20 / first
    assert {"capped_harmful", "capped_primary"} <= set(measures.flags)
    assert not LearningCurves()(two_directions(eye(2))).flags


def test_labels_that_cannot_be_learned_give_null_and_a_flag():
    x = gaussian(120, 3, seed=0)
    labels = (x[:, 0] > 0).long()
    labels[60:] = 1 - labels[60:]  # the test split contradicts what training teaches
    contrary = task(x, labels, test=60, classes=2)
    pair = TaskPair("pair", contrary, dataclasses.replace(contrary, constant=True))
    measures = LearningCurves()(compare(pair, eye(3)))
    assert measures.metrics["steps_ratio/primary"] is None
    assert measures.flags == ["baseline_at_chance_primary"]
    assert "chance + 0.05" in measures.reasons["steps_ratio/primary"]
    assert measures.metrics["steps_ratio/harmful"] is measures.metrics["rfd/harmful"] is None
    assert "labels of the harmful task are equal" in measures.reasons["rfd/harmful"]


def test_without_test_rows_only_the_training_curves_remain():
    pair = TaskPair("pair", regression(0), regression(10, test=0))
    measures = LearningCurves(OCTAVES)(compare(pair, eye(5)))
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
    probe = compare(TaskPair("pair", harmful, harmful), eye(5)).probe("harmful", "before")
    whole = held_out_curve(probe, harmful, harmful.test.x, grid)
    monkeypatch.setattr(evaluation.convergence, "CHUNK", 1)
    assert torch.equal(held_out_curve(probe, harmful, harmful.test.x, grid), whole)


# --- Ceiling and alignment -----------------------------------------------------------------------------------------


@st.composite
def definite_pairs(draw, deficient: bool = False) -> tuple[TaskPair, int]:
    """Random tasks over D inputs, K_P of full rank, K_H of full rank or, if `deficient`, of rank 2 to D - 1."""
    sigma = draw(spectra(3, 6, decades=1.5))
    dim, seed = len(sigma), draw(seeds)
    rank = draw(st.integers(2, dim - 1)) if deficient else dim
    other = draw(spectra(rank, rank, decades=1.5))
    return pair_of(with_spectrum(sigma, dim + 2, dim, seed), with_spectrum(other, dim + 2, dim, seed + 7)), seed


def closed_form(pair: TaskPair, primary_ratio: float = 1.0) -> Tensor:
    """theta = K_P^-1/2 Q Delta with kappa(Delta^2) = primary_ratio kappa(K_P), Delta spread over the rank of K_H."""
    root_p, root_h = pair.primary.root, pair.harmful.root
    sigma = root_p.norm(dim=1)
    whiten = (root_p / sigma[:, None]).T / sigma
    q = torch.linalg.svd(root_h @ whiten).Vh.T
    span, k = primary_ratio**0.5 * sigma[0] / sigma[-1], len(root_h)
    delta = span ** -torch.linspace(0, 1, k, dtype=torch.float64)
    return whiten @ q * torch.cat([delta, delta[-1:].expand(len(sigma) - k)])


def ceiling_of(pair: TaskPair, theta: Tensor) -> dict[str, float | None]:
    comparison, measures = compare(pair, theta), Measures()
    for each in (Ceiling(), RelativeRatio()):
        measures.merge(each(comparison))
    return measures.metrics


@given(definite_pairs() | definite_pairs(deficient=True))
def test_no_theta_exceeds_the_ceiling(drawn):
    pair, seed = drawn
    for draw in range(5):
        theta = gaussian(pair.dim, pair.dim, seed=seed + 100 + draw)
        metrics = ceiling_of(pair, theta)
        assert metrics["rir"] <= metrics["ceiling/rir"] * (1 + 1e-6)


@given(definite_pairs() | definite_pairs(deficient=True), st.floats(0, 1))
def test_the_closed_form_attains_the_ceiling_and_its_primary_ratio(drawn, share):
    pair, seed = drawn
    lowest = (pair.primary.root.norm(dim=1)[-1] / pair.primary.root.norm(dim=1)[0]).item() ** 2
    ratio = lowest ** (1 - share)
    metrics = ceiling_of(pair, closed_form(pair, ratio) @ orthonormal(pair.dim, pair.dim, seed=seed + 5))
    assert metrics["rir"] == pytest.approx(metrics["ceiling/rir"], rel=1e-6)
    assert metrics["ratio_primary"] == pytest.approx(ratio, rel=1e-6)
    if metrics["ceiling/attained"] is not None and metrics["ceiling/rir"] > 1.01:
        assert metrics["ceiling/attained"] == pytest.approx(1, abs=1e-3)


def test_an_optimizer_comes_close_to_the_ceiling_and_not_above():
    pair = pair_of(
        with_spectrum(f64([4.0, 2, 1]), 6, 3, 0),
        with_spectrum(f64([3.0, 2, 1]), 6, 3, 9),
    )
    theta = eye(3).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        logs = [regularizers.log_condition_number(t.root @ theta, 3) for t in (pair.primary, pair.harmful)]
        (logs[0] - logs[1]).backward()
        optimizer.step()
    assert 0.9 < ceiling_of(pair, theta.detach())["ceiling/attained"] <= 1 + 1e-9


def test_the_ceiling_is_unbounded_outside_of_the_common_range():
    k_p = with_spectrum(f64([3.0, 2, 1]), 9, 6, seed=0)
    outside = torch.cat([k_p, gaussian(2, 6, seed=5)])
    measures = Ceiling()(compare(pair_of(k_p, outside), eye(6)))
    assert measures.metrics == {"ceiling/rir": None, "ceiling/attained": None}
    assert "2 of the 5 dimensions" in measures.reasons["ceiling/rir"]
    assert "dataset.common_range=true" in measures.reasons["ceiling/rir"]
    inside = Ceiling()(compare(pair_of(k_p, gaussian(8, 9, seed=5) @ k_p), eye(6)))
    assert inside.metrics["ceiling/rir"] >= 1 - 1e-9
    one = Ceiling()(compare(pair_of(k_p, gaussian(1, 6, seed=5)), eye(6)))
    assert one.metrics["ceiling/rir"] == pytest.approx(9)  # kappa(K_P): H_H of rank 1 has kappa 1 for every theta


def test_tasks_that_share_their_inputs_have_ceiling_one():
    k = with_spectrum(f64([3.0, 2, 1]), 9, 3, seed=0)
    measures = Ceiling()(compare(pair_of(k, 2 * k), gaussian(3, 3, seed=1)))
    assert measures.metrics["ceiling/rir"] == pytest.approx(1)
    assert "ceiling is 1" in measures.reasons["ceiling/attained"]


@pytest.mark.parametrize(
    ("options", "dim", "kappas", "ceiling"),
    [
        ({"normalize": "each", "keep_id": True}, 71, (207.6, 156.9, 49.11), 64.99),
        ({"normalize": "shared"}, 74, (8654, 6206, 4.346e6), 6.059e6),
    ],
)
def test_ceilings_of_house_prices(data_dir, options, dim, kappas, ceiling):
    folder = data_dir / "house_prices"
    options |= {"root": str(folder), "download": False, "val_fraction": 0, "test_fraction": 0, "common_range": True}
    pair = data.house_prices(seed=0, **options)
    metrics = ceiling_of(pair, eye(pair.dim))
    metrics |= Alignment()(compare(pair, eye(pair.dim))).metrics
    assert pair.dim == dim
    names = ("kappa_primary_baseline", "kappa_harmful_baseline", "alignment/kappa_M")
    assert [metrics[name] for name in names] == pytest.approx(kappas, rel=5e-4)
    assert metrics["ceiling/rir"] == pytest.approx(ceiling, rel=1e-4)


def align(k_p: Tensor, k_h: Tensor, **options) -> Measures:
    return Alignment(**options)(compare(pair_of(k_p, k_h), eye(k_p.shape[1])))


def test_alignment_is_one_for_proportional_and_zero_for_reversed_spectra():
    k = with_spectrum(f64([4.0, 2, 1]), 9, 3, seed=0)
    same = align(k, 3 * k).metrics
    assert (same["alignment/score"], same["alignment/kernel"], same["alignment/kappa_M"]) == pytest.approx((1, 1, 1))
    assert same["alignment/principal_angle_max"] == pytest.approx(0, abs=1e-6)
    assert align(k, torch.linalg.pinv(k).T).metrics["alignment/score"] == pytest.approx(0, abs=1e-12)
    flat = align(k, eye(3))
    assert flat.metrics["alignment/score"] is None
    assert "equal" in flat.reasons["alignment/score"]


@given(seeds, spectra(3, 6), spectra(3, 6))
def test_alignment_is_a_share_that_no_common_rotation_changes(seed, p, h):
    dim = max(len(p), len(h))
    k_p, k_h, rotation = (
        with_spectrum(p, dim, dim, seed),
        with_spectrum(h, dim, dim, seed + 3),
        orthonormal(dim, dim, seed),
    )
    one, two = align(k_p, k_h).metrics, align(k_p @ rotation, k_h @ rotation).metrics
    for name in ("alignment/score", "alignment/kernel"):
        assert 0 <= one[name] <= 1
        assert two[name] == pytest.approx(one[name], abs=1e-6)


def test_principal_angles_of_two_known_planes():
    angle = 0.3
    turned = f64([[1, 0, 0], [0, math.cos(angle), math.sin(angle)]])
    plane = eye(3)[:2]
    weights = f64([[2.0], [1.0]])
    measures = align(weights * plane, weights * turned, energy=1.0)
    assert measures.curves["alignment/principal_angles"]["y"] == pytest.approx([0, angle], abs=1e-7)
    assert measures.metrics["alignment/principal_angle_mean"] == pytest.approx(angle / 2, abs=1e-7)
    assert measures.metrics["alignment/kappa_M"] is None
    cosines = measures.arrays["alignment/cosines"]
    torch.testing.assert_close(cosines, torch.diag(torch.tensor([1, math.cos(angle)])), atol=1e-6, rtol=0)
    # the first direction holds 4/5 of each trace
    assert align(weights * plane, weights * turned, energy=0.8).curves["alignment/principal_angles"]["x"] == [1]
