"""The flag of a model that is measured while its layers are in train mode."""

import pytest
import torch
from helpers.comparisons import regression
from torch import nn

from immunization.data.task import TaskPair
from immunization.evaluation import Comparison, Validity
from immunization.models import Model


class Layered(Model):
    """A linear layer and another one behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.extractor, self.head = nn.Sequential(nn.Linear(5, 5), layer), nn.Linear(5, 1, bias=False)
        self.double()


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_layers_in_train_mode_are_flagged(layer, training):
    model = Layered(layer).train(training)
    measures = Validity()(Comparison(TaskPair("pair", regression(0), regression(10)), model))
    assert ("train_mode" in measures.flags) is training
    assert not training or measures.reasons["train_mode"].startswith("extractor.1 in train mode")
