"""Attackers who fit a linear head to frozen features: the least-squares problem, its curves and the shared loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve, Rows, step_grid
from immunization.attacks.victim import Victim
from immunization.checks import AtLeastOne
from immunization.data.task import Task
from immunization.errors import DegenerateSpectrum, Inapplicable
from immunization.runs.records import Stage
from immunization.theory import spectrum
from immunization.theory.probe import Probe

DIVERGENCE = 1e12
"""A training loss above this multiple of the first one counts as diverged."""

CONVERGED = 1e-13
"""Excess training loss, relative to that of w = 0, at which the rest of a curve is a constant."""

Scaling = Literal["none", "columns", "standard"]
"""What an attacker does to the features first (`ProbeAttack`)."""


@dataclass
class LeastSquares:
    """Least squares on features, in units in which the mean Hessian has lambda_1 = 1.

    `sigma` [k] descending from 1, `vectors` [D, k] and `target` c [k, C] stand for the training rows: the excess loss
    of W [D, C] is ||S V^T W - c||^2. `val` [N_val, D] and `test` [N_test, D] are features times `scale`, in the same
    units. `flops` were spent before the first step, `per_pass` are those of one gradient.
    """

    task: Task
    sigma: Tensor
    vectors: Tensor
    target: Tensor
    val: Tensor
    test: Tensor
    scale: Tensor
    flops: float
    per_pass: float
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.factor = self.sigma[:, None] * self.vectors.T

    @classmethod
    def of(cls, task: Task, rows: Rows) -> "LeastSquares":
        """Raises Inapplicable for features that nothing can be learned from."""
        targets = task.targets(rows.y)
        try:
            probe = Probe.of(rows.train, targets)
        except DegenerateSpectrum as error:
            raise Inapplicable(str(error)) from error
        n = len(rows.train)
        scale = n**0.5 / probe.sigma[0]
        return cls(
            task,
            probe.sigma / probe.sigma[0],
            probe.vectors,
            probe.coefficients / n**0.5,
            rows.val * scale,
            rows.test * scale,
            scale,
            rows.flops,
            per_pass=4.0 * rows.train.numel() * targets.shape[1],  # F W and F^T (F W - Y)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """D, C of the weights."""
        return self.vectors.shape[0], self.target.shape[1]

    @property
    def kappa(self) -> float:
        return spectrum.condition_number_of(self.sigma, len(self.sigma))

    def gradient(self, weights: Tensor) -> Tensor:
        """Gradient [..., D, C] of half the mean excess loss."""
        return self.factor.T @ (self.factor @ weights - self.target)

    def excess(self, weights: Tensor) -> Tensor:
        """Excess loss of weights [..., D, C] relative to that of 0, [...]."""
        return (self.factor @ weights - self.target).square().sum((-2, -1)) / self.target.square().sum()


class ProbeCurves:
    """Measures of every setting of a probe: `val`, `test` and `excess` [settings, T] at the T steps of the grid.

    `scores` [settings, T, N] are what test rows add to `test`.
    """

    def __init__(self, problem: LeastSquares, grid: Sequence[int], settings: int) -> None:
        self.problem, self.grid, task = problem, list(grid), problem.task
        shape = settings, len(self.grid)
        self.val, self.test, self.excess = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(3))
        self.scores = torch.zeros(*shape, len(task.test), dtype=torch.bool if task.classes else torch.float64)
        self.flops = torch.zeros(len(self.grid), dtype=torch.float64)
        self.done = 0

    def due(self, step: int) -> bool:
        """Whether `step` has reached the next one of the grid."""
        return self.done < len(self.grid) and step >= self.grid[self.done]

    def record(self, step: int, weights: Tensor, passes: float | None = None) -> bool:
        """Measure weights [settings, D, C] at `step`, if it is due; True where nothing can change any more.

        `passes` is the number of gradients that were taken, by default as many as steps.
        """
        if self.due(step):
            task, i = self.problem.task, self.done
            self.excess[:, i] = excess = self.problem.excess(weights).cpu()
            bounded = torch.isfinite(excess) & (excess < DIVERGENCE)
            self.val[:, i] = task.measure(self.problem.val @ weights, task.val.y).cpu().where(bounded, torch.nan)
            test = self.problem.test @ weights
            self.test[:, i] = task.measure(test, task.test.y).cpu().where(bounded, torch.nan)
            self.scores[:, i] = task.scores(test, task.test.y).to(self.scores)
            self.flops[i] = self.problem.flops + self.problem.per_pass * (step if passes is None else passes)
            self.done += 1
            return bool((excess < CONVERGED).all())
        return self.done == len(self.grid)

    def finish(self) -> None:
        """A descent that ended early has converged: the rest of each curve is its last value."""
        last = max(self.done - 1, 0)
        for curve in (self.val, self.test, self.excess, self.scores):
            curve[:, self.done :] = curve[:, last : last + 1]
        self.flops[self.done :] = self.flops[last]


class ProbeAttack(Attack):
    """A linear head w on frozen features, 1/2 ||F w - Y||^2, no bias, w_0 = 0, full batches.

    The paper's probe has no bias either. Without one, on uneven classes, it may be less accurate than guessing the
    largest class, also where `scaling` gives features mean 0.

    Subclasses `descend`. `scaling` is what the attacker does to the features first: nothing but one factor for all
    (`none`), every column to unit length (`columns`: a diagonal preconditioner), or mean 0 and standard deviation 1
    over the training rows (`standard`).
    """

    option = "attack/common/probe"

    order: ClassVar[float | None] = 1.0

    tries = "once"
    once = (1.0,)
    steps: AtLeastOne
    scaling: Scaling

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        problem = self.problem(victim, stage)
        curves = self.curves(problem)
        self.descend(problem, curves)
        return self.best(problem, curves)

    def curves(self, problem: LeastSquares) -> ProbeCurves:
        """Those of all settings, with nothing measured yet."""
        return ProbeCurves(problem, step_grid(self.steps), len(self.settings))

    def best(self, problem: LeastSquares, curves: ProbeCurves) -> AttackCurve:
        """The curve of the best setting, after a descent."""
        curves.finish()
        return self.choose(
            curves.grid,
            curves.flops,
            curves.val,
            curves.test,
            problem.task.chance,
            problem.flops,
            scores=curves.scores,
            excess=curves.excess,
            kappa=self.condition_number(problem),
        )

    def problem(self, victim: Victim, stage: Stage) -> LeastSquares:
        """The data that this attacker learns from: features as they prepare them, and what these cost."""
        rows = self.features(victim, stage)
        if self.scaling != "none":
            mean = rows.train.mean(0) if self.scaling == "standard" else torch.zeros_like(rows.train[0])
            size = (rows.train - mean).square().mean(0).sqrt()
            size = size.where(size > 0, 1.0)
            train, val, test = ((x - mean) / size for x in (rows.train, rows.val, rows.test))
            rows = replace(rows, train=train, val=val, test=test, flops=rows.flops + 4.0 * train.numel())
        return LeastSquares.of(victim.task, rows)

    def condition_number(self, problem: LeastSquares) -> Tensor | float:
        """kappa of the Hessian that is descended, or [settings]."""
        return problem.kappa

    def descend(self, problem: LeastSquares, curves: ProbeCurves) -> None:
        """Minimize for every setting at once; `curves.record(step, weights)` after each step, until it says True."""
        raise NotImplementedError
