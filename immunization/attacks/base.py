"""The interface of an attack, and the curve that it reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from immunization.attacks.altered import Precision
from immunization.attacks.victim import Victim, require_held_out
from immunization.checks import AtLeastOne, Component, Seed
from immunization.data.task import SPLITS, Task
from immunization.errors import ConfigError
from immunization.models.base import Model
from immunization.runs.records import Stage


@dataclass
class AttackCurve:
    """One attack on one extractor, with the setting (learning rate, ridge) that was best on the validation split.

    `steps` [T] and `flops` [T] say what was spent when `val` and `test` [T], the task's measure, were reached. `excess`
    [T] is the excess training loss of a probe relative to that of w = 0, `kappa` that of the Hessian it descends.
    `diverged` are the settings that did not stay finite; `at_edge`: the best one was the smallest or largest tried.
    `epochs` are places in [T] by passes over the training rows. `found` are settings that were searched for or
    replayed, and `finals` what they reach with each seed, of which the curve is the best on the validation split.
    `scores` [T, N] is what each test row adds to `test`, the mean over them: bool where all are hits or misses, else
    float32. `others` are the operations of all else that was tried to find the setting. `path`: the points are those of
    one training, with others between them, and not each an attempt of its own.
    """

    steps: Tensor
    flops: Tensor
    val: Tensor
    test: Tensor
    excess: Tensor | None = None
    kappa: float | Tensor | None = None
    setting: float | None = None
    diverged: tuple[float, ...] = ()
    at_edge: bool = False
    epochs: dict[int, int] | None = None
    found: dict[str, Any] | None = None
    finals: tuple[float, ...] = ()
    scores: Tensor | None = None
    others: float = 0.0
    path: bool = True

    def __post_init__(self) -> None:
        if self.scores is not None:  # hits and misses take one byte each
            hits = self.scores.bool()
            self.scores = hits if torch.equal(hits.to(self.scores), self.scores) else self.scores.float()

    @property
    def stop(self) -> int:
        """Where an attacker stops: at the first maximum on the validation split, of several attempts at the last."""
        return int(self.val.argmax()) if self.path else len(self.val) - 1 - int(self.val.flip(0).argmax())

    @property
    def final(self) -> float:
        """Test measure where an attacker stops."""
        return self.test[self.stop].item()

    @classmethod
    def of_guessing(cls, task: Task) -> "AttackCurve":
        """The curve of an attacker who finds nothing to learn from."""
        chance = torch.tensor([task.chance], dtype=torch.float64)
        nothing = torch.zeros(1, dtype=torch.float64)
        return cls(nothing.long(), nothing, chance, chance)


@dataclass
class Rows:
    """What an attacker on frozen features has: features [N, D] by split, labels [N] of training rows, and their cost.

    `flops` are the operations of the features of training rows.
    """

    train: Tensor
    y: Tensor
    val: Tensor
    test: Tensor
    flops: float


class Attack(Component, group="attack.*"):
    """An attacker with a budget of `steps`, who tries all of their `settings` and keeps the best on validation data.

    `samples`: training rows of each class (in all, for a regression); None: every row. `precision`: the weights are
    rounded before the attack. Every stage of a `Victim` meets the same rows and settings. Raises ConfigError.
    """

    option = "attack/common/attacker"

    setting_name = "learning rate"
    tries = "rates"
    """Where the settings stand: an option, or an attribute of the class."""
    order: ClassVar[float | None] = None
    """Steps grow as kappa ** order (Eq. 2: 1 for gradient descent); None where there is no such law."""
    natural_ends = False
    """Whether nothing is to be expected beyond the ends of the settings: 0, or where the method is unstable."""
    reference = False
    """Whether it does not use theta_I: no attack, but one way to do without the model, or with a part of theta_0."""
    trains = False
    """Whether it trains the net, which takes long."""
    reads_blocks = False
    """Whether it reads the net at any of its blocks."""

    steps: AtLeastOne
    samples: AtLeastOne | None
    precision: Precision | None
    seed: Seed

    def __post_init__(self) -> None:
        self.settings = sorted(getattr(self, self.tries))
        if not self.settings or not self.settings[0] >= 0:
            raise ConfigError(
                f"{self.group}.{self.tries}: {self.setting_name}s must be numbers of at least 0, not {self.settings}"
            )

    @property
    def kind(self) -> str:
        """The kind of attack that settings of this one fit."""
        return type(self).__name__

    @property
    def partial(self) -> str | None:
        """The block or stage before which a reference has theta_0; None where it has nothing of it."""
        return None

    def check(self, model: Model) -> None:
        """Raise ConfigError where the model lacks what the attack was asked to use."""

    def trains_all(self, victim: Victim) -> bool:
        """Whether it fine-tunes all that was immunized; without such an attack nothing is called held."""
        return False

    def untouched(self, victim: Victim) -> bool:
        """Whether it uses nothing that immunization changed, so that it is left to an attacker of any theta_I."""
        return False

    def needs_theta_0(self, victim: Victim) -> bool:
        """Whether who has theta_I also needs theta_0, which a suite may keep from them."""
        return False

    def beside(self, victim: Victim) -> tuple[object, ...]:
        """What its curve on the baseline depends on beside the baseline: a row's operations, layers that it trains."""
        trained = victim.network("baseline").trained if self.trains and victim.model.deep else ()
        return victim.flops_per_row("baseline"), *trained

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        """Attack one stage. Raises Inapplicable where the model or the data do not allow it."""
        raise NotImplementedError

    def rows(self, task: Task) -> Tensor | None:
        """The training rows that the attacker has; None for all."""
        return None if self.samples is None else task.few(self.samples, self.seed)

    def features(self, victim: Victim, stage: Stage) -> Rows:
        """The features of a stage, with weights of the attacker's precision. Raises Inapplicable."""
        task = victim.task
        require_held_out(task)
        train, val, test = (victim.features(stage, split, self.precision) for split in SPLITS)
        rows, y = self.rows(task), task.train.y
        if rows is not None:
            train, y = train[rows.to(train.device)], y[rows.to(y.device)]
        return Rows(train, y, val, test, victim.flops_per_row(stage) * len(train))

    def choose(
        self,
        steps: Sequence[int] | Tensor,
        flops: Tensor,
        val: Tensor,
        test: Tensor,
        floor: float,
        shared: float = 0.0,
        *,
        scores: Tensor | None = None,
        excess: Tensor | None = None,
        kappa: Tensor | float | None = None,
    ) -> AttackCurve:
        """The curve of the setting whose validation curve has the largest mean over the (geometric) grid.

        `val`, `test` and `excess` are [settings, T], `scores` [settings, T, N]; `steps` and `flops` [T] are those of
        all settings, or [settings, T]. A row with NaN has diverged. A measure below `floor`, that of guessing, counts
        as guessing. Where every setting diverged, the curve is NaN throughout. `shared` operations are spent once for
        all settings.
        """
        area = areas(val, floor)
        best = int(area.argmax())
        steps, flops = (torch.as_tensor(x).broadcast_to(val.shape) for x in (steps, flops))
        spent = flops[:, -1] - shared
        inside = self.natural_ends or 0 < best < len(self.settings) - 1
        return AttackCurve(
            steps[best],
            flops[best],
            val[best],
            test[best],
            excess=None if excess is None else excess[best],
            kappa=kappa[best] if isinstance(kappa, Tensor) else kappa,
            setting=self.settings[best],
            diverged=tuple(s for s, mean in zip(self.settings, area.tolist(), strict=True) if mean == -torch.inf),
            at_edge=not inside and bool(area[best] > area.min()),
            scores=None if scores is None else scores[best],
            others=(spent.sum() - spent[best]).item(),
        )


class Predictor(Attack):
    """An attacker who predicts held-out rows from the features of training rows, once for each setting.

    A subclass has `predict`. It counts as one step.
    """

    option = "attack/common/attacker"

    natural_ends = True

    def run(self, victim: Victim, stage: Stage) -> AttackCurve:
        rows = self.features(victim, stage)
        predictions, flops = self.predict(victim.task, rows)
        return self.curve(victim.task, predictions, torch.tensor([[rows.flops + flops]]).double(), rows.flops + flops)

    def predict(self, task: Task, rows: Rows) -> tuple[Tensor, float]:
        """Predictions [settings, V + T, outputs] for validation and test rows, one below the other, and operations.

        What `Task.measure` reads, or votes for each class. Raises Inapplicable.
        """
        raise NotImplementedError

    def curve(
        self, task: Task, predictions: Tensor, flops: Tensor, shared: float = 0.0, steps: Tensor | None = None
    ) -> AttackCurve:
        """The curve of the best predictions; `flops` and `steps` are [settings, 1] or [1, 1]."""
        val, test = as_outputs(task, predictions).split([len(task.val), len(task.test)], 1)
        return self.choose(
            torch.ones(1, 1, dtype=torch.long) if steps is None else steps,
            flops,
            task.measure(val, task.val.y)[:, None].cpu(),
            task.measure(test, task.test.y)[:, None].cpu(),
            task.chance,
            shared,
            scores=task.scores(test, task.test.y)[:, None].cpu(),
        )


def as_outputs(task: Task, votes: Tensor) -> Tensor:
    """Votes [..., classes] as `Task.measure` reads them: of two classes one column."""
    return votes.diff(dim=-1) if votes.shape[-1] > task.outputs else votes


def areas(val: Tensor, floor: float) -> Tensor:
    """Means [settings] of validation curves [settings, T], at least `floor` each; -inf for those that diverged."""
    return val.clamp(min=floor).mean(1).where(torch.isfinite(val).all(1), -torch.inf)


def step_grid(steps: int, per_octave: int = 4) -> list[int]:
    """1, ..., `steps`, geometric: round(2^(j / per_octave)), with `steps` as the last."""
    grid, j = {steps}, 0
    while (t := round(2 ** (j / per_octave))) <= steps:
        grid.add(t)
        j += 1
    return sorted(grid)
