"""Immunization of the learning curve: exact curves, exact gradients, and what training on them does to the probes."""

from dataclasses import replace

import pytest
import torch
from helpers.matrices import gaussian
from hypothesis import settings

from immunization.data import digits
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.evaluation import Comparison, LearningCurves, PrimaryPerformance
from immunization.evaluation.rir import condition_ratios
from immunization.methods import Decoys, LearningCurve
from immunization.methods.learning_curve import horizons
from immunization.methods.linear_map import generalizing_step, probe_of_inputs
from immunization.models import Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains

quick = settings(max_examples=15)


def immunized(pair, method, lr=3e-3, seed=0, cosine=False, perturbation=0.0):
    torch.manual_seed(seed)
    model = Linear(pair)
    model.extractor.theta.data *= 1 + perturbation * gaussian(pair.dim, pair.dim, seed=seed + 1)
    method.setup(model, pair)
    batches = PairedBatches(pair, None, torch.Generator())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, method.epochs) if cosine else None
    steps = train(method, model, batches, optimizer, scheduler=scheduler)
    method.finish(model)
    return model, steps


def test_harmful_probe_is_slowed_by_orders_of_magnitude_and_the_primary_one_is_not():
    pair = digits(seed=0, primary=3, harmful=8, benign=5)
    model, _ = immunized(pair, LearningCurve(epochs=100))
    comparison = Comparison(pair, model)
    metrics = LearningCurves()(comparison).metrics | PrimaryPerformance()(comparison).metrics
    assert metrics["steps_ratio/harmful"] >= 1e3
    assert metrics["steps_ratio/primary"] <= 1
    assert metrics["primary/head_accuracy"] == metrics["primary/accuracy_baseline"]


def test_the_last_bit_of_theta_decides_nothing():
    """Along a cosine from a small rate; with lr=3e-3, constant, RIR differs by tens of per cent."""
    pair, found = digits(seed=0), []
    for perturbation in (0.0, 1e-14):
        method = LearningCurve(epochs=150, lambda_P=5.0, benign_weight=0.0, targets="baseline", patience=None)
        model, _ = immunized(pair, method, lr=1e-3, cosine=True, perturbation=perturbation)
        comparison = Comparison(pair, model)
        found.append(LearningCurves()(comparison).metrics | {"rir": condition_ratios(comparison).rir})
    first, second = found
    assert first["steps_ratio/harmful"] == second["steps_ratio/harmful"] > 1e4
    assert first["steps_ratio/primary"] == second["steps_ratio/primary"] <= 1
    assert first["rir"] == pytest.approx(second["rir"], rel=1e-3)


def test_a_primary_probe_that_became_slower_is_flagged():
    pair = digits(seed=0, primary=3, harmful=8)
    ruined, kept = (LearningCurve(epochs=100, lambda_P=weight) for weight in (0.0, 1.0))
    flags = [LearningCurves()(Comparison(pair, immunized(pair, method)[0])).flags for method in (ruined, kept)]
    assert ["primary_slower" in found for found in flags] == [True, False]


def test_early_stopping_goes_back_to_the_best_theta():
    pair = digits(seed=0)
    method = LearningCurve(epochs=200, patience=10, rotate=False)
    model, steps = immunized(pair, method, lr=0.3)  # coarse steps: the score stalls soon
    assert steps < 200
    assert method.score(model) == pytest.approx(method.callbacks[0].score)


def test_without_validation_rows_patience_has_no_effect_and_says_so():
    method = LearningCurve(epochs=20, patience=5)
    _, steps = immunized(digits(seed=0, val_fraction=0.0), method)
    assert steps == 20
    assert "no_early_stopping" in method.flags


def noisy(rows: int, noise: float, seed: int = 0) -> Task:
    """A regression on 40 features of falling variance, few of which carry signal; held-out rows have no noise."""
    w = torch.linspace(1, 0, 40, dtype=torch.float64)[:, None] ** 4
    parts = []
    for i, n in enumerate((rows, 100, 400)):
        x = gaussian(n, 40, seed=seed + i) * torch.logspace(0, -1, 40).double()
        parts.append(Split(x, (x @ w)[:, 0] + (i < 2) * noise * gaussian(n, seed=seed + 5 + i)))
    return Task(f"noisy{seed}", *parts)


def test_the_step_that_generalizes_best_is_the_earlier_the_more_noise_there_is():
    steps = [
        generalizing_step(probe_of_inputs(task), task) for task in (noisy(60, 1e-6), noisy(60, 0.3), noisy(60, 3.0))
    ]
    assert steps[0] > steps[1] > steps[2]


def test_following_the_baseline_does_not_overfit_noisy_labels():
    """With the labels as targets a fresh primary probe first learns the noise, here for a hundred times as long."""
    pair = TaskPair("noisy", noisy(60, 0.3), noisy(300, 0.1, seed=20))
    ratios = {}
    for targets, weight, epochs in (("labels", 1.0, 150), ("baseline", 3.0, 600)):
        method = LearningCurve(epochs=epochs, lambda_P=weight, benign_weight=0.0, targets=targets, patience=None)
        model, _ = immunized(pair, method, lr=2e-3, cosine=True)
        ratios[targets] = LearningCurves()(Comparison(pair, model)).metrics
    assert ratios["labels"]["steps_ratio/primary"] > 100
    assert ratios["baseline"]["steps_ratio/primary"] <= 1
    assert ratios["baseline"]["steps_ratio/harmful"] > 10


@pytest.mark.parametrize(("noise", "val", "follows"), [(1e-3, True, False), (3.0, True, True), (1e-3, False, True)])
def test_auto_takes_the_labels_where_validation_rows_show_no_overfitting(noise, val, follows):
    """Least squares on 60 rows of 40 columns overfits noise as large as the signal; without such rows nobody knows."""
    primary = noisy(60, noise)
    if not val:
        primary = replace(primary, val=Split(primary.val.x[:0], primary.val.y[:0]))
    pair = TaskPair("noisy", primary, noisy(300, 0.1, seed=20))
    aims = {}
    for targets in ("auto", "labels", "baseline"):
        method = LearningCurve(epochs=1, targets=targets)
        method.setup(Linear(pair), pair)
        aims[targets] = method.aim
    chosen = "baseline" if follows else "labels"
    assert torch.equal(aims["auto"], aims[chosen])
    assert bool(aims["auto"].any()) == follows


def test_the_path_starts_earlier_where_the_baseline_overfits_on_validation_rows():
    for noise, late in ((3.0, True), (1e-6, False)):
        pair = TaskPair("noisy", noisy(60, noise), noisy(300, 0.1, seed=20))
        method = LearningCurve(epochs=1, targets="baseline")
        method.setup(Linear(pair), pair)
        assert (method._not_too_late(2.0**16) < 2.0**16) == late


@pytest.mark.parametrize("targets", ["labels", "baseline", "auto"])
def test_regression_and_several_classes(targets):
    x = gaussian(40, 6, seed=0)
    regression = Split(x, x @ gaussian(6, seed=1))
    classes = Split(gaussian(40, 6, seed=2), torch.arange(40) % 3)
    pair = TaskPair(
        "mixed",
        Task("classes", classes, classes, classes, classes=3),
        Task("regression", regression, regression, regression),
    )
    method = LearningCurve(epochs=30, targets=targets, start="model")
    before = Linear(pair)
    method.setup(before, pair)
    first = method.step(before, None, None)
    model, _ = immunized(pair, method, lr=1e-2)
    last = method.step(model, None, None)
    assert last["loss"] < first["loss"]
    assert model.head.weight.shape == (3, 6)


@pytest.mark.parametrize("horizon", [[], [4, 2], [1, 1], [0, 1], [1.5, 2], -1, 99, "abc", None, True])
def test_horizons_that_cannot_be(horizon):
    with pytest.raises(ConfigError, match=r"method\.horizon"):
        LearningCurve(epochs=1, horizon=horizon)


def test_horizons():
    assert horizons(3).tolist() == [1, 2, 4, 8]
    assert horizons([1, 10, 100]).tolist() == [1, 10, 100]


def test_bad_options():
    for options in ({"benign_weight": -1.0}, {"lambda_H": float("nan")}, {"patience": 0}, {"targets": "noise"}):
        with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}"):
            LearningCurve(epochs=1, **options)


def test_a_few_columns_start_where_a_trial_came_lowest(monkeypatch):
    monkeypatch.setattr("immunization.methods.learning_curve.TRIAL", 100)
    tasks = []
    for seed in (0, 1):
        x = gaussian(60, 5, seed=seed) * torch.tensor([3.0, 1.0, 1.0, 0.3, 0.1], dtype=torch.float64).roll(seed)
        rows = Split(x, x @ gaussian(5, seed=seed + 4))
        tasks.append(Task("regression", rows, rows, rows))
    pair = TaskPair("small", *tasks)

    def loss(start: str) -> float:
        method, model = LearningCurve(epochs=1, start=start), Linear(pair)
        method.setup(model, pair)
        return method.step(model)["loss"].item()

    found = {start: loss(start) for start in ("model", "auto")}
    monkeypatch.setattr("immunization.methods.learning_curve.optimal_map", lambda *_: torch.eye(5).double())
    found["theta_0"] = loss("auto")  # both trials begin there
    assert found["auto"] < found["theta_0"] - 0.01 < found["model"] - 0.1, found


def test_training_may_start_from_the_map_of_decoys():
    pair = digits(seed=0)
    model, other = Linear(pair), Linear(pair)
    LearningCurve(epochs=1, start="decoys").setup(model, pair)
    Decoys(rotate=False).setup(other, pair)
    mine, theirs = (m.extractor.theta.detach() for m in (model, other))
    torch.testing.assert_close(mine * (theirs.norm() / mine.norm()), theirs)
    assert torch.linalg.cond(mine) == pytest.approx(1e6, rel=1e-3)
