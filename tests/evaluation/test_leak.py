"""What the weights of a map tell of the harmful task: planted maps, and those of methods."""

import pytest
import torch
from helpers.comparisons import compare, eye
from helpers.matrices import gaussian, orthonormal
from helpers.victims import noisy_classes, victim_of

from immunization import run
from immunization.attacks import ReadWeights
from immunization.data.task import Split, Task, TaskPair
from immunization.evaluation import Leak
from immunization.methods.decoys import discriminants
from immunization.methods.linear_map import probe_of_inputs
from immunization.theory.singled_out import auc, ends, singled_out

ONE_LABEL = {
    (0, 1): (0.8722, 0.7917),
    (3, 8): (0.85, 0.7265),
    (4, 9): (0.6917, 0.6028),
    (2, 7): (0.9914, 0.9743),
    (5, 6): (0.9556, 0.9389),
}
"""By primary and harmful digit: accuracy with one label of each class and the map of `learning_curve`, or another."""
OPTIONS = {"labels": [1, 5], "draws": 10, "ridges": [0.01, 0.1, 1.0]}


def quiet_classes(count, shift, dim=60, rows=300):
    """Classes that differ along directions of little variance, which no principal component shows."""
    x, labels = gaussian(3 * rows, dim, seed=1), torch.arange(3 * rows) % count
    x[:, :count] = 0.3 * x[:, :count] + shift * torch.eye(count).double()[labels]
    x = x @ orthonormal(dim, dim, seed=2)
    return Task("quiet", *map(Split, x.split(rows), labels.split(rows)), classes=count)


def squeezed(directions, depth=1e-3):
    """I with the span of `directions` [D, k] squeezed alike, behind a random rotation."""
    basis = torch.linalg.qr(directions).Q
    dim = len(basis)
    return (eye(dim) - (1 - depth) * basis @ basis.T) @ orthonormal(dim, dim, seed=9)


def measured(task, theta):
    return Leak(**OPTIONS)(compare(TaskPair("pair", task, task), theta))


@pytest.mark.parametrize(("classes", "shift"), [(2, 0.5), (10, 0.8)])
def test_a_map_that_squeezes_what_tells_the_classes_is_found(classes, shift):
    task = quiet_classes(classes, shift)
    told = measured(task, squeezed(discriminants(probe_of_inputs(task), 0.1)))
    assert told.metrics["leak/worth_1"] > 0.1
    assert told.metrics["leak/worth_low_1"] > 0.05
    gain = told.metrics["leak/with_1"] - told.metrics["leak/without_1"]
    assert told.metrics["leak/worth_1"] == pytest.approx(gain, abs=1e-12)
    assert "weights_tell_the_task" in told.flags
    untold = measured(task, squeezed(gaussian(60, classes, seed=3)))
    assert untold.metrics["leak/worth_1"] < 0.02
    assert "weights_tell_the_task" not in untold.flags


def test_a_direction_of_its_own_separates_two_classes_without_a_label():
    task = noisy_classes(dim=40, rows=300, count=2)
    direction = discriminants(probe_of_inputs(task), 0.1)
    best = auc(task.test.x @ direction, task.test.y, 2).item()
    assert best > 0.8
    told = measured(task, squeezed(direction)).metrics
    assert told["leak/auc"] == pytest.approx(best, abs=1e-9)  # any direction of a span of one is that one
    assert told["leak/auc_random"] < 0.6
    hidden = measured(task, squeezed(torch.cat([direction, gaussian(40, 19, seed=4)], 1))).metrics
    assert hidden["leak/auc"] < 0.7


def test_the_identity_and_a_rotation_tell_nothing():
    task = noisy_classes(dim=12, rows=120)
    for theta in (eye(12), orthonormal(12, 12, seed=1)):
        metrics = measured(task, theta).metrics
        assert metrics["leak/auc"] == metrics["leak/auc_random"]
        assert metrics["leak/worth_1"] == metrics["leak/worth_5"] == 0


def test_singular_values_that_are_alike_are_not_told_apart():
    theta = squeezed(gaussian(16, 4, seed=0))
    assert [basis.shape[1] for basis in ends(theta)] == [12, 4]
    assert [basis.shape[1] for basis in singled_out(theta, 6)] == [4, 12]
    rounded = theta.float()
    assert [basis.shape[1] for basis in ends(rounded)] == [12, 4]
    assert singled_out(orthonormal(16, 16, seed=1).float(), 6) == []


def test_auc_of_classes_and_signs():
    labels = torch.tensor([0, 0, 1, 1])
    scores = torch.tensor([[0.0, 3.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 0.0], [3.0, 0.0, 2.0]])
    torch.testing.assert_close(auc(scores, labels, 2), torch.tensor([1.0, 1.0, 0.75]).double())


def test_the_attacker_has_what_leak_measures():
    task = noisy_classes(dim=40, rows=300, count=2)
    victim = victim_of(task, squeezed(discriminants(probe_of_inputs(task), 0.1)))
    attack = ReadWeights(samples=5, precision=None, seed=0, ridges=[0.01, 0.1, 1.0])
    after, before = (attack.run(victim, stage).final for stage in ("immunized", "baseline"))
    metrics = Leak(labels=[5], draws=1, ridges=[0.01, 0.1, 1.0])(victim.comparison).metrics
    assert after == metrics["leak/with_5"]
    assert after > before


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize(("pair", "accuracies"), list(ONE_LABEL.items()), ids=str)
def test_the_smallest_direction_of_learning_curve_is_a_classifier_of_the_harmful_task(pair, accuracies, tmp_path):
    primary, harmful = pair
    data = [f"dataset.primary={primary}", f"dataset.harmful={harmful}", "tracker=none"]
    result = run([*data, "method=learning_curve", "evaluation=[learning_curves,leak]"], folder=tmp_path)
    assert result.metrics["leak/auc"] > 0.94
    assert (result.metrics["leak/with_1"], result.metrics["leak/without_1"]) == pytest.approx(accuracies, abs=1e-4)
    assert result.metrics["leak/worth_1"] > 0
    assert "weights_tell_the_task" in result.flags
    assert result.verdict[0].startswith("The released weights reveal the harmful task: without a label")
