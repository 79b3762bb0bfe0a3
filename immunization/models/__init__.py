"""Feature extractors: one class each, chosen by `conf/model/*.yaml`."""

from immunization.models.base import Batch, Model
from immunization.models.digits_net import DigitsNet
from immunization.models.folded import Folded
from immunization.models.linear import Linear
from immunization.models.timm import Timm

__all__ = ["Batch", "DigitsNet", "Folded", "Linear", "Model", "Timm"]
