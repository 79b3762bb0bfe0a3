"""IMMA (Zheng & Yeh, ECCV 2024): bi-level immunization against an adapting attacker."""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from immunization.checks import Count, NonNegative
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method, Terms, over_tasks
from immunization.models.base import Batch, Model


class IMMA(Method):
    """Bi-level: the attacker adapts theta to D_H for a few steps; the defender makes the adapted theta bad at D_H.

    Each step has three parts:

    1. The primary head omega takes `head_steps` gradient steps on L(D_P), and the attacker's head w as many on L(D_H).
       Their rate is `head_lr`, divided by the mean squared norm of the features.
    2. Lower level, the attacker: theta^(k+1) = theta^k - inner_lr grad_theta L(D_H, w, theta^k), for K = `inner_steps`.
    3. Upper level, the defender: theta descends on L(D_P, omega, theta^K) - weight min(L(D_H, w, theta^K), cap).

    `mode="unroll"` differentiates through the lower level, as in the paper. `"first_order"` computes the upper gradient
    at theta^K and applies it at theta, as in the released code of IMMA. `heads="fixed"` leaves both heads as they
    start, `"shared"` gives the attacker omega; the attacker's own head starts at `head_start`, zero or standard normal.
    """

    alone = True
    several = True
    side_by_side = ("weight", "inner_lr", "head_lr")

    inner_steps: Count
    inner_lr: NonNegative
    head_steps: Count
    head_lr: NonNegative
    weight: NonNegative
    cap: NonNegative | None
    mode: Literal["unroll", "first_order"]
    heads: Literal["trained", "fixed", "shared"]
    head_start: Literal["zero", "random"]

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if model.deep and not model.trains_layers:
            raise ConfigError(f"method={self.name} needs trained layers, not a folded map; set model.trainable=last")
        self.attackers = {role: self._attacker(model, task) for role, task in pair.harmful_tasks.items()}

    def _attacker(self, model: Model, task: Task) -> nn.Linear:
        """The attacker's head as it starts."""
        like = model.head.weight
        attacker = nn.Linear(model.head.in_features, task.outputs, bias=False).to(like.dtype)
        if self.head_start == "zero":
            nn.init.zeros_(attacker.weight)
        else:  # drawn on the CPU, so that a seed means the same numbers on every device
            nn.init.normal_(attacker.weight)
        attacker.to(like.device)
        if self.heads == "shared":
            if attacker.weight.shape != like.shape:
                raise ConfigError(
                    "method.heads=shared needs a harmful task with as many outputs as the primary one; use "
                    "method.heads=trained"
                )
            return model.head
        if self.heads == "fixed" and not (like.any() or attacker.weight.any()):
            raise ConfigError(
                "method.heads=fixed leaves both heads at 0, which trains nothing; set method.head_start=random"
            )
        return attacker

    def join(self, model: Model, methods: Sequence[Method]) -> None:
        """Also heads of the attackers, with a leading dimension; `shared` ones are that of the model."""
        if self.heads == "shared":
            self.attackers = dict.fromkeys(self.attackers, model.head)
            return
        for role, attacker in self.attackers.items():
            own = [method.attackers[role].weight.data for method in methods if isinstance(method, IMMA)]
            stacked = copy.copy(attacker)
            stacked._parameters = {**attacker._parameters, "weight": nn.Parameter(torch.stack(own))}
            self.attackers = self.attackers | {role: stacked}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"attackers": {role: w.weight.data for role, w in self.attackers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, weight in state.pop("attackers").items():
            self.attackers[role].weight.data.copy_(weight)
        super().load_state_dict(state)

    def step(self, model: Model, primary: Batch, *harmful: Batch) -> Terms:
        if self.heads != "fixed":
            self._fit_head(model, model.head, primary, self.pair.primary)
        batches = zip(self.pair.harmful_tasks.items(), harmful, strict=True)
        terms = {role: self._against(model, primary, task, self.attackers[role], own) for (role, task), own in batches}
        return over_tasks(terms, self.combine)

    def _against(self, model: Model, primary: Batch, task: Task, attacker: nn.Linear, harmful: Batch) -> Terms:
        """The terms of a step against one harmful task."""
        if self.heads == "trained":
            self._fit_head(model, attacker, harmful, task)

        def task_loss(task: Task, head: nn.Linear, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
            return task.loss(_logits(model, batch.x, theta, head, head.weight.detach()), batch.y, twice=unroll)

        theta: Mapping[str, Tensor] = model.trained()
        unroll = self.mode == "unroll"
        for _ in range(self.inner_steps):
            with sdpa_kernel(SDPBackend.MATH) if unroll else nullcontext():  # fused attention is differentiable once
                lower = task_loss(task, attacker, theta, harmful)
            gradients = torch.autograd.grad(lower.sum(), list(theta.values()), create_graph=unroll)
            moved = zip(theta.items(), gradients, strict=True)
            theta = {name: p - _of_jobs(self.inner_lr, p) * g for (name, p), g in moved}
        loss_primary = task_loss(self.pair.primary, model.head, theta, primary)
        loss_harmful = task_loss(task, attacker, theta, harmful)
        loss = loss_primary - self.weight * loss_harmful.clamp(max=math.inf if self.cap is None else self.cap)
        return {"loss": loss, "task_loss": loss_primary, "harmful_loss": loss_harmful}

    def _fit_head(self, model: Model, head: nn.Linear, batch: Batch, task: Task) -> None:
        linear = model.linear_map() is not None  # features, O(N D^2), are then not computed
        root = batch.root if linear else None
        features = model.features(batch.x if root is None else root)
        squares = features.square().sum(-1)
        rate = self.head_lr / (squares.mean(-1) if root is None else squares.sum(-1) / batch.x.shape[-2])
        theta = {name: p.detach() for name, p in model.trained().items()}
        x, through = (batch.x, theta) if linear else (features, None)
        for _ in range(self.head_steps):
            loss = task.loss(_logits(model, x, through, head, head.weight), batch.y)
            (gradient,) = torch.autograd.grad(loss.sum(), head.weight)
            head.weight.data -= _of_jobs(rate, gradient) * gradient


def _logits(model: Model, x: Tensor, theta: Mapping[str, Tensor] | None, head: nn.Linear, weight: Tensor) -> Tensor:
    """Logits [N, C] of a head with this `weight` on the features of x, or on features x where `theta` is None.

    Through a linear map, also through those of stacked jobs, in O(N D).
    """
    if theta is not None and model.linear_map() is not None:
        return x @ (theta["theta"] @ weight.mT)
    features = x if theta is None else model.training_features(x, theta)
    return F.linear(features, weight, None if head.bias is None else head.bias.detach())


def _of_jobs(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number for all, or one for each job [J] that multiplies the parts of `like` [J, ...]."""
    return value.view(-1, *[1] * (like.ndim - 1)) if isinstance(value, Tensor) and value.ndim else value
