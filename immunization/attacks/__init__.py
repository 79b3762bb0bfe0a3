"""Attacks on an immunized extractor: one class each, chosen by the list `attack=[...]` (conf/attack/*.yaml)."""

from immunization.attacks.altered import Precision
from immunization.attacks.base import Attack, AttackCurve, Predictor, Rows
from immunization.attacks.block_probe import (
    BlockProbe,
    FreshFrom,
    FrozenBlocks,
    LayerProbe,
    RandomNet,
    RawInputs,
    TileProbe,
)
from immunization.attacks.finetune import Distilled, FineTune, FreshPart, LoRA, Pruned, Scratch
from immunization.attacks.kept import KeptCurves, check_places
from immunization.attacks.least_squares import LeastSquares, ProbeAttack, ProbeCurves
from immunization.attacks.predictors import LogisticProbe, Neighbours
from immunization.attacks.probes import (
    LBFGS,
    Adam,
    ClosedFormProbe,
    ConjugateGradients,
    LinearProbe,
    Momentum,
    Rounded,
    Undo,
    WhitenedProbe,
)
from immunization.attacks.read_weights import ReadWeights, Spread
from immunization.attacks.suite import Suite, run_attacks, run_transfer
from immunization.attacks.victim import Victim, require_held_out
from immunization.errors import Inapplicable
from immunization.runs.records import Stage
