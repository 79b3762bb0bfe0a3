"""One attack on every stage of a victim, and where it stands between chance and the baseline."""

from dataclasses import dataclass

import torch
from torch import Tensor

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.victim import Stage
from immunization.data.task import LEARNED, MARGIN
from immunization.evaluation.measures import Measures


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
        return self.before.test.max().item() < self.chance + MARGIN

    @property
    def telling(self) -> bool:
        """Whether the attack works on the baseline, so that its figures say something of theta_I."""
        return not self.failed and not self.at_chance

    @property
    def bar(self) -> float:
        """The test measure that counts as having learned the task."""
        return self.chance + LEARNED * (self.before.test.max().item() - self.chance)

    @property
    def capped(self) -> bool:
        """Whether the attack works on the baseline and does not come to the bar on theta_I within its steps."""
        return self.telling and reached(self.after, self.bar) is None


def never_finite(curve: AttackCurve) -> bool:
    """Whether no setting of the attack stayed finite."""
    return not bool(torch.isfinite(curve.val).all())


def reached(curve: AttackCurve, bar: float) -> int | None:
    """Index of the first step at which the test measure is at least `bar`, up to rounding; None for none."""
    return first(curve.test >= bar - 1e-12)


def learned(curve: AttackCurve, bar: float) -> bool:
    """Whether the test measure is at least `bar`, up to rounding, at the step that the validation rows choose."""
    return curve.final >= bar - 1e-12


def put_final(curve: AttackCurve, prefix: str, suffix: str, measures: Measures) -> None:
    """`<prefix>/final<suffix>`, and the range over the attacker's seeds where there are several."""
    measures.put(f"{prefix}/final{suffix}", curve.final)
    if curve.finals:
        measures.put(f"{prefix}/final_lowest{suffix}", min(curve.finals))
        measures.put(f"{prefix}/final_highest{suffix}", max(curve.finals))


def first(found: Tensor) -> int | None:
    """Index of the first True of [T] booleans; None where there is none."""
    return int(found.nonzero()[0, 0]) if found.any() else None


def listed(settings: tuple[float, ...]) -> str:
    return ", ".join(f"{setting:g}" for setting in settings)
