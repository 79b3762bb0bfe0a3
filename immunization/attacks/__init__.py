"""Attacks on an immunized extractor: one class each, chosen by the list `attack=[...]` (conf/attack/*.yaml)."""

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.direct import ClosedFormProbe, LogisticProbe
from immunization.attacks.earlier import EarlierLayers, RenewedEarlierLayers
from immunization.attacks.kept import KeptCurves
from immunization.attacks.network import FineTune, LoRA
from immunization.attacks.probes import (
    LBFGS,
    Adam,
    AdamW,
    ConjugateGradients,
    LinearProbe,
    Momentum,
    Undo,
    WhitenedProbe,
)
from immunization.attacks.renewed import RenewedStatistics
from immunization.attacks.scratch import Scratch
from immunization.attacks.suite import run_attacks
from immunization.attacks.victim import Inapplicable, Victim

__all__ = [
    "LBFGS",
    "Adam",
    "AdamW",
    "Attack",
    "AttackCurve",
    "ClosedFormProbe",
    "ConjugateGradients",
    "EarlierLayers",
    "FineTune",
    "Inapplicable",
    "KeptCurves",
    "LinearProbe",
    "LoRA",
    "LogisticProbe",
    "Momentum",
    "RenewedEarlierLayers",
    "RenewedStatistics",
    "Scratch",
    "Undo",
    "Victim",
    "WhitenedProbe",
    "run_attacks",
]
