"""One attack on every stage of a victim, and where it stands between chance and the baseline."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.data.task import LEARNED, MARGIN
from immunization.evaluation.measures import Measures
from immunization.runs.records import Stage
from immunization.theory.statistics import ROUNDING


@dataclass
class Outcome:
    """The curve of one attack on every stage; `chance` is the task's measure of guessing."""

    name: str
    attack: Attack
    chance: float
    curves: dict[Stage, AttackCurve]

    def __post_init__(self) -> None:
        self.after, self.before = self.curves["immunized"], self.curves["baseline"]

    @property
    def failed(self) -> bool:
        """Whether no setting stayed finite on some stage."""
        return any(never_finite(curve) for curve in self.curves.values())

    @property
    def at_chance(self) -> bool:
        """Whether the attack learns nothing from the baseline either."""
        return self.before.final < self.chance + MARGIN

    @property
    def blind(self) -> bool:
        """Whether the attack has nothing to learn from with theta_I."""
        return not self.after.steps[-1]

    @property
    def telling(self) -> bool:
        """Whether the attack works on the baseline, so that its figures say something of theta_I."""
        return not self.failed and not self.at_chance

    @property
    def bar(self) -> float:
        """The test measure that counts as having learned the task."""
        return self.chance + LEARNED * (self.before.final - self.chance)

    @property
    def capped(self) -> bool:
        """Whether the attack works on the baseline and does not come to the bar on theta_I within its steps."""
        return self.telling and not self.blind and reached(self.after, self.bar) is None


def never_finite(curve: AttackCurve) -> bool:
    """Whether no setting of the attack stayed finite."""
    return not bool(torch.isfinite(curve.val).all())


def reached(curve: AttackCurve, bar: float) -> int | None:
    """Index of the step at which an attacker who wants no more than `bar` stops; None where the task is not learned.

    The task is learned if `final`, which is measured on test rows, is at least `bar`, up to rounding. The attacker
    decides where to stop on validation rows only.
    """
    if not curve.final >= bar - ROUNDING:
        return None
    best, there = curve.stop, first(curve.val >= bar - ROUNDING)
    return best if there is None else min(best, there)


def cost(curve: AttackCurve, bar: float) -> float | None:
    """Operations until `reached`, between two points of a training by their logarithm; None where it is not."""
    place = reached(curve, bar)
    if place is None:
        return None
    spent = curve.flops[place].item()
    if not curve.path or not place or not curve.val[place] >= bar:
        return spent
    share = ((bar - curve.val[place - 1]) / (curve.val[place] - curve.val[place - 1])).item()
    return curve.flops[place - 1].item() ** (1 - share) * spent**share


def put_final(curve: AttackCurve, measures: Measures, **of: Any) -> None:
    """`final` of a task, a stage and an attack, and the range over the attacker's seeds where there are several."""
    measures.put("final", curve.final, **of)
    if curve.finals:
        measures.put("final_lowest", min(curve.finals), **of)
        measures.put("final_highest", max(curve.finals), **of)


def first(found: Tensor) -> int | None:
    """Index of the first True of [T] booleans; None where there is none."""
    return int(found.nonzero()[0, 0]) if found.any() else None


def listed(settings: tuple[float, ...]) -> str:
    return ", ".join(f"{setting:g}" for setting in settings)
