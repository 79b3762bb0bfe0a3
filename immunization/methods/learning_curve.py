"""Immunization of the probe's learning curve: gradient descent in closed form, differentiated in theta."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from immunization.checks import AboveOne, AtLeastOne, Fraction, NonNegative
from immunization.data.task import LEARNED, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import MIN_GAIN, Method, Terms
from immunization.methods.decoys import Decoys
from immunization.methods.linear_map import (
    SLACK,
    bound_for,
    centered_task,
    fit_head,
    generalizing_step,
    probe_of_inputs,
    rescale,
    sum_root,
    theta_of,
)
from immunization.models.base import Batch, Model
from immunization.theory.optimal_map import nearest_bounded, optimal_map, rotation
from immunization.theory.probe import Probe, excess, residuals

Horizon = Annotated[int, Ge(0), Le(40)] | Sequence[AtLeastOne]
"""T of the steps 1, 2, 4, ..., 2^T, or a list of steps."""

PACE = 2
"""How many steps of the baseline's probe one step behind theta aims to take."""

SPAN = 16
"""Multiple of the best early stop up to which the baseline's path is followed; what comes later is overfitting."""

FEW = 32
"""Columns up to which a trial shows where to start: on few, descent from the identity ends in a poor minimum."""
TRIAL, TRIAL_RATE = 600, 2e-2
"""Steps of such a trial, and the rate of its optimizer."""

FLOOR = 1e-12
"""Directions with a smaller share of the largest eigenvalue weigh as much as those with this one."""


def horizons(horizon: int | Sequence[int]) -> Tensor:
    """Steps [T] in float64: 1, 2, 4, ..., 2^horizon, or the increasing list given. Raises ConfigError."""
    if isinstance(horizon, int):
        return 2.0 ** torch.arange(horizon + 1, dtype=torch.float64)
    if not horizon or any(a >= b for a, b in pairwise(horizon)):
        raise ConfigError(f"method.horizon={list(horizon)}: the steps must be strictly increasing, and not empty")
    return torch.tensor(list(horizon), dtype=torch.float64)


class OfCurves(Method):
    """A method whose loss is lambda_P mean_t excess_P(t) - lambda_H mean_t excess_H(t) + benign_weight random(t)."""

    horizon: Horizon
    lambda_P: NonNegative
    lambda_H: NonNegative
    benign_weight: NonNegative

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grid = horizons(self.horizon)

    def weighted(self, excess_p: Tensor, excess_h: Tensor, random: Tensor) -> Terms:
        loss = self.lambda_P * excess_p - self.lambda_H * excess_h + self.benign_weight * random
        return {"loss": loss, "excess_primary": excess_p, "excess_harmful": excess_h, "excess_random": random}


class LearningCurve(OfCurves):
    """Minimize lambda_P mean_t excess_P(t) / excess_P(0) - lambda_H mean_t excess_H(t) / excess_H(0) over a map theta.

    excess(t) is how far the training loss of a linear probe is above its minimum after t steps of gradient descent. It
    is a differentiable function of theta. So the primary probe becomes fast and the harmful probe slow. t runs over
    `horizon` (T for 1, 2, 4, ..., 2^T, or a list). Everything is computed from D x D statistics of the inputs, once;
    an epoch is one step.

    `benign_weight` adds mean_t mean_i (1 - lambda_i(H_P) / lambda_1(H_P))^2t, the curve of random labels on D_P, which
    keeps unseen tasks fast.

    `targets="baseline"` is for noisy labels, for which fast learning is fast overfitting. The primary term then follows
    the probe of the baseline, PACE times as fast: for t <= SPAN t_1, w_t aims at the weights that the probe on the
    inputs has after max(PACE (t - 1) + 1, t_0) steps. t_1 is the early stop that generalizes best
    (`generalizing_step`); t_0 is the smaller of t_1 and the steps to 90 % of the baseline's best on validation rows.
    The distance is the mean squared difference of predictions, divided by that of w = 0. Half of it is measured on the
    training inputs and half on white noise of the same mean square (a multiple of ||theta w_t - w||^2), because
    held-out rows vary in directions in which a few training rows hardly do.

    `targets="auto"` compares two probes on the inputs on validation rows: least squares, and the best early stop. If
    least squares is as good (up to `SLACK` of the way from chance), the labels are the target, otherwise the path of
    the baseline.

    `centered=True`: the harmful curve is the mean of two curves, of the features and of the features minus their mean
    over the training rows. Subtracting the mean costs an attacker nothing.

    `patience`: training stops after so many epochs in which the score has not grown, and goes back to the best theta.
    The score is the measure of the primary probe minus that of the harmful one on validation rows, averaged over t,
    minus the benign term.

    `start="auto"` trains linear models of at most 32 features (`FEW`) briefly from theta_0 and from the closed form
    (`optimal_map`), and continues from the better of the two. "model" is theta_0, "decoys" is the map of `Decoys`.

    The curves are steep functions of theta. At a constant rate, Adam oscillates, and a difference in the last bit of
    theta grows to its leading bit within tens of steps. Let the rate decay to 0 (scheduler=cosine).

    `max_condition` bounds the condition number of theta, so that coarse number formats can represent theta and its
    inverse: every step ends at the nearest matrix within the bound (projected descent), and the last one at the scale
    of the inputs. "auto", `rotate` and the primary head are as in `ClosedForm`.

    For several harmful tasks, excess_H is the mean over the tasks, or with `combine="worst"` that of the task that is
    learned fastest; the score takes the task that is learned best.
    """

    folds = True
    several = True

    targets: Literal["labels", "baseline", "auto"]
    centered: bool
    patience: AtLeastOne | None
    rotate: bool
    max_condition: AboveOne | Literal["auto"] | None
    start: Literal["model", "auto", "decoys"]

    def setup(self, model: Model, pair: TaskPair) -> None:
        if self.patience and not all(len(task.val) for task in pair.shown.values()):
            self.patience = None
            self.flags["no_early_stopping"] = "method.patience has no effect: a task has no validation rows"
        super().setup(model, pair)
        self.theta = theta_of(model, self.name)
        self.largest = bound_for(model, self.max_condition)
        self.primary = probe_of_inputs(pair.primary)
        kinds = [lambda task: task, centered_task] if self.centered else [lambda task: task]
        attacked = [kind(task) for task in pair.harmful_tasks.values() for kind in kinds]
        self.attackers = [(task, probe_of_inputs(task)) for task in attacked]
        self.grid = self.grid.to(self.theta.device)
        c, squares = self.primary.coefficients, self.primary.sigma.square()
        if self.targets == "baseline" or (self.targets == "auto" and not self._labels_generalize()):
            first = generalizing_step(self.primary, pair.primary)
            steps = self.grid[self.grid <= max(SPAN * first, self.grid[0].item())]
            first = self._not_too_late(first)
            self.aim = self.primary.residuals((PACE * (steps - 1) + 1).clamp(min=first))
            weights = 1 + squares.mean() / squares.clamp(min=FLOOR * squares[0])
        else:
            self.aim, weights = c.new_zeros(len(self.grid), *c.shape), torch.ones_like(squares)
        self.weights = (weights / (weights @ (c - self.aim[0]).square().sum(1)))[:, None]
        if self.start == "decoys":
            self.theta.data.copy_(Decoys().map(model, pair))
        elif self.start == "auto" and not model.deep and pair.dim <= FEW and self.epochs:
            self._choose_start(model)

    def _choose_start(self, model: Model) -> None:
        """Set theta to what a short training makes of theta_0, or of the closed form, whichever has the lower loss."""
        roots = self.pair.primary.root, sum_root(self.pair.harmful_tasks)
        ends: list[tuple[float, Tensor]] = []
        for start in (self.theta.detach().double().clone(), optimal_map(*roots)):
            self.theta.data.copy_(start)
            optimizer = torch.optim.Adam([self.theta], lr=TRIAL_RATE)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TRIAL)
            for _ in range(TRIAL):
                optimizer.zero_grad()
                self.step(model)["loss"].backward()
                optimizer.step()
                scheduler.step()
            ends.append((self.step(model)["loss"].item(), self.theta.detach().clone()))
        (first, theta), (second, other) = ends
        self.theta.data.copy_(other if second < first - MIN_GAIN else theta)
        self.theta.grad = None

    def step(self, model: Model, *batches: Batch) -> dict[str, Tensor]:
        probes = [self.primary, *(probe for _, probe in self.attackers)]
        (residual, random), *attacked = self._residuals(*probes)
        excess_p = (self.weights * (residual[: len(self.aim)] - self.aim).square()).sum((1, 2)).mean()
        harmful_curves = (
            excess(left).mean() / probe.coefficients.square().sum()  # relative to that of w = 0
            for (left, _), probe in zip(attacked, probes[1:], strict=True)
        )
        excesses, expected = torch.stack(list(harmful_curves)), random.mean()
        if self.combine == "worst":
            excess_h = excesses.view(len(self.pair.harmful_tasks), -1).mean(1).min()
        else:
            excess_h = excesses.mean()
        return self.weighted(excess_p, excess_h, expected)

    @torch.no_grad()
    def epoch_end(self, model: Model, epoch: int) -> bool:
        if self.largest is not None:
            self.theta.copy_(nearest_bounded(self.theta.double(), self.largest))
        return super().epoch_end(model, epoch)

    def _residuals(self, *probes: Probe) -> list[tuple[Tensor, Tensor]]:
        """Residuals [T, k, C] and the curve of random labels [T] of probes behind theta, over the grid."""
        theta = self.theta.double()
        return residuals([(probe.root @ theta, probe.coefficients) for probe in probes], self.grid)

    @torch.no_grad()
    def score(self, model: Model) -> float:
        learned = max(self._held_out(task, probe) for task, probe in self.attackers)
        gap = self._held_out(self.pair.primary, self.primary) - learned
        return gap - self.benign_weight * self._residuals(self.primary)[0][1].mean().item()

    def _held_out(self, task: Task, inputs: Probe) -> float:
        """Measure on the validation split, mean over the grid; from 0 at chance or worse to 1."""
        theta = self.theta.double()
        weights = Probe.fit(inputs.root @ theta, inputs.coefficients, 0.0, rank=task.rank).weights(self.grid)
        measure = task.measure(task.val.x.double() @ theta @ weights, task.val.y)
        return ((measure - task.chance) / (1 - task.chance)).clamp(min=0).mean().item()

    def _baseline_curve(self, steps: Tensor) -> Tensor:
        """Measure on the primary task's validation split of a probe on the inputs, after `steps` [T]."""
        task = self.pair.primary
        return task.measure(task.val.x.double() @ self.primary.weights(steps), task.val.y)

    def _labels_generalize(self) -> bool:
        """Whether least squares on the inputs comes near the best early stop on validation rows, if there are any."""
        task = self.pair.primary
        if not len(task.val):
            return False
        best = self._baseline_curve(self.grid).max()
        fitted = task.measure(task.val.x.double() @ self.primary.optimum(), task.val.y)
        return bool(fitted >= task.chance + (1 - SLACK) * (best - task.chance))

    def _not_too_late(self, first: float) -> float:
        """`first`, or where the baseline has overfitted by then on the validation rows, steps to 90 % of its best."""
        task = self.pair.primary
        if not len(task.val):
            return first
        steps = torch.cat([self.grid, self.grid.new_tensor([first])])
        curve = self._baseline_curve(steps)
        enough = curve >= task.chance + LEARNED * (curve.max() - task.chance) - 1e-12
        return first if enough[-1] else min(first, steps[enough.int().argmax()].item())

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        super().finish(model)
        if self.rotate:
            self.theta.copy_(self.theta.double() @ rotation(len(self.theta)).to(self.theta.device))
        if self.largest is not None:
            rescale(self.theta, self.primary)
        fit_head(model, self.primary)


class LearningCurveNet(OfCurves):
    """Minimize L(D_P) + weight (lambda_P mean_t excess_P(t) - lambda_H mean_t excess_H(t) + benign_weight random(t)).

    The curves are those of `LearningCurve`, for a probe on the features of one batch; so layers of the net are trained,
    not a map. L(D_P) is the cross-entropy of the model's own head, with label smoothing.
    """

    weight: NonNegative
    smoothing: Fraction

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.grid = self.grid.to(model.head.weight.device)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        loss, features = self.loss_and_features(model, primary, self.smoothing)
        probes = [
            (features.double(), self.pair.primary.targets(primary.y)),
            (model.training_features(harmful.x).double(), self.pair.harmful.targets(harmful.y)),
        ]
        (left_p, random), (left_h, _) = residuals(probes, self.grid)
        excess_p, excess_h = (
            excess(left).mean() / targets.square().sum()
            for left, (_, targets) in zip((left_p, left_h), probes, strict=True)
        )
        terms = self.weighted(excess_p, excess_h, random.mean())
        return {**terms, "loss": loss + self.weight * terms["loss"], "task_loss": loss}
