"""Measures of what immunization did: one class each, chosen by the list `evaluation=[...]` (conf/evaluation/*.yaml)."""

from immunization.evaluation.alignment import Alignment, Ceiling
from immunization.evaluation.base import Comparison, Measures
from immunization.evaluation.convergence import LearningCurves, NormRatio
from immunization.evaluation.deep import OwnHead, SampledRatio
from immunization.evaluation.primary import Definition, PrimaryPerformance
from immunization.evaluation.rir import RelativeRatio
from immunization.evaluation.validity import Validity

__all__ = [
    "Alignment",
    "Ceiling",
    "Comparison",
    "Definition",
    "LearningCurves",
    "Measures",
    "NormRatio",
    "OwnHead",
    "PrimaryPerformance",
    "RelativeRatio",
    "SampledRatio",
    "Validity",
]
