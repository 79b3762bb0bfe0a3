"""Immunization methods: one short class each beside the shared loop in training/loop.py."""

from immunization.methods.base import Callback, Combine, Identity, Method, Unmodified
from immunization.methods.combined import Combined, combined
from immunization.methods.condition_number import ConditionNumber, ReleasedConditionNumber, RIllOnly
from immunization.methods.decoys import Decoys
from immunization.methods.fine_tuning import TAR, Sophon
from immunization.methods.forget import Forget, ForgetBlocks
from immunization.methods.imma import IMMA
from immunization.methods.learning_curve import LearningCurve, LearningCurveNet
from immunization.methods.linear_map import ClosedForm
from immunization.methods.opt_kappa import OptKappa
from immunization.methods.probing import CLAMP, NTL, AgainstAttacker, AgainstHead, Encoderlock
