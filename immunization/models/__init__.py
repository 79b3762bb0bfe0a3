"""Feature extractors: one class each, chosen by `conf/model/*.yaml`."""

from immunization.models.base import Batch, Model
from immunization.models.fitted_net import DigitsNet, FittedNet
from immunization.models.linear import Folded, Linear
from immunization.models.pretrained import Torchvision, Transformers
from immunization.models.timm import Timm
