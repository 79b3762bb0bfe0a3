"""What every model is to the methods: an extractor theta, a primary head omega, and a term of a Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from immunization.data.task import Task, TaskPair
from immunization.theory.preconditioning import Precondition

Regularizer = Callable[..., Tensor]
"""A scalar of features [N, D]; a second argument `theta` asks for the gradient preconditioned by cancellation."""


@dataclass(frozen=True)
class Batch:
    """Rows of one task. `root` [k, D], where given, is upper trapezoidal with the Gram matrix of `x` (full batches)."""

    x: Tensor
    y: Tensor
    rank: int
    root: Tensor | None = None


class Model(nn.Module):
    """An extractor (features [N, D]) and a head (primary logits).

    Subclasses say how the gradient of a Hessian term is preconditioned.
    """

    extractor: nn.Module
    head: nn.Module
    loaders: Callable[[int], Any] | None = None
    """Loaders of training images by role for a batch size, where the tasks' rows are not to be trained on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))

    def prepare(self, data: Any, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and the tasks as its extractor reads them; `folded`: only a map behind features is wanted.

        A linear model is itself and reads the data as they are.
        """
        return self, data

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Primary logits and, where they are a by-product, the features, which `hessian_term` takes."""
        return self(batch.x), None

    def hessian_term(
        self,
        regularizer: Regularizer,
        batch: Batch,
        mode: Precondition,
        ridge: float = 1.0,
        side: str = "input",
        features: Tensor | None = None,
    ) -> Tensor:
        """`regularizer` of the batch's features, differentiable in theta with the gradient multiplied by K^-1."""
        raise NotImplementedError

    def groups(self) -> list[Any]:
        """What the optimizer gets: the trained parameters, or groups of them."""
        return [p for p in self.parameters() if p.requires_grad]

    def for_measurement(self) -> Model:
        """The model as it is measured: in float64 where that costs little."""
        return self.double()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def name(self) -> str:
        """How results call the model."""
        return type(self).__name__.lower()

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        """The same as `factor` before immunization; a linear model's baseline is the inputs (Eq. 15)."""
        return task.root

    def factor(self, task: Task) -> Tensor:
        """A matrix with the Gram of the task's training features in at most as many rows, without a graph."""
        raise NotImplementedError

    def export(self) -> dict[str, Tensor]:
        """The tensors of immunized.safetensors."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}

    def metadata(self) -> dict[str, str]:
        """The header of immunized.safetensors."""
        return {}

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Outputs [N, C] of the primary head on any number of inputs, without a graph."""
        return self(x)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Features [N, D] of inputs, without a graph."""
        return self.extractor(x)
