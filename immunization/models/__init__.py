"""Feature extractors: one class each, chosen by `conf/model/*.yaml`."""

from immunization.models.base import Batch, Model
from immunization.models.fitted_net import DigitsNet, FittedNet
from immunization.models.folded import Folded
from immunization.models.linear import Linear
from immunization.models.timm import Timm
