"""Methods against an attacker who fine-tunes a copy of theta.

SOPHON, non-fine-tunable learning (Deng et al., IEEE S&P 2024, arXiv 2404.12699); TAR, tampering attack resistance
(Tamirisa et al., ICLR 2025, arXiv 2408.00761).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Count, Fraction, NonNegative, Positive
from immunization.data.task import Task, TaskPair, log_probabilities
from immunization.errors import ConfigError
from immunization.methods.base import Terms
from immunization.methods.distillation import Distillation
from immunization.methods.probing import AgainstAttacker, drawn, fitted_head, scaled
from immunization.models.base import Batch, Model


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

        Both are sums over the attacker's steps, with one of `weights` each; a gradient is taken at the copy
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


CLIP = 0.5
"""Longest gradient of the suppression that is not clipped."""


class Sophon(AgainstFineTuning):
    """Alternate a step against an attacker who fine-tunes (suppression) with `primary_steps` steps on L(D_P).

    Suppression: a simulated attacker fine-tunes a copy of theta. After each of the attacker's steps, the suppression
    loss on rows that the attacker does not train on has a gradient. The mean of these gradients, clipped to 0.5, gives
    theta a step of Adam at `suppress_lr`. For several harmful tasks it is the mean over the tasks. The suppression loss
    is mean -log(1 - p_y) (`"inverse"`) or KL(uniform || p) (`"uniform"`); p are the attacker's class probabilities.

    From the paper and its code: this alternation, both losses, the clipping, Adam (suppression at 3e-4, primary at
    5e-4), 90 % of the rows for the attacker's training, one batch for each of the attacker's steps, one primary step
    (inverse) or five (uniform, for which both rates are 1e-4). Ours: 5 attacker's steps at .01, not 50 at 1e-4; w is
    fitted first; the run's optimizer takes the primary steps; `max_accuracy_drop` stops the training at the point at
    which the paper's code goes back.
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
        loss = self.primary_loss(model, primary)
        return {"loss": loss, "task_loss": loss, "suppression": self.suppressed}

    def _suppress(self, model: Model, *harmful: Batch) -> Tensor:
        """Take the step of theta that suppression asks for; returns the mean suppression loss before it."""
        weights = [1 / self.inner_steps] * self.inner_steps
        loss_of, tasks = SUPPRESSIONS[self.suppression], self.pair.harmful_tasks.values()
        attacked = [
            self.attacked(model, task, batch, loss_of, self.inner_lr, weights)
            for task, batch in zip(tasks, harmful, strict=True)
        ]
        parameters = list(model.trained().values())
        for p, *gradients in zip(parameters, *(gradients for gradients, _ in attacked), strict=True):
            p.grad = torch.stack(gradients).mean(0)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        self.suppressor.step()
        return torch.stack([loss for _, loss in attacked]).mean()


def inverse_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean -log(1 - p_y), 1 - p_y being the sum of the other classes' probabilities."""
    return -log_probabilities(logits).scatter(1, y[:, None], -math.inf).logsumexp(1).mean()


def divergence_from_uniform(logits: Tensor, y: Tensor) -> Tensor:
    """Mean KL(uniform || p) = -log C - mean log p; the labels do not matter."""
    log_p = log_probabilities(logits)
    return -log_p.mean() - math.log(log_p.shape[1])


SUPPRESSIONS = {"inverse": inverse_cross_entropy, "uniform": divergence_from_uniform}


class TAR(AgainstFineTuning):
    """Minimize L(D_P) + mean_P ||f - f_0|| / size + tamper sum_k w_k L_TR(theta_k), f_0 the features of theta_0.

    A simulated attacker fine-tunes a copy of theta on D_H for K = `inner_steps` steps. theta_k is this copy after k
    steps. One of the rates `inner_lrs` is drawn for every batch. L_TR is the negative entropy of the attacker's
    predictions on rows that the attacker does not train on, and w_k = exp(`late` (k - K)). The gradient of L_TR is
    computed at the copy and applied to theta (first order).

    From the paper and its code, which are about language models: this loss, tamper = 4, late = 1/16, and rates of the
    attacker in the ratio 1 : 10 : 20. Ours: K = 8, not 64; the attacker has a fresh head, which is fitted first, takes
    plain gradient steps, and never trains on primary rows; a gradient is computed in every step, on other held-out
    training rows, not in every fourth step on one batch; of the layers, only the features stay near those of theta_0,
    in units of `size`, the root of their mean squared norm; nothing safeguards the model before the training.
    """

    tamper: NonNegative
    late: NonNegative
    inner_lrs: Sequence[Positive]

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.theta_0 = Distillation(model, pair, keeps=False)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        rate = self.inner_lrs[int(torch.randint(len(self.inner_lrs), ()))]
        weights = [math.exp(self.late * (k + 1 - self.inner_steps)) for k in range(self.inner_steps)]
        gradients, resistance = self.attacked(model, self.pair.harmful, harmful, negative_entropy, rate, weights)
        loss, features = self.loss_and_features(model, primary)
        moved = torch.linalg.vector_norm(features - self.theta_0.before(model, primary.x), dim=1).mean()
        moved = moved / self.theta_0.size.sqrt()
        products = ((p * g).sum() for p, g in zip(model.trained().values(), gradients, strict=True))
        slope = sum(products, torch.zeros(()))
        total = loss + moved + self.tamper * (slope - slope.detach() + resistance)
        return {"loss": total, "task_loss": loss, "moved": moved, "resistance": resistance}


def negative_entropy(logits: Tensor, _y: Tensor) -> Tensor:
    """Mean over rows of sum_c p_c log p_c."""
    log_p = log_probabilities(logits)
    return (log_p.exp() * log_p).sum(1).mean()
