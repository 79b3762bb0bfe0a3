"""SOPHON (Deng et al., IEEE S&P 2024, arXiv 2404.12699): non-fine-tunable learning."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from immunization.checks import AtLeastOne, Positive
from immunization.data.task import TaskPair, log_probabilities
from immunization.methods.attacker import AgainstFineTuning
from immunization.methods.base import Terms
from immunization.models.base import Batch, Model

CLIP = 0.5
"""Longest gradient of the suppression that is not clipped."""


class Sophon(AgainstFineTuning):
    """Alternate a step against the attacker who fine-tunes (suppression) with `primary_steps` steps down L(D_P).

    The mean gradient of the suppression loss of held-out rows after each of the attacker's steps, clipped to 0.5, is
    theta's step of Adam at `suppress_lr`; of several harmful tasks it is the mean over these. `suppression="inverse"`:
    mean -log(1 - p_y); `"uniform"`: KL(uniform || p).

    From the paper and its code: this alternation, both losses, the clipping, Adam (suppression 3e-4, primary 5e-4),
    90 % for adaptation, a batch for each inner step, one primary step (inverse) or five (uniform, there both at 1e-4).
    Ours: 5 inner steps at .01, not 50 at 1e-4; w is fitted first; the run's optimizer takes the primary steps;
    `max_accuracy_drop` stops where the paper's code goes back.
    """

    several = True
    remembers = ("taken", "suppressed")

    suppression: Literal["inverse", "uniform"]
    suppress_lr: Positive
    primary_steps: AtLeastOne | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.period = self.primary_steps or {"inverse": 1, "uniform": 5}[self.suppression]

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.suppressor = torch.optim.Adam(model.trained().values(), lr=self.suppress_lr)
        self.taken, self.suppressed = 0, torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"suppressor": self.suppressor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.suppressor.load_state_dict(state.pop("suppressor"))
        super().load_state_dict(state)

    def step(self, model: Model, primary: Batch, *harmful: Batch) -> Terms:
        if self.taken % self.period == 0:
            self.suppressed = self._suppress(model, *harmful)
        self.taken += 1
        logits, _ = model.outputs(primary)
        loss = self.pair.primary.loss(logits, primary.y)
        return {"loss": loss, "task_loss": loss, "suppression": self.suppressed}

    def _suppress(self, model: Model, *harmful: Batch) -> Tensor:
        """Take the step of theta that suppression asks for; returns the mean suppression loss before it."""
        weights = [1 / self.inner_steps] * self.inner_steps
        loss_of, tasks = SUPPRESSIONS[self.suppression], self.pair.harmful_tasks.values()
        found = [
            self.attacked(model, task, batch, loss_of, self.inner_lr, weights)
            for task, batch in zip(tasks, harmful, strict=True)
        ]
        parameters = list(model.trained().values())
        for p, *gradients in zip(parameters, *(gradients for gradients, _ in found), strict=True):
            p.grad = torch.stack(gradients).mean(0)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        self.suppressor.step()
        return torch.stack([loss for _, loss in found]).mean()


def inverse_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean -log(1 - p_y), 1 - p_y being the sum of the other classes' probabilities."""
    return -log_probabilities(logits).scatter(1, y[:, None], -math.inf).logsumexp(1).mean()


def divergence_from_uniform(logits: Tensor, y: Tensor) -> Tensor:
    """Mean KL(uniform || p) = -log C - mean log p; the labels do not matter."""
    log_p = log_probabilities(logits)
    return -log_p.mean() - math.log(log_p.shape[1])


SUPPRESSIONS = {"inverse": inverse_cross_entropy, "uniform": divergence_from_uniform}
