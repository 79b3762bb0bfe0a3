"""Measures of what immunization did: one class each, chosen by the list `evaluation=[...]` (conf/evaluation/*.yaml)."""

from immunization.evaluation.alignment import Alignment, Ceiling
from immunization.evaluation.comparison import Comparison, evaluate
from immunization.evaluation.convergence import LearningCurves, NormRatio
from immunization.evaluation.deployment import Deployment
from immunization.evaluation.leak import Leak
from immunization.evaluation.measures import Measures
from immunization.evaluation.own_head import OtherClasses, OwnHead
from immunization.evaluation.primary import Definition, PrimaryPerformance
from immunization.evaluation.rir import RelativeRatio, SampledRatio, StartRatio
from immunization.evaluation.selectivity import Selectivity
from immunization.evaluation.validity import Validity
