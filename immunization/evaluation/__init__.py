"""Measures of what immunization did: one class each, chosen by the list `evaluation=[...]` (conf/evaluation/*.yaml)."""

from immunization.evaluation.alignment import Alignment, Ceiling
from immunization.evaluation.comparison import Comparison
from immunization.evaluation.convergence import LearningCurves, NormRatio
from immunization.evaluation.deployment import Deployment
from immunization.evaluation.measures import Measures, evaluate
from immunization.evaluation.other_classes import OtherClasses
from immunization.evaluation.primary import Definition, OwnHead, PrimaryPerformance
from immunization.evaluation.rir import RelativeRatio, SampledRatio, StartRatio
from immunization.evaluation.selectivity import Selectivity
from immunization.evaluation.validity import Validity
