"""The attacker's head as methods simulate it, on features of one scale."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.data.task import Task, TaskPair
from immunization.methods.base import Method
from immunization.models.base import Batch, Model


def scaled(features: Tensor) -> Tensor:
    """Features [N, D] divided by one factor, so that their mean squared norm is 1: a larger theta defends nothing."""
    return features / features.square().sum(1).mean().sqrt()


def fitted_head(task: Task, head: Tensor, features: Tensor, y: Tensor, rate: float, steps: int) -> Tensor:
    """`head` [outputs, D] after gradient steps down the loss of `features` [N, D], which are scaled; no graph."""
    features, head = scaled(features.detach()), head.detach()
    for _ in range(steps):
        head.requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(F.linear(features, head), y), head)
        head = head.detach() - rate * gradient
    return head


class AgainstAttacker(Method, without=["patience"]):
    """A method that simulates an attacker; with `max_accuracy_drop` it goes back to the last epoch within that drop."""

    alone = True

    def score(self, model: Model) -> float:
        return max(self.best[0], 0.0) + 1.0


class AgainstHead(AgainstAttacker):
    """A method whose attacker has a linear head w [outputs, D], zero at first and kept from step to step."""

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.attacker = model.head.weight.new_zeros(pair.harmful.outputs, model.head.in_features)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"attacker": self.attacker}

    def harmful_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """The attacker's loss with w as it is, of `features` [N, D] before scaling."""
        return self.pair.harmful.loss(F.linear(scaled(features), self.attacker), batch.y)
