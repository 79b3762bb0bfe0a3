"""Rivals on a small net: each holds off its own attacker, who has one rate, at little cost for the primary task."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from immunization.config import compose
from immunization.data.task import Task
from immunization.experiment import assemble, resolve
from immunization.methods.probing import fitted_head
from immunization.models import Model
from immunization.training.assembly import Parts
from immunization.training.batches import PairedBatches
from immunization.training.loop import train
from immunization.training.optimization import optimizer_of

pytestmark = [pytest.mark.trains, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Where the net that is fitted once is kept."""
    return str(tmp_path_factory.mktemp("fitted"))


def immunized(options: list[str], cache: str) -> Parts:
    """What `python launch.py experiment=digits_deep ...` trains."""
    config = compose(["experiment=digits_deep", "tracker=none", "threads=1", f"model.cache={cache}", *options])
    experiment = resolve(config)
    parts = assemble(experiment)
    parts.method.setup(parts.model, parts.trained_on)
    batches = PairedBatches(parts.trained_on, parts.method.batch_size, torch.Generator().manual_seed(0))
    train(parts.method, parts.model, batches, optimizer_of(experiment.optimizer, parts.model.groups()))
    return parts


@torch.no_grad()
def accuracy(extractor: nn.Module, head: torch.Tensor, task: Task) -> float:
    return task.measure(F.linear(extractor(task.test.x), head), task.test.y).item()


def probed(model: Model, task: Task) -> float:
    """Accuracy after 30 steps of gradient descent, at rate 1, of a fresh head on frozen features."""
    head = torch.zeros(task.outputs, model.head.in_features)
    head = fitted_head(task, head, model.features(task.train.x), task.train.y, rate=1.0, steps=30)
    return accuracy(model.extractor, head, task)


def fine_tuned(model: Model, task: Task) -> float:
    """Accuracy after 100 mini-batches of SGD at SOPHON's own rate, 1e-4, of theta and a fresh head."""
    extractor, generator = copy.deepcopy(model.extractor), torch.Generator().manual_seed(0)
    names = model.trained()
    theta = [p for name, p in extractor.named_parameters() if name in names]
    head = torch.zeros(task.outputs, model.head.in_features, requires_grad=True)
    optimizer = torch.optim.SGD([*theta, head], lr=1e-4, momentum=0.9)
    scale = model.features(task.train.x).square().mean().rsqrt()
    for _ in range(100):
        rows = torch.randperm(len(task.train), generator=generator)[:32]
        optimizer.zero_grad()
        task.loss(F.linear(scale * extractor(task.train.x[rows]), head), task.train.y[rows]).backward()
        nn.utils.clip_grad_norm_([*theta, head], 10.0)
        optimizer.step()
    return accuracy(extractor, head, task)


@pytest.mark.parametrize(
    ("options", "attacked"),
    [
        (["method=clamp"], probed),
        (["method=ntl"], probed),
        (["method=encoderlock"], probed),
        (["method=sophon", "method.inner_steps=3"], fine_tuned),
        (["method=sophon", "method.suppression=uniform", "method.primary_steps=1"], fine_tuned),
        (["method=tar"], fine_tuned),
    ],
    ids=["clamp", "ntl", "encoderlock", "sophon, inverse", "sophon, uniform", "tar"],
)
def test_its_own_attacker_is_held_off(options, attacked, cache):
    """Harmful accuracy 20 points below the baseline's; the primary head loses 3 points at most."""
    before, after = (immunized(chosen, cache) for chosen in (["method=identity"], options))
    primary, harmful = before.trained_on.primary, before.trained_on.harmful
    assert attacked(before.model, harmful) > 0.85
    assert attacked(after.model, harmful) < attacked(before.model, harmful) - 0.2
    accuracies = [
        primary.measure(parts.model.logits(primary.test.x), primary.test.y).item() for parts in (before, after)
    ]
    assert accuracies[1] > accuracies[0] - 0.03
