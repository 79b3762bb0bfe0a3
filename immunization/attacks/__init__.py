"""Attacks on an immunized extractor: one class each, chosen by the list `attack=[...]` (conf/attack/*.yaml)."""

from immunization.attacks.base import Attack, AttackCurve
from immunization.attacks.block_probe import BlockProbe, FrozenBlocks, LayerProbe, TileProbe
from immunization.attacks.direct import ClosedFormProbe, LogisticProbe
from immunization.attacks.kept import KeptCurves, check_places
from immunization.attacks.least_squares import LeastSquares, ProbeAttack, ProbeCurves
from immunization.attacks.neighbours import Neighbours
from immunization.attacks.network import FineTune, LoRA, Pruned
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
from immunization.attacks.suite import run_attacks
from immunization.attacks.transfer import run_transfer
from immunization.attacks.victim import Inapplicable, Precision, Stage, Victim, require_held_out
from immunization.attacks.without import Distilled, FreshFrom, FreshPart, RandomNet, RawInputs, Scratch
from immunization.attacks.worth import Suite
