"""SOPHON (Deng et al., IEEE S&P 2024, arXiv 2404.12699): non-fine-tunable learning."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Count, Fraction, NonNegative, Positive
from immunization.data.task import TaskPair, log_probabilities
from immunization.errors import ConfigError
from immunization.methods.attacker import AgainstAttacker, fitted_head, scaled
from immunization.models.base import Batch, Model

CLIP = 0.5
"""Longest gradient of the suppression that is not clipped."""


class Sophon(AgainstAttacker, without=["combine"]):
    """Alternate a step against the attacker who fine-tunes (suppression) with `primary_steps` steps down L(D_P).

    In a suppression step an attacker trains a copy of theta and a fresh head w on all but the share `held_out` of a
    harmful batch: `inner_steps` gradient steps at `inner_lr`. After each the suppression loss of the held-out rows is
    taken; the mean of its gradients, where the copy stands (first order), clipped to 0.5, is theta's step of Adam at
    `suppress_lr`. `suppression="inverse"`: mean -log(1 - p_y); `"uniform"`: KL(uniform || p).

    From the paper and its code: this alternation, both losses, the clipping, Adam (suppression 3e-4, primary 5e-4),
    90 % for adaptation, one primary step (inverse) or five (uniform). Ours: all inner steps see one batch, not 50; w
    first takes `head_steps` steps of rate `head_lr` with theta fixed, on features scaled to a mean squared norm of 1;
    BatchNorm statistics do not move; the run's optimizer takes the primary steps; `max_accuracy_drop` stops where the
    paper's code goes back. Needs classes.
    """

    epochs = 60
    batch_size = 64
    suppression: Literal["inverse", "uniform"] = "inverse"
    suppress_lr: Positive = 3e-4
    primary_steps: AtLeastOne | None = None
    inner_steps: AtLeastOne = 5
    inner_lr: NonNegative = 0.01
    held_out: Fraction = 0.1
    head_steps: Count = 20
    head_lr: NonNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.primary_steps = self.primary_steps or {"inverse": 1, "uniform": 5}[self.suppression]

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if not pair.harmful.classes:
            raise ConfigError(
                f"method={self.name} suppresses the probabilities of classes, and '{pair.harmful.name}' is a regression"
            )
        self.suppressor = torch.optim.Adam(model.trained().values(), lr=self.suppress_lr)
        self.taken, self.suppressed = 0, torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        own = {"taken": self.taken, "suppressed": self.suppressed, "suppressor": self.suppressor.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.suppressor.load_state_dict(state.pop("suppressor"))
        super().load_state_dict(state)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        if self.taken % self.primary_steps == 0:
            self.suppressed = self._suppress(model, harmful)
        self.taken += 1
        logits, _ = model.outputs(primary)
        loss = self.pair.primary.loss(logits, primary.y)
        return {"loss": loss, "task_loss": loss, "suppression": self.suppressed}

    def _suppress(self, model: Model, harmful: Batch) -> Tensor:
        """Take the step of theta that suppression asks for; returns the mean suppression loss before it."""
        task, parameters = self.pair.harmful, model.trained()
        kept = len(harmful.y) - max(1, round(self.held_out * len(harmful.y)))
        x, y, held_x, held_y = harmful.x[:kept], harmful.y[:kept], harmful.x[kept:], harmful.y[kept:]
        zeros = model.head.weight.new_zeros(task.outputs, model.head.in_features)
        w = fitted_head(task, zeros, model.training_features(x), y, self.head_lr, self.head_steps)
        theta, losses = {name: p.detach() for name, p in parameters.items()}, []
        gradients = [torch.zeros_like(p) for p in parameters.values()]
        for _ in range(self.inner_steps):
            leaves = [tensor.requires_grad_() for tensor in (*theta.values(), w)]
            logits = F.linear(scaled(model.training_features(x, theta)), w)
            slopes = torch.autograd.grad(task.loss(logits, y), leaves)
            *values, w = (leaf.detach() - self.inner_lr * slope for leaf, slope in zip(leaves, slopes, strict=True))
            theta = {name: value.requires_grad_() for name, value in zip(parameters, values, strict=True)}
            loss = SUPPRESSIONS[self.suppression](F.linear(scaled(model.training_features(held_x, theta)), w), held_y)
            slopes = torch.autograd.grad(loss, list(theta.values()))
            gradients = [g + s / self.inner_steps for g, s in zip(gradients, slopes, strict=True)]
            losses.append(loss.detach())
        for p, gradient in zip(parameters.values(), gradients, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        self.suppressor.step()
        return torch.stack(losses).mean()


def inverse_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean -log(1 - p_y), 1 - p_y being the sum of the other classes' probabilities."""
    return -log_probabilities(logits).scatter(1, y[:, None], -math.inf).logsumexp(1).mean()


def divergence_from_uniform(logits: Tensor, y: Tensor) -> Tensor:
    """Mean KL(uniform || p) = -log C - mean log p; the labels do not matter."""
    log_p = log_probabilities(logits)
    return -log_p.mean() - math.log(log_p.shape[1])


SUPPRESSIONS = {"inverse": inverse_cross_entropy, "uniform": divergence_from_uniform}
