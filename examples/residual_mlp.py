"""A model whose extractor is a small network and no matrix. At the start, features are the inputs."""

import torch
from torch import Tensor, nn

from immunization.checks import AtLeastOne
from immunization.data import TaskPair
from immunization.models import Model


class ResidualMLP(Model):
    """Features x + tanh(x A + a) B [N, D] of rows x [N, D]. B starts at 0, so that theta_0 is the baseline."""

    def __init__(self, pair: TaskPair, hidden: AtLeastOne = 128) -> None:
        super().__init__()
        self.extractor = Residual(pair.dim, hidden)
        self.head = nn.Linear(pair.dim, pair.primary.outputs, bias=False)
        self.to(pair.primary.train.x)  # its dtype and device


class Residual(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))
