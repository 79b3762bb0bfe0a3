"""Ratio (ii) as a constraint: where the run ends, what the multiplier does, and when nothing is held."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.comparisons import f64
from helpers.matrices import gaussian
from helpers.methods import make_pair, task

from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.evaluation import Comparison
from immunization.evaluation.rir import condition_ratios
from immunization.methods import ConditionNumber, Method, OptKappa, ReleasedConditionNumber, combined
from immunization.methods.hold import Bound
from immunization.models import Linear
from immunization.theory.optimal_map import conditioned
from immunization.theory.spectrum import condition_number
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


def small_table() -> TaskPair:
    """Eight columns whose scales differ, and differ otherwise in the two tasks; fixed weights spread H_P here."""
    scales = f64([3.0, 2.0, 1.0, 1.0, 0.7, 0.5, 0.2, 0.1])
    tasks = []
    for seed in (0, 1):
        x = gaussian(120, 8, seed=seed) * scales.roll(seed) @ torch.linalg.qr(gaussian(8, 8, seed=seed + 5)).Q
        tasks.append(task(x, x @ gaussian(8, seed=seed + 7)))
    return TaskPair("table", *tasks)


def trained(
    method: Method, pair: TaskPair, steps: int | None = None, before: Callable[..., None] = lambda *_: None
) -> tuple[Linear, torch.optim.Optimizer]:
    """The model after `steps` of the training (None: all and `finish`); `before` it, model and optimizer are given."""
    model = Linear(pair)
    method.setup(model, pair)
    optimizer = torch.optim.Adam(model.groups(), lr=3e-3)
    before(model, optimizer)
    train(method, model, PairedBatches(pair, None, torch.Generator()), optimizer, most=steps)
    if steps is None:
        method.finish(model)
    return model, optimizer


def ratios(pair: TaskPair, model: Linear) -> tuple[float, float]:
    found = condition_ratios(Comparison(pair, model))
    return found.of("harmful"), found.of("primary")


@pytest.mark.parametrize("bound", [0.95, 0.5])
def test_a_run_ends_within_the_bound_where_fixed_weights_do_not(bound):
    pair = small_table()
    fixed, _ = trained(ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=150, hold_primary=None), pair)
    assert ratios(pair, fixed)[1] > 1
    method = ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=150, hold_primary=bound)
    model, _ = trained(method, pair)
    harmful, primary = ratios(pair, model)
    assert harmful > 1
    assert primary <= bound
    expected = pair.primary.train.x @ torch.linalg.lstsq(pair.primary.train.x, pair.primary.train.y[:, None]).solution
    torch.testing.assert_close(model(pair.primary.train.x), expected)


def test_weights_that_hold_by_themselves_are_left_alone():
    pair = small_table()
    thetas = [
        trained(ConditionNumber(lambda_P=10.0, lambda_H=0.1, epochs=60, hold_primary=b), pair)[0].extractor.theta
        for b in (None, 1.0)
    ]
    assert torch.equal(*thetas)


def test_opt_kappa_in_logarithms_is_held_and_its_other_forms_are_not():
    pair = small_table()
    model, _ = trained(OptKappa(form="log", epochs=60, hold_primary=0.5), pair)
    assert ratios(pair, model)[1] <= 0.5
    with pytest.raises(ConfigError, match=r"method.hold_primary=0.5 needs method.form=log, not raw"):
        OptKappa(hold_primary=0.5)


@pytest.mark.parametrize(
    "method",
    [
        ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=3, balance=False),
        ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=3, hold_primary=None),
        ReleasedConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=3, batch_size=None),
        OptKappa(epochs=3),
    ],
    ids=["unbalanced", "null", "released", "raw"],
)
def test_fixed_weights_stay_as_they_are(method):
    trained(method, make_pair((30, 20)))
    assert (method.bound, method.factor, method.callbacks) == (None, 1.0, [])


@pytest.mark.parametrize("raised", [True, False])
def test_the_nearest_map_has_the_condition_number_asked_for_and_is_the_map_itself_within_it(raised):
    root, theta = gaussian(4, 6, seed=0), gaussian(6, 6, seed=1)
    kappa = condition_number(root @ theta, rank=4)
    near = conditioned(theta, root, kappa / 3, raised)
    assert condition_number(root @ near, rank=4) == pytest.approx(kappa / 3)
    torch.testing.assert_close(conditioned(theta, root, 2 * kappa, raised), theta)
    unseen = torch.linalg.svd(root @ theta).Vh[4:].T  # what no primary feature shows stays
    torch.testing.assert_close(near @ unseen, theta @ unseen)
    clipped, before = (torch.linalg.svdvals(root @ a)[:4] for a in (near, theta))
    assert (clipped >= before - 1e-12).all() if raised else (clipped <= before + 1e-12).all()
    assert math.isfinite(near.norm())


def test_a_largest_accuracy_drop_works_where_condition_numbers_are_looked_at_seldom():
    rows = [torch.cat([gaussian(90, 8, seed=seed), gaussian(90, 300, seed=seed + 2)], 1) for seed in (0, 1)]
    splits = [
        [Split(x[part], (x[part, 0] > 0).long()) for part in (slice(60), slice(60, None), slice(0))] for x in rows
    ]
    tasks = [Task("task", *own, classes=2) for own in splits]
    method = ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=3, max_accuracy_drop=0.5)
    for pair in (TaskPair("wide", *tasks), TaskPair("two", *tasks, more={"harmful_2": tasks[1]})):
        model, _ = trained(combined(method, pair), pair)
        assert model.extractor.theta.isfinite().all()


def test_theta_0_that_is_kept_for_want_of_better_is_told(monkeypatch):
    """As on a net, which has no nearest map."""
    pair = small_table()
    tasks = {role: replace(task, val=task.train) for role, task in pair.tasks.items()}
    method = ConditionNumber(lambda_P=1.0, lambda_H=30.0, epochs=3, hold_primary=0.01, max_accuracy_drop=0.5)
    monkeypatch.setattr(Bound, "_nearest", lambda self, model, theta: [])
    trained(method, pair.with_tasks(tasks))
    assert method.flags["primary_not_held"].endswith("; theta_0 is kept")


def test_two_harmful_tasks_whose_weights_hold_by_themselves_are_left_alone():
    pair = small_table()
    pair = replace(pair, more={"harmful_2": pair.harmful})
    thetas = [
        trained(combined(ConditionNumber(lambda_P=10.0, lambda_H=0.1, epochs=60, hold_primary=bound), pair), pair)[
            0
        ].extractor.theta
        for bound in (None, 1.0)
    ]
    assert torch.equal(*thetas)
