"""A linear map behind the features of a frozen net and its inverse in the head, in training."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.data.images import ImagePair, ImageSplit, ImageTask
from immunization.data.task import Task, TaskPair
from immunization.models.base import Model
from immunization.models.chain import NetParts, Network
from immunization.models.fold import LinearMap, Place, fold_into, fold_place, weight_of
from immunization.models.linear import Linear


class Folded(Linear):
    """An invertible linear map theta [D, D] behind the features of a frozen net, its inverse in the primary head.

    The inputs are the features of `base`, the baseline theta = I. Primary logits stay: omega' = theta^-1 omega.
    """

    deep = True

    def __init__(self, base: Model, parts: NetParts, pair: TaskPair) -> None:
        super().__init__(pair)
        self._base, self._parts = (base,), parts  # in a tuple: the net's parameters are not the map's
        self.head = InverseHead(self.extractor, parts.head)

    @property
    def base(self) -> Model:
        return self._base[0]

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def images(self) -> ImagePair:
        return self.base.images

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))

    def set_head(self, weight: Tensor) -> None:
        """The net keeps its own head."""

    @torch.no_grad()
    def baseline_logits(self, task: Task) -> Tensor:
        return F.linear(task.test.x, self.head.omega, self.head.bias)

    def network(self, start: Mapping[str, Tensor] | None = None) -> Network:
        if start is not None:  # the baseline has no map
            network = (self.base.before or self.base).network()
            network.trained = []
            return network
        network = self.base.network()
        network.fold(self.extractor.theta)
        return network

    def image_batches(self, role: str, split: str, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        return self.base.image_batches(role, split, rows)

    def images_of(self, task: ImageTask, split: ImageSplit) -> Iterator[tuple[Tensor, Tensor]]:
        return self.base.images_of(task, split)

    @property
    def stripped_by(self) -> str | None:
        return self.place.stripped_by

    @torch.no_grad()
    def deployed(self) -> nn.Module:
        net = self.base.deployed().double()
        classifier = net.get_submodule(self._parts.classifier)
        classifier.weight.copy_(self.head.weight)
        fold_into(net, self.place.name, weight_of(self.extractor.theta.detach(), self.place))
        return net

    def deployed_before(self, start: Mapping[str, Tensor] | None = None) -> nn.Module:
        return (self.base.before or self.base).deployed()

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model with the map at `place` (see `fold_into`), all in float64."""
        return self.deployed().state_dict()

    def original(self) -> dict[str, Tensor]:
        return {} if self.base.before is None else self.base.original()

    def facts(self) -> dict[str, Any]:
        own = {"fold": self.place.name, "stripped_by": self.place.stripped_by, "dtype": "float64"}
        return self.base.facts() | own

    @cached_property
    def place(self) -> Place:
        """Where the exported net has the map."""
        return fold_place(self._parts.net, self._parts.config["input_size"])


class InverseHead(nn.Module):
    """z -> omega^T theta^-1 z + bias: undoes the map it follows, so that the net's own logits come out."""

    def __init__(self, extractor: LinearMap, head: nn.Linear) -> None:
        super().__init__()
        self._map = (extractor,)
        like = {"dtype": extractor.theta.dtype, "device": extractor.theta.device}
        self.omega = nn.Parameter(head.weight.detach().to(**like), requires_grad=False)
        bias = None if head.bias is None else nn.Parameter(head.bias.detach().to(**like), requires_grad=False)
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = head.in_features, head.out_features

    @property
    def weight(self) -> Tensor:
        """[C, D], rows omega_c^T theta^-T."""
        return torch.linalg.solve(self._map[0].theta, self.omega.T).T

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight, self.bias)
