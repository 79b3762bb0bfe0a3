"""The interface of an attack, what it reports, and the loop that all linear probes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from immunization.attacks.victim import Inapplicable, Precision, Stage, Victim
from immunization.checks import AtLeastOne, checked
from immunization.data.task import Task
from immunization.errors import ConfigError, DegenerateSpectrum
from immunization.theory import spectrum
from immunization.theory.probe import Probe

Scaling = Literal["none", "columns", "standard"]

DIVERGENCE = 1e12
"""A training loss above this multiple of the first one counts as diverged."""

CONVERGED = 1e-13
"""Excess training loss, relative to that of w = 0, at which the rest of a curve is a constant."""


@dataclass
class AttackCurve:
    """One attack on one extractor, with the setting (learning rate, ridge) that was best on the validation split.

    `steps` [T] and `flops` [T] say what was spent when `val` and `test` [T], the task's measure, were reached. `excess`
    [T] is the excess training loss of a probe relative to that of w = 0, `kappa` that of the Hessian it descends.
    `diverged` are the settings that did not stay finite, `at_edge` says that the best one was the smallest or largest
    of those tried.
    """

    steps: Tensor
    flops: Tensor
    val: Tensor
    test: Tensor
    excess: Tensor | None = None
    kappa: float | None = None
    setting: float | None = None
    diverged: tuple[float, ...] = ()
    at_edge: bool = False

    @property
    def final(self) -> float:
        """Test measure where an attacker stops: at the first maximum on the validation split."""
        return self.test[self.val.argmax()].item()


class Attack:
    """An attacker with a budget of `steps`, who tries all of his `settings` and keeps the best on validation data.

    `samples`: training rows of each class (of all, for a regression); None: every row. `precision`: the weights are
    rounded before the attack. The same rows and settings are used on every stage of a `Victim`. Raises ConfigError.
    """

    setting_name = "learning rate"
    order: float | None = None
    """Theory: steps grow as kappa ** order (Eq. 2 for gradient descent has 1); None where there is no such law."""
    natural_ends = False
    """Whether nothing is to be expected beyond the ends of the settings: 0, or where the method is unstable."""

    @checked("attack.*")
    def __init__(
        self,
        steps: AtLeastOne,
        settings: Sequence[float],
        samples: AtLeastOne | None = None,
        precision: Precision | None = None,
        seed: int = 0,
    ) -> None:
        settings = sorted(settings)
        if not settings or not settings[0] >= 0:
            raise ConfigError(f"attack: {self.setting_name}s must be a list of numbers of at least 0, not {settings}")
        self.steps, self.settings, self.samples, self.precision, self.seed = steps, settings, samples, precision, seed

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        """Attack one stage. Raises Inapplicable where the model or the data do not allow it."""
        raise NotImplementedError

    def rows(self, task: Task) -> Tensor | None:
        """The training rows that the attacker has; None for all."""
        if self.samples is None:
            return None
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(self.seed))
        if not task.classes:
            return order[: self.samples].sort().values
        y = task.train.y.cpu()[order]
        return torch.cat([order[y == label][: self.samples] for label in range(task.classes)]).sort().values

    def choose(
        self, grid: Sequence[int], flops: Tensor, val: Tensor, test: Tensor, floor: float, **facts: object
    ) -> AttackCurve:
        """The curve of the setting whose validation curve has the largest mean over the (geometric) grid.

        `val` and `test` are [settings, T]; a row with NaN has diverged. A measure below `floor`, that of guessing,
        counts as guessing. Where every setting diverged, the curve is NaN throughout.
        """
        diverged = ~torch.isfinite(val).all(1)
        area = val.clamp(min=floor).mean(1)
        area[diverged] = -torch.inf
        best = int(area.argmax())
        inside = self.natural_ends or 0 < best < len(self.settings) - 1
        return AttackCurve(
            torch.tensor(list(grid)),
            flops,
            val[best],
            test[best],
            setting=self.settings[best],
            diverged=tuple(s for s, bad in zip(self.settings, diverged.tolist(), strict=True) if bad),
            at_edge=not inside and bool(area[best] > area.min()),
            **{name: value[best] if isinstance(value, Tensor) else value for name, value in facts.items()},
        )


def step_grid(steps: int, per_octave: int = 4) -> list[int]:
    """1, ..., `steps`, geometric: round(2^(j / per_octave)), with `steps` as the last."""
    grid, j = {steps}, 0
    while (t := round(2 ** (j / per_octave))) <= steps:
        grid.add(t)
        j += 1
    return sorted(grid)


@dataclass
class Problem:
    """Least squares on features, in units in which the mean Hessian has lambda_1 = 1.

    `sigma` [k] descending from 1, `vectors` [D, k] and `target` c [k, C] stand for the training rows: the excess loss
    of W [D, C] is ||S V^T W - c||^2. `val` [N_val, D] and `test` [N_test, D] are features in the same units. `flops`
    were spent before the first step, `per_pass` are those of one gradient.
    """

    task: Task
    sigma: Tensor
    vectors: Tensor
    target: Tensor
    val: Tensor
    test: Tensor
    flops: float
    per_pass: float
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.factor = self.sigma[:, None] * self.vectors.T

    @classmethod
    def of(cls, task: Task, train: Tensor, y: Tensor, val: Tensor, test: Tensor, flops: float) -> Problem:
        """From features [N, D] and labels [N]; raises Inapplicable for features that nothing can be learned from."""
        targets, width = task.targets(y), train.shape[1]
        blocks = spectrum.triangular_factor(torch.cat([train, targets], 1))[0][:width]
        try:
            probe = Probe.fit(blocks[:, :width], blocks[:, width:], max(train.shape) * spectrum.EPS)
        except DegenerateSpectrum as error:
            raise Inapplicable(str(error)) from error
        n = len(train)
        scale = n**0.5 / probe.sigma[0]
        passes = 4.0 * train.numel() * targets.shape[1]  # F W and F^T (F W - Y)
        return cls(
            task,
            probe.sigma / probe.sigma[0],
            probe.vectors,
            probe.coefficients / n**0.5,
            val * scale,
            test * scale,
            flops,
            passes,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weights: D, C."""
        return self.vectors.shape[0], self.target.shape[1]

    @property
    def kappa(self) -> float:
        return spectrum.condition_number_of(self.sigma, len(self.sigma))

    def gradient(self, weights: Tensor) -> Tensor:
        """Of half the mean excess loss, [..., D, C]."""
        return self.factor.T @ (self.factor @ weights - self.target)

    def excess(self, weights: Tensor) -> Tensor:
        """Excess loss of weights [..., D, C] relative to that of 0, [...]."""
        return (self.factor @ weights - self.target).square().sum((-2, -1)) / self.target.square().sum()


class Log:
    """Takes weights [settings, D, C] after every step and measures them at the steps of the grid."""

    def __init__(self, problem: Problem, grid: Sequence[int], settings: int) -> None:
        self.problem, self.grid = problem, list(grid)
        self.val, self.test, self.excess = (
            torch.full((settings, len(self.grid)), torch.nan, dtype=torch.float64) for _ in range(3)
        )
        self.flops = torch.zeros(len(self.grid), dtype=torch.float64)
        self.done = 0

    def __call__(self, step: int, weights: Tensor, passes: float | None = None) -> bool:
        """Measure at `step`, after `passes` gradients (as many as steps by default); True where nothing can change."""
        if self.done < len(self.grid) and step >= self.grid[self.done]:
            task, i = self.problem.task, self.done
            self.excess[:, i] = excess = self.problem.excess(weights).cpu()
            bounded = torch.isfinite(excess) & (excess < DIVERGENCE)
            self.val[:, i] = task.measure(self.problem.val @ weights, task.val.y).cpu().where(bounded, torch.nan)
            self.test[:, i] = task.measure(self.problem.test @ weights, task.test.y).cpu().where(bounded, torch.nan)
            self.flops[i] = self.problem.flops + self.problem.per_pass * (step if passes is None else passes)
            self.done += 1
            return bool((excess < CONVERGED).all())
        return self.done == len(self.grid)

    def finish(self) -> None:
        """A descent that ended early has converged: the rest of each curve is its last value."""
        last = max(self.done - 1, 0)
        for curve in (self.val, self.test, self.excess):
            curve[:, self.done :] = curve[:, last : last + 1]
        self.flops[self.done :] = self.flops[last]


class ProbeAttack(Attack):
    """A linear head w on frozen features, 1/2 ||F w - Y||^2, no bias, w_0 = 0, full batches.

    Subclasses `descend`. `scaling` is what the attacker does to the features first: nothing but one factor for all
    (`none`), every column to unit length (`columns`: a diagonal preconditioner), or mean 0 and standard deviation 1
    over the training rows (`standard`).
    """

    order = 1.0

    @checked("attack.*")
    def __init__(
        self,
        steps: AtLeastOne,
        settings: Sequence[float],
        scaling: Scaling = "none",
        samples: AtLeastOne | None = None,
        precision: Precision | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(steps, settings, samples, precision, seed)
        self.scaling = scaling

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        problem = self.problem(victim, stage)
        grid = step_grid(self.steps)
        log = Log(problem, grid, len(self.settings))
        self.descend(problem, log)
        log.finish()
        floor = problem.task.chance
        return self.choose(
            grid, log.flops, log.val, log.test, floor, excess=log.excess, kappa=self.condition_number(problem)
        )

    def problem(self, victim: Victim, stage: Stage) -> Problem:
        """What this attacker learns from: features as he prepares them, and what they cost."""
        task = victim.task
        for split in ("val", "test"):
            if not len(getattr(task, split)):
                raise Inapplicable(f"the harmful task has no {split} split: set dataset.{split}_fraction above 0")
        rows = self.rows(task)
        train, val, test = (self.extract(victim, stage, split) for split in ("train", "val", "test"))
        y = task.train.y
        if rows is not None:
            train, y = train[rows.to(train.device)], y[rows.to(y.device)]
        flops = victim.flops_per_row() * len(train)
        if self.scaling != "none":
            mean = train.mean(0) if self.scaling == "standard" else torch.zeros_like(train[0])
            size = (train - mean).square().mean(0).sqrt()
            size = size.where(size > 0, 1.0)
            train, val, test = ((part - mean) / size for part in (train, val, test))
            flops += 4.0 * train.numel()
        return Problem.of(task, train, y, val, test, flops)

    def extract(self, victim: Victim, stage: Stage, split: str) -> Tensor:
        """Features [N, D] of one split as the attacker extracts them."""
        return victim.features(stage, split, self.precision)

    def condition_number(self, problem: Problem) -> float:
        """kappa of the Hessian that is descended."""
        return problem.kappa

    def descend(self, problem: Problem, log: Log) -> None:
        """Minimize for every setting at once; `log(step, weights)` after each step, until it says True."""
        raise NotImplementedError
