"""Attackers who read the weights: the map of trained layers, and labels that are spread."""

import math

import pytest
import torch
from helpers.matrices import gaussian, orthonormal
from helpers.victims import classes, colored_pair, net_victim, regression, victim_of, zeroed

from immunization.attacks import ReadWeights, Spread
from immunization.data.task import Split, Task
from immunization.errors import Inapplicable
from immunization.methods.decoys import discriminants
from immunization.methods.linear_map import probe_of_inputs
from immunization.theory.singled_out import whitened_by_neighbours

FEW = {"samples": 1, "precision": None, "seed": 0}


def spread(**options):
    return Spread(**{"alphas": [0.0, 0.5, 0.9], "neighbours": 10, "most": 4000, **FEW, **options})


def tight_classes(dim, rows=200, count=2, wide=1.0, shift=0.5):
    """Classes that are tight along `count` directions, behind wide directions that tell nothing."""
    x, labels = wide * gaussian(3 * rows, dim, seed=1), torch.arange(3 * rows) % count
    x[:, :count] = 0.1 * x[:, :count] / wide + shift * torch.eye(count).double()[labels]
    return Task(
        "tight", *map(Split, (x @ orthonormal(dim, dim, seed=2)).split(rows), labels.split(rows)), classes=count
    )


def squeezed(task, depth=1e-3):
    basis = torch.linalg.qr(discriminants(probe_of_inputs(task), 0.1)).Q
    return (torch.eye(task.dim).double() - (1 - depth) * basis @ basis.T) @ orthonormal(task.dim, task.dim, seed=9)


def test_labels_spread_along_rings_that_no_mean_tells_apart():
    angle = torch.linspace(0, 2 * math.pi, 101, dtype=torch.float64)[1:]
    rings = [torch.stack([angle.cos(), angle.sin(), torch.full_like(angle, height)], 1) for height in (-0.4, 0.4)]
    split = Split(torch.cat(rings) + 0.01 * gaussian(200, 3, seed=0), torch.arange(200) // 100)
    victim = victim_of(Task("rings", split, split, split, classes=2), torch.eye(3).double())
    finals = {
        alpha: [spread(alphas=[alpha], neighbours=4, seed=seed).run(victim, "immunized").final for seed in range(3)]
        for alpha in (0.0, 0.99)
    }
    assert sum(finals[0.0]) / 3 < 0.85
    assert min(finals[0.99]) > 0.95


def test_labels_spread_inside_of_what_the_weights_single_out():
    task = tight_classes(60, shift=0.8)
    victim = victim_of(task, squeezed(task))
    after, before = (spread().run(victim, stage).final for stage in ("immunized", "baseline"))
    assert after > 0.95
    assert before < 0.8


def test_near_neighbours_tell_the_scatter_within_classes_without_a_label():
    task = tight_classes(6, shift=3.0)

    def apart(x):
        """Distance of the means of the classes over the deviation within them."""
        ends = [x[task.train.y == label] for label in range(2)]
        within = torch.cat([own - own.mean(0) for own in ends]).square().sum(1).mean().sqrt()
        return ((ends[0].mean(0) - ends[1].mean(0)).norm() / within).item()

    x = task.train.x
    assert apart(x @ whitened_by_neighbours(x, torch.eye(6).double())) > 1.2 * apart(x)


def test_few_rows_and_all_rows_and_a_regression():
    task = classes()
    victim = victim_of(task, torch.eye(6).double())
    for options in ({"samples": None}, {"most": 7, "samples": 5}, {"most": 20}):
        assert spread(**options).run(victim, "immunized").final >= 0.95
    x = gaussian(20, 3, seed=0)
    with pytest.raises(Inapplicable, match="no classes"):
        spread().run(victim_of(regression(x, x), torch.eye(3).double()), "immunized")


def test_of_trained_layers_the_map_between_features_is_read():
    """It is theta itself where the layers do what a map does."""
    task = tight_classes(30)
    theta = squeezed(task)
    attack = ReadWeights(ridges=[0.01, 0.1, 1.0], **FEW)
    known, hidden = victim_of(task, theta), victim_of(task, theta)
    hidden.model.last_map = lambda extractor: None
    assert not attack.needs_theta_0(known)
    assert attack.needs_theta_0(hidden)
    torch.testing.assert_close(attack.map(hidden, "immunized", task.train.x), theta, atol=1e-9, rtol=0)
    finals = [attack.run(victim, "immunized").final for victim in (known, hidden)]
    assert finals[0] == finals[1] > attack.run(known, "baseline").final


def test_trained_layers_of_a_net(tmp_path):
    victim = net_victim(colored_pair(tmp_path), zeroed, "test_resnet", "last")
    attack = ReadWeights(ridges=[0.01, 0.1, 1.0], **FEW | {"samples": 5})
    assert attack.needs_theta_0(victim)
    for attacker in (attack, spread(samples=5)):
        for stage in ("immunized", "baseline"):
            assert 0 <= attacker.run(victim, stage).final <= 1


def with_constant_features(folder, value):
    """A net whose every feature is this value."""

    def fill(model):
        for module in model.extractor.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.zero_()
                module.bias.fill_(value)

    return net_victim(colored_pair(folder), fill, "test_resnet", "last")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_features_tell_nothing(tmp_path, value):
    victim = with_constant_features(tmp_path, value)
    assert spread().run(victim, "immunized").final <= 0.7
    assert ReadWeights(ridges=[0.01], **FEW).run(victim, "immunized").final <= 1  # reads theta_0's features, too


def test_features_that_are_no_numbers_are_named(tmp_path):
    victim = with_constant_features(tmp_path, float("nan"))
    for attacker in (ReadWeights(ridges=[0.01], **FEW), spread()):
        with pytest.raises(Inapplicable, match="NaN"):
            attacker.run(victim, "immunized")
