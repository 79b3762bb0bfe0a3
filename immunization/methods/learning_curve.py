"""Immunization of the learning curve itself: the attacker's gradient descent, solved, and differentiated in theta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method, nonnegative
from immunization.methods.statistics import early_stopped, fit_head, linear_map, probe_of_inputs
from immunization.models import Batch, Model
from immunization.probe import Probe

MAX_OCTAVES = 40
CLOSE = 1e-4
"""Relative step-weighted gap of two eigenvalues below which a derivative replaces their difference quotient."""


class _ExcessCurves(torch.autograd.Function):
    """With mu the eigenvalues of G = F F^T over the largest one, both curves are sums over f(mu) = (1 - mu)^2t.

    The gradient in G is U (Phi * U^T c c^T U) U^T, Phi the difference quotients of f (Daleckii and Krein): one
    eigendecomposition whatever the number of steps, and no division by the gap of two eigenvalues that meet.
    """

    @staticmethod
    def forward(ctx, factor: Tensor, coefficients: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        eigenvalues, u = torch.linalg.eigh(factor @ factor.T)
        decay = 1 - (eigenvalues / eigenvalues[-1]).clamp(min=0)
        c = u.T @ coefficients
        ctx.save_for_backward(factor, eigenvalues[-1], u, decay, c, steps)
        powers = decay ** (2 * steps[:, None])
        return powers @ c.square().sum(1), powers.mean(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_excess: Tensor, of_expected: Tensor) -> tuple[Tensor, None, None]:
        factor, largest, u, decay, c, steps = ctx.saved_tensors
        gap = decay[:, None] - decay
        distance, smaller = gap.abs(), torch.minimum(decay[:, None], decay)
        quotients, slopes = torch.zeros_like(gap), torch.zeros_like(decay)
        for n, weight, mean_weight in zip((2 * steps).tolist(), of_excess.tolist(), of_expected.tolist(), strict=True):
            power, half = decay**n, decay ** ((n - 1) / 2)
            close = n * distance <= CLOSE * smaller
            quotients += weight * torch.where(close, n * torch.outer(half, half), (power[:, None] - power) / gap)
            slopes += mean_weight * n * half.square() / len(decay)
        # from here on the derivative in mu = 1 - decay: its sign is the other one
        gradient = -u @ (quotients * (c @ c.T) + slopes.diag()) @ u.T
        # mu = eigenvalues / largest, and the largest has the gradient u_1 u_1^T of its own
        along = (gradient * ((u * (1 - decay)) @ u.T)).sum()
        gradient -= along * torch.outer(u[:, -1], u[:, -1])
        return 2 / largest * gradient @ factor, None, None


def excess_curves(factor: Tensor, coefficients: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Excess loss of the l2 probe after `steps` [T] of gradient descent, exact and differentiable in `factor`.

    `factor` F [m, D] and `coefficients` c [m, C] stand for features and targets of any number of rows, as H = F^T F and
    b = F^T c do: e.g. R A and Q^T Y of features Q R behind a map A. Step size 1/lambda_1(H), w_0 = 0, no bias. Returns
    ||F w_t - c||^2 [T], summed over the C outputs (the excess loss where F has rank m, the excess and a constant else),
    and its mean over random c of unit length, 1/m sum_i (1 - lambda_i / lambda_1)^2t [T]. Both ignore the scale of F
    and take a singular H as it is. One eigendecomposition of F F^T forth, a few products of m x m matrices back.
    """
    return _ExcessCurves.apply(factor, coefficients, steps.to(factor))


def time_grid(horizon: int | Sequence[int]) -> Tensor:
    """Steps [T] in float64: 1, 2, 4, ..., 2^horizon, or the increasing list given. Raises ConfigError."""
    if isinstance(horizon, int) and not isinstance(horizon, bool):
        if not 0 <= horizon <= MAX_OCTAVES:
            raise ConfigError(f"method.horizon={horizon}: the exponent T of 2^T steps must be from 0 to {MAX_OCTAVES}")
        return 2.0 ** torch.arange(horizon + 1, dtype=torch.float64)
    try:
        steps = list(horizon)
        increasing = bool(steps) and all(a < b for a, b in zip([0, *steps], steps, strict=False))
        if not increasing or not all(isinstance(t, int) for t in steps):
            raise TypeError
    except TypeError:
        raise ConfigError(
            f"method.horizon={horizon!r}: give T for the grid 1, 2, 4, ..., 2^T, or a list of steps, integers from 1 "
            "on, strictly increasing and not empty"
        ) from None
    return torch.tensor(steps, dtype=torch.float64)


class LearningCurve(Method):
    """Minimize lambda_P mean_t excess_P(t) / excess_P(0) - lambda_H mean_t excess_H(t) / excess_H(0) over theta.

    t runs over `horizon` (T for 1, 2, 4, ..., 2^T, or a list). `benign_weight` adds mean_t mean_i (1 - lambda_i(H_P) /
    lambda_1(H_P))^2t, the curve of random labels on D_P: it keeps tasks fast that no one has shown, and buys that with
    steps of the harmful one. All of it lives on D x D statistics of the inputs, taken once; an epoch is one step.

    `targets="early_stopped"`: the primary curve leads to the best early-stopped probe of the inputs instead of to least
    squares (see `early_stopped`): for tasks whose labels are noisy, where learning fast would be overfitting fast.

    `patience`: stop after that many epochs in which the held-out gap (measure of the primary probe minus that of the
    harmful one on the validation splits, mean over t, minus the benign term) has not grown, and go back to the best
    theta. `rotate=True` ends in a random rotation drawn from torch's global generator: the curves stay, attackers that
    treat coordinates separately (Adam) lose. The primary head is set to the least squares of the inputs, whose
    predictions it keeps.
    """

    folds = True

    def __init__(
        self,
        epochs: int,
        horizon: int | Sequence[int] = 17,
        lambda_P: float = 1.0,
        lambda_H: float = 1.0,
        benign_weight: float = 0.3,
        targets: Literal["labels", "early_stopped"] = "labels",
        patience: int | None = None,
        rotate: bool = True,
    ) -> None:
        super().__init__(epochs, patience=patience)
        nonnegative(lambda_P=lambda_P, lambda_H=lambda_H, benign_weight=benign_weight)
        if targets not in ("labels", "early_stopped"):
            raise ConfigError(f"method.targets must be 'labels' or 'early_stopped', not {targets!r}")
        self.lambda_P, self.lambda_H, self.benign_weight = lambda_P, lambda_H, benign_weight
        self.grid, self.targets, self.rotate = time_grid(horizon), targets, rotate

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.theta = linear_map(model, self.name)
        self.primary, self.harmful = (probe_of_inputs(task) for task in (pair.primary, pair.harmful))
        self.aim = early_stopped(self.primary, pair.primary) if self.targets == "early_stopped" else self.primary
        self.grid = self.grid.to(self.theta.device)
        if self.patience and not all(len(task.val) for task in (pair.primary, pair.harmful)):
            self.patience = None
            self.flags["no_early_stopping"] = "method.patience is without effect: a task has no validation rows"

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        excess_p, expected = self._curves(self.aim)
        excess_h, _ = self._curves(self.harmful)
        loss = self.lambda_P * excess_p - self.lambda_H * excess_h + self.benign_weight * expected
        return {"loss": loss, "excess_primary": excess_p, "excess_harmful": excess_h, "excess_random": expected}

    def _curves(self, inputs: Probe) -> tuple[Tensor, Tensor]:
        """Mean over the grid of the excess loss, relative to that of w = 0, and of the curve of random labels."""
        c = inputs.coefficients
        excess, expected = excess_curves(inputs.root @ self.theta.double(), c, self.grid)
        return excess.mean() / c.square().sum(), expected.mean()

    @torch.no_grad()
    def score(self, model: Model) -> float:
        primary = self._held_out(self.pair.primary, self.primary)
        harmful = self._held_out(self.pair.harmful, self.harmful)
        _, expected = self._curves(self.primary)
        return self.lambda_P * primary - self.lambda_H * harmful - self.benign_weight * expected.item()

    def _held_out(self, task: Task, inputs: Probe) -> float:
        """Measure on the validation split, mean over the grid; from 0 at chance or worse to 1."""
        theta = self.theta.double()
        weights = Probe.fit(inputs.root @ theta, inputs.coefficients, 0.0, rank=task.rank).weights(self.grid)
        measure = task.measure(task.val.x.double() @ theta @ weights, task.val.y)
        return ((measure - task.chance) / (1 - task.chance)).clamp(min=0).mean().item()

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        super().finish(model)
        if self.rotate:
            rotation = nn.init.orthogonal_(torch.empty(self.theta.shape, dtype=torch.float64))
            self.theta.copy_(self.theta.double() @ rotation.to(self.theta.device))
        fit_head(model, self.primary)
