"""What methods of a linear map share: the centered task, the best early stop, the refitted head, a bound on theta."""

import pytest
import torch
from helpers.matrices import gaussian
from helpers.nets import build, open_pair
from torch.testing import assert_close

from immunization import run
from immunization.data import digits
from immunization.data.task import SPLITS, Split, Task, TaskPair
from immunization.methods import ClosedForm, LearningCurve, OptKappa
from immunization.methods.learning_curve import PACE
from immunization.methods.linear_map import MAX_CONDITION, centered_task, generalizing_step, probe_of_inputs, rescale
from immunization.models import Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


def noisy(noise: float, seed: int = 0) -> Task:
    """A regression on 8 features of falling variance."""
    parts = []
    for n in (30, 12, 20):
        x = gaussian(n, 8, seed=seed + n) * torch.logspace(0, -1, 8).double() + 1.0
        parts.append(Split(x, x[:, 0] + noise * gaussian(n, seed=seed + n + 1)))
    return Task("noisy", *parts)


@pytest.mark.parametrize(("factor", "power"), [(1.0, 1.0), (3.0, 4.0), (0.3, 0.25), (1e-6, 2.0**-20)])
def test_theta_is_rescaled_by_the_nearest_power_of_two(factor, power):
    theta = torch.eye(8, dtype=torch.float64) / factor
    scaled = torch.nn.Parameter(theta.clone())
    rescale(scaled, probe_of_inputs(noisy(0.1)))
    assert torch.equal(scaled.data, theta * power)


def test_the_centered_task_subtracts_the_mean_of_the_training_rows_everywhere():
    task = noisy(0.1)
    mean = sum(task.train.x) / len(task.train)
    for split in SPLITS:
        assert_close(getattr(centered_task(task), split).x, getattr(task, split).x - mean)


@pytest.mark.parametrize("noise", [1e-6, 0.1, 3.0])
def test_the_step_that_generalizes_best_by_its_definition(noise):
    """The first of 2^(j/2) within 5 % of the least ||Y - A_t Y||^2 / (N - tr A_t)^2, A_t the hat matrix of t steps."""
    task = noisy(noise)
    x, y = task.train.x, task.targets(task.train.y)
    u, sigma, _ = torch.linalg.svd(x, full_matrices=False)
    scores = {}
    for j in range(41):
        t = 2 ** (j / 2)
        hat = u * (1 - (1 - (sigma / sigma[0]) ** 2) ** t) @ u.T
        scores[t] = ((y - hat @ y).square().sum() / (len(x) - hat.trace()) ** 2).item()
    least = min(scores.values())
    expected = next(t for t, score in scores.items() if score <= 1.05 * least)
    assert generalizing_step(probe_of_inputs(task), task) == pytest.approx(expected)


def test_the_aim_runs_ahead_of_the_baselines_path():
    """After t steps a primary probe is to stand where the baseline's stands after 1 + PACE (t - 1)."""
    pair = TaskPair("noisy", noisy(1.0), noisy(0.1, seed=50))
    method = LearningCurve(epochs=1, targets="baseline", start="model")
    method.setup(Linear(pair), pair)
    probe = probe_of_inputs(pair.primary)
    steps = 1 + PACE * (method.grid[: len(method.aim)] - 1)
    followed = steps > generalizing_step(probe, pair.primary)
    assert followed.any()
    assert_close(method.aim[followed], probe.residuals(steps)[followed])


def test_the_score_of_a_learning_curve_counts_random_labels_by_their_weight():
    pair = TaskPair("noisy", noisy(0.1), noisy(0.1, seed=50))
    scores, model = {}, Linear(pair)
    for weight in (0.0, 2.0):
        method = LearningCurve(epochs=1, benign_weight=weight, start="model")
        method.setup(model, pair)
        scores[weight] = method.score(model)
        expected = method.step(model, None, None)["excess_random"].item()
    assert scores[0.0] - scores[2.0] == pytest.approx(2 * expected)
    assert expected > 0.01


def test_opt_kappa_ends_with_the_head_of_least_squares_on_the_inputs():
    pair = TaskPair("noisy", noisy(0.1), noisy(0.1, seed=50))
    model, method = Linear(pair, "random"), OptKappa(epochs=1, form="log")
    method.setup(model, pair)
    method.finish(model)
    x = pair.primary.train.x
    best = torch.linalg.lstsq(x, pair.primary.targets(pair.primary.train.y)).solution
    assert_close(model(pair.primary.test.x), pair.primary.test.x @ best)


# --- The bound on a folded map's condition number: there by default on nets, never on linear models -------------------


def condition_of(theta):
    sigma = torch.linalg.svdvals(theta.detach())
    return (sigma[0] / sigma[-1]).item()


def trained(method, model, pair, lr):
    torch.manual_seed(0)
    method.setup(model, pair)
    train(method, model, PairedBatches(pair, None, torch.Generator()), torch.optim.Adam(model.parameters(), lr=lr))
    method.finish(model)
    return model


def on_a_net(folders, method, lr=0.1):
    pair = open_pair(folders)
    net, tasks = build(pair).read(pair, True)
    return trained(method, net, tasks, lr), tasks


def test_a_net_ends_within_the_bound_by_default(folders):
    """A rate at which theta leaves the bound at once without one; the primary logits stay what they were."""
    free, _ = on_a_net(folders, LearningCurve(epochs=8, max_condition=None))
    assert condition_of(free.extractor.theta) > 2 * MAX_CONDITION
    net, tasks = on_a_net(folders, LearningCurve(epochs=8))
    assert condition_of(net.extractor.theta) <= MAX_CONDITION * (1 + 1e-9)
    x = tasks.primary.test.x
    assert_close(net.logits(x), net.baseline_logits(tasks.primary), rtol=1e-8, atol=1e-8)


def test_a_bound_of_ones_own_holds(folders):
    net, _ = on_a_net(folders, LearningCurve(epochs=8, max_condition=3.0))
    assert condition_of(net.extractor.theta) <= 3 * (1 + 1e-9)


def test_closed_form_is_not_bounded_unless_told_to(folders):
    """Its score is a large condition number: docs/results/precision.md."""
    free, _ = on_a_net(folders, ClosedForm(ridge=1e-6))
    bounded, _ = on_a_net(folders, ClosedForm(ridge=1e-6, max_condition=4.0))
    assert condition_of(free.extractor.theta) > 4 * 1.1
    assert condition_of(bounded.extractor.theta) <= 4 * (1 + 1e-6)


def test_linear_models_are_bit_for_bit_what_they_are_without_a_bound():
    pair = digits(seed=0)
    thetas = [
        trained(LearningCurve(epochs=3, **bound), Linear(pair), pair, 1e-2).extractor.theta
        for bound in ({}, {"max_condition": None})
    ]
    assert torch.equal(*thetas)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["resnet18_cars_small", "vit_cars_small"])
def test_real_nets_survive_deployment_and_stay_immunized(experiment, real_images, tmp_path):
    """The bars of the default, on whole nets: docs/results/precision.md."""
    options = [f"experiment={experiment}", *real_images, "evaluation=[own_head,learning_curves,deployment]"]
    metrics = run(options, tmp_path / "run").metrics
    for form, points in (("float32", 0), ("float16", 1), ("bfloat16", 1), ("int8", 3)):
        lost = metrics[f"deployment/accuracy_{form}_baseline"] - metrics[f"deployment/accuracy_{form}"]
        assert lost <= points / 100 + 1e-9, form
    assert metrics["steps_ratio/harmful"] >= 500
    assert metrics["primary/changed_predictions"] == 0
