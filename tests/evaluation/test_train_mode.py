"""The flag of a model that is measured while its layers are in train mode."""

import pytest
import torch
from helpers.comparisons import regression

from immunization.data.task import TaskPair
from immunization.evaluation import Comparison, Validity


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_layers_in_train_mode_are_flagged(layer, training):
    net = torch.nn.Sequential(torch.nn.Linear(5, 1), layer).train(training)
    comparison = Comparison(TaskPair("pair", regression(0), regression(10)), after=lambda x: x, logits=net)
    measures = Validity()(comparison)
    assert ("train_mode" in measures.flags) is training
    assert not training or measures.reasons["train_mode"].startswith("1 in train mode")
