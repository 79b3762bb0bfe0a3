"""Steps on a deep net with random images and weights, all of them on one net, which none of them changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from immunization.data.images import ImagePair
from immunization.data.task import Split, Task, TaskPair
from immunization.methods import ConditionNumber, Method
from immunization.models import Batch, Timm
from immunization.models.weights import create

CLASSES = 80


class NetSteps:
    """`model`, the activations `x` [batch * batches, ...] of random images, and one pair of batches of them."""

    def __init__(
        self, name: str, trainable: str, size: int, batch: int, batches: int, device: str, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        images = ImagePair("random", {}, size=size).to(device, dtype)
        self.model = model = Timm(images, trainable=trainable, net=create(name, None, False, {"num_classes": CLASSES}))
        self.x = torch.cat([model.trunk(torch.randn(batch, 3, size, size)).cpu() for _ in range(batches)])
        y = torch.arange(batch * batches, device=device) % CLASSES
        empty, width = Split(self.x[:0], y[:0]), model.head.in_features
        self.tasks = [Task(role, Split(self.x, y), empty, empty, classes=CLASSES, width=width) for role in "PH"]
        self.pair = TaskPair("random", *self.tasks)
        self.primary, self.harmful = (
            Batch(self.x[rows].to(device), y[rows], batch) for rows in (slice(batch), slice(-batch, None))
        )
        # the functions take turns on one net, which none may change for the others
        self.optimizer = torch.optim.SGD(model.groups(), lr=0.0, momentum=0.9, nesterov=True)
        self.probe = nn.Linear(width, CLASSES).to(model.head.weight)

    def supervised(self) -> None:
        """A plain step on the same two batches."""
        of_primary, of_harmful = self.tasks
        features = self.model.training_features(self.primary.x)
        loss = of_primary.loss(self.model.head(features), self.primary.y, 0.1)
        features = self.model.training_features(self.harmful.x)
        self._update(loss + of_harmful.loss(self.probe(features), self.harmful.y))

    def step(self, method: Method) -> Callable[[], None]:
        method.setup(self.model, self.pair)
        return lambda: self._update(method.step(self.model, self.primary, self.harmful)["loss"])

    def _update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def condition_number(batch: int) -> ConditionNumber:
    """The method as it is on nets."""
    return ConditionNumber(
        lambda_P=1e-9, lambda_H=1e-9, epochs=1, batch_size=batch, precondition="none", smoothing=0.1, balance=False
    )
