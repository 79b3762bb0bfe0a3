"""Immunization methods: one short class each beside the shared loop in training/loop.py."""

from immunization.methods.attacker import AgainstAttacker, AgainstHead
from immunization.methods.base import Callback, Combine, Method
from immunization.methods.clamp import CLAMP
from immunization.methods.closed_form import ClosedForm
from immunization.methods.combined import Combined, combined
from immunization.methods.condition_number import ConditionNumber, ReleasedConditionNumber, RIllOnly
from immunization.methods.encoderlock import Encoderlock
from immunization.methods.forget import Forget
from immunization.methods.forget_blocks import ForgetBlocks
from immunization.methods.imma import IMMA
from immunization.methods.learning_curve import LearningCurve, LearningCurveNet
from immunization.methods.ntl import NTL
from immunization.methods.opt_kappa import OptKappa
from immunization.methods.sophon import Sophon
from immunization.methods.tar import TAR
from immunization.methods.unchanged import Identity, Unmodified
