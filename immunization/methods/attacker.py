"""Attackers as methods simulate them, with a head on features of one scale."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Count, Fraction, NonNegative
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.models.activations import take
from immunization.models.base import Batch, Model


def scaled(features: Tensor) -> Tensor:
    """Features [N, D] divided by one factor, so that their mean squared norm is 1: a larger theta defends nothing."""
    return features / features.square().sum(1).mean().sqrt()


def fitted_head(task: Task, head: Tensor, features: Tensor, y: Tensor, rate: float, steps: int) -> Tensor:
    """`head` [outputs, D] after gradient steps down the loss of `features` [N, D], which are scaled; no graph."""
    features, head = scaled(features.detach()), head.detach()
    for _ in range(steps):
        head.requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(F.linear(features, head), y), head)
        head = head.detach() - rate * gradient
    return head


def drawn(task: Task, batch: Batch) -> Batch:
    """Training rows of a task, drawn at random, as many as there are in a batch of it."""
    rows = torch.randint(len(task.train), (len(batch.y),))
    return replace(batch, x=take(task.train.x, rows).to(batch.x), y=task.train.y[rows].to(batch.y))


class AgainstAttacker(Method):
    """A method that simulates an attacker; with `max_accuracy_drop` it goes back to the last epoch within that drop."""

    alone = True
    latest = True
    draws = False
    """Whether a step draws rows at random."""

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if self.draws and not all(isinstance(task.train.x, Tensor) for task in pair.shown.values()):
            raise ConfigError(
                f"method={self.name} draws images at random in every step, and these are not kept: set "
                "dataset.augment=false, or raise dataset.cache_limit"
            )


class AgainstHead(AgainstAttacker):
    """A method whose attacker has a linear head w [outputs, D], zero at first and kept from step to step."""

    remembers: ClassVar[tuple[str, ...]] = ("attacker",)

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.attacker = model.head.weight.new_zeros(pair.harmful.outputs, model.head.in_features)

    def harmful_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """The attacker's loss with w as it is, of `features` [N, D] before scaling."""
        return self.pair.harmful.loss(F.linear(scaled(features), self.attacker), batch.y)


class AgainstFineTuning(AgainstAttacker):
    """A method whose attacker trains a copy of theta and a fresh head w, on all but `held_out` of harmful batches.

    w first takes `head_steps` steps of rate `head_lr` with theta fixed, on features scaled to a mean squared norm of 1;
    then both take `inner_steps` gradient steps at `inner_lr`, each on another batch. BatchNorm statistics do not move.
    Needs classes.
    """

    draws = True

    inner_steps: AtLeastOne
    inner_lr: NonNegative
    held_out: Fraction
    head_steps: Count
    head_lr: NonNegative

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if regressions := [task.name for task in pair.harmful_tasks.values() if not task.classes]:
            raise ConfigError(
                f"method={self.name} suppresses the probabilities of classes, and '{regressions[0]}' is a regression"
            )

    def attacked(
        self,
        model: Model,
        task: Task,
        harmful: Batch,
        loss: Callable[[Tensor, Tensor], Tensor],
        rate: float,
        weights: Sequence[float],
    ) -> tuple[list[Tensor], Tensor]:
        """The gradient by theta of `loss` (logits, labels) of held-out rows, and its value, after steps at `rate`.

        Both are sums over the attacker's steps, with one of `weights` each; a gradient is taken where the copy stands
        (first order). The first batch is `harmful`, the others are drawn from `task`.
        """
        parameters = model.trained()
        kept = max(1, len(harmful.y) - max(1, round(self.held_out * len(harmful.y))))
        zeros = model.head.weight.new_zeros(task.outputs, model.head.in_features)
        first = model.training_features(harmful.x[:kept])
        w = fitted_head(task, zeros, first, harmful.y[:kept], self.head_lr, self.head_steps)
        theta, total = {name: p.detach() for name, p in parameters.items()}, torch.zeros(())
        gradients = [torch.zeros_like(p) for p in parameters.values()]
        for step, weight in enumerate(weights):
            harmful = drawn(task, harmful) if step else harmful
            (x, held_x), (y, held_y) = (rows.tensor_split([kept]) for rows in (harmful.x, harmful.y))
            leaves = [tensor.requires_grad_() for tensor in (*theta.values(), w)]
            logits = F.linear(scaled(model.training_features(x, theta)), w)
            slopes = torch.autograd.grad(task.loss(logits, y), leaves)
            *values, w = (leaf.detach() - rate * slope for leaf, slope in zip(leaves, slopes, strict=True))
            theta = {name: value.requires_grad_() for name, value in zip(parameters, values, strict=True)}
            value = loss(F.linear(scaled(model.training_features(held_x, theta)), w), held_y)
            slopes = torch.autograd.grad(value, list(theta.values()))
            gradients = [g + weight * s for g, s in zip(gradients, slopes, strict=True)]
            total = total + weight * value.detach()
        return gradients, total
