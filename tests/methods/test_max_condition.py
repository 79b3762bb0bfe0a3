"""The bound on a folded map's condition number: there by default on nets, never on linear models."""

import pytest
import torch
from helpers.nets import build, open_pair
from torch.testing import assert_close

from immunization import run
from immunization.data import digits
from immunization.methods import ClosedForm, LearningCurve
from immunization.methods.linear_map import MAX_CONDITION
from immunization.models import Linear
from immunization.training.batches import PairedBatches
from immunization.training.loop import train

pytestmark = pytest.mark.trains


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
