"""What every model is to methods, measures and attacks: an extractor theta and a primary head omega."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from immunization.data.images import ImagePair, ImageSplit, ImageTask
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.models.chain import Chain, Network
from immunization.theory import spectrum
from immunization.theory.regularizers import Precondition

Regularizer = Callable[..., Tensor]
"""A scalar of features [N, D]; a second argument `theta` asks for the gradient preconditioned by cancellation."""


@dataclass(frozen=True)
class Batch:
    """Rows of one task, `first` in a pass; `root` [k, D] (full batches): upper trapezoidal with the Gram of `x`.

    Of J jobs side by side, `x`, `y` and `root` have a leading dimension J.
    """

    x: Tensor
    y: Tensor
    rank: int
    root: Tensor | None = None
    first: bool = False


class Model(nn.Module):
    """An extractor (features [N, D]) and a head (primary logits).

    The defaults hold for any extractor of rows [N, D_in]. Its baseline, the features before immunization, are the rows
    as they are (Eq. 15). A subclass sets `extractor` and `head`, and overrides what differs.
    """

    extractor: nn.Module
    head: nn.Linear
    deep = False
    """Whether it is a net that came with its own primary head; it then has the methods that are only declared here."""
    preconditioned = False  # whether `hessian_term` can multiply gradients by K^-1, K = X^T X of the extractor's inputs
    before: Model | None = None  # the model that is the baseline, where that is another one
    fixed: str | None = None  # why its weights cannot be changed, of what was deployed
    unlike: str | None = None  # what tells that `before` may be another net
    loaders: Callable[[int], Mapping[str, Iterable[tuple]]] | None = None
    """Loaders of training inputs by role for a batch size, where the tasks' rows are not to be trained on."""

    network: Callable[..., Network]
    """(start=None): a copy of the net: as it is, or as it was when its extractor's state dict was `start`."""
    image_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]]
    """(role, split, rows=None): images [n, C, H, W] of rows of a split (None: of all) for `network`, and labels [n]."""
    images_of: Callable[[ImageTask, ImageSplit], Iterator[tuple[Tensor, Tensor]]]
    """Images [n, C, H, W] of a task of no pair, as `network` reads them, and labels [n] as its files count."""
    enlarged: Callable[[str, Split], Tensor]
    """What the extractor reads of the images of a role's training split at twice the size: [N, ...]."""
    deployed: Callable[[], nn.Module]
    """A copy of the net as people run it: images -> primary logits."""
    deployed_before: Callable[..., nn.Module | None]
    """(start=None): `deployed` before immunization, with `start` as the extractor's weights where no net is kept."""
    doubt: str = ""
    """What is to be said before any of its layers are trained."""
    stripped_by: str | None = None
    """The function of timm that throws a folded map away; None where none does, or there is no map."""

    @property
    def trains_layers(self) -> bool:
        """Whether layers of a net are trained: inputs of the tasks are then no rows of a matrix."""
        return isinstance(self.extractor, Chain)

    def read(self, data: TaskPair | ImagePair, folded: bool) -> tuple[Model, TaskPair]:
        """The model to train and the tasks as its extractor reads them; `folded`: with a map behind features only."""
        return self, data

    def check_fold(self) -> None:
        """Raise ConfigError where no linear map can stand behind the features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))

    def training_features(self, x: Tensor, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        """Features [N, D] with a graph; `theta`: with these in the place of the extractor's parameters."""
        return self.extractor(x) if theta is None else functional_call(self.extractor, dict(theta), (x,))

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Primary logits and, where they are a by-product, the features, which `hessian_term` takes."""
        features = self.training_features(batch.x)
        return self.head(features), features

    def hessian_term(
        self,
        regularizer: Regularizer,
        batch: Batch,
        mode: Precondition = "none",
        ridge: float = 1.0,
        side: str = "input",
        features: Tensor | None = None,
    ) -> Tensor:
        """`regularizer` of the batch's features, differentiable in theta with the gradient multiplied by K^-1."""
        if mode != "none":
            raise ConfigError(f"method.precondition={mode} needs model=linear: {self.name} has no matrix K; use none")
        return regularizer(self.training_features(batch.x) if features is None else features)

    @property
    def chain(self) -> Chain:
        """The extractor of a deep model, whose blocks can be watched."""
        return cast(Chain, self.extractor)

    def groups(self) -> list[nn.Parameter] | list[dict[str, Any]]:
        """What the optimizer gets: the trained parameters, or groups of them."""
        return [p for p in self.parameters() if p.requires_grad]

    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters of the extractor, by name."""
        return {name: p for name, p in self.extractor.named_parameters() if p.requires_grad}

    def linear_map(self) -> nn.Parameter | None:
        """theta [D_in, D], where it is a parameter and the features are X theta; None for any other extractor."""
        return None

    def set_head(self, weight: Tensor) -> None:
        """Take `weight` [outputs, D] as the primary head."""
        self.head.weight.data.copy_(weight)

    def for_measurement(self) -> Model:
        """The model as it is measured: in float64 where that costs little."""
        return self.double()

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Features [N, D] of inputs, without a graph."""
        return self.extractor(x)

    def feature_batches(self, x: Tensor) -> Iterator[Tensor]:
        """Features batch by batch, where they are too many at once."""
        yield self.features(x)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Outputs [N, C] of the primary head on any number of inputs, without a graph."""
        return self(x)

    def factor(self, task: Task) -> Tensor:
        """A matrix with the Gram of the task's training features in at most as many rows, without a graph."""
        return spectrum.triangular_factor(self.feature_batches(task.train.x))[0]

    def baseline_factor(self, role: str, task: Task) -> Tensor:
        """`factor` before immunization."""
        return task.root

    def baseline_features(self, role: str, split: str) -> Tensor | None:
        """Features [N, D] of a split before immunization; None where they are the inputs as they are (Eq. 15)."""
        return None

    def baseline_logits(self, task: Task) -> Tensor | None:
        """Outputs [N, C] of the model's own primary head on the test split, before; None where it came without one."""
        return None

    def last_map(self, extractor: nn.Module) -> Tensor | None:
        """theta [D_in, D] that `extractor`, a copy of this model's, applies last: an attacker can invert it."""
        return None

    def kept(self, enlarged: bool = False) -> Tensor | None:
        """What the extractor of a net reads of images to keep, without labels: [N, ...]; None where there are none.

        `enlarged`: at twice the size.
        """
        return None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def name(self) -> str:
        """How results call the model."""
        return type(self).__name__.lower()

    def export(self) -> dict[str, Tensor]:
        """The tensors of immunized.safetensors; `load` makes a map of `theta` [D_in, D] and, if there, `bias` [D]."""
        return self.state_dict()

    def original(self) -> dict[str, Tensor]:
        """Of an untrained net, the tensors of `export` that training may change, or those of its baseline.

        {} where the baseline follows from what `export` gives: it is the inputs, or the net without a folded map.
        """
        return {}

    def facts(self) -> dict[str, Any]:
        """Facts of a net that `load` needs beside its tensors; a linear map needs none."""
        return {}


def kept_of(model: nn.Module, attached: bool = False) -> dict[str, Tensor]:
    """What training may change in a model: its trained parameters, `attached` as they are, and all buffers."""
    trained = {name: p if attached else p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return trained | dict(model.named_buffers())


def load_into(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Put the tensors of `kept_of` back into a model of the same making."""
    for name, tensor in kept_of(model).items():
        tensor.copy_(kept[name])
