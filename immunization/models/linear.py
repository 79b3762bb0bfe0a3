"""Linear extractors X~ = X theta: of rows, as in the paper, and of the features of a frozen net."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import checked
from immunization.data.images import ImagePair, ImageSplit, ImageTask
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.models.adapted import released
from immunization.models.base import Batch, Model, Regularizer
from immunization.models.chain import NetParts, Network
from immunization.models.fold import LinearMap, Place, fold_into, fold_place, weight_of
from immunization.models.weights import read_checkpoint
from immunization.theory.regularizers import Precondition, by_hand, preconditioned_product


def _map_of(checkpoint: str, dim: int, outputs: int) -> tuple[Tensor, Tensor]:
    """theta [dim, dim] and omega [outputs, dim] of `model.checkpoint`; raises ConfigError."""
    path, tensors, facts, _ = read_checkpoint(checkpoint)
    if "theta" not in tensors:
        if not facts.get("timm", True):
            raise ConfigError(
                f"model.checkpoint={path} holds a {facts['architecture']}, which is not a net of timm; audit it from "
                "Python, immunization.audit(immunization.load(path, net), ...)"
            )
        raise ConfigError(f"model.checkpoint={path} holds no linear map theta; a net needs model=timm model.name=...")
    if tensors["theta"].shape != (dim, dim) or "bias" in tensors:
        shape = f"{tuple(tensors['theta'].shape)}{' with a bias' if 'bias' in tensors else ''}"
        raise ConfigError(
            f"model.checkpoint={path}: theta of shape {shape} does not fit inputs of {dim} features; choose the data "
            "set and preparation it was made with"
        )
    omega = tensors.get("omega")
    return tensors["theta"], torch.zeros(outputs, dim) if omega is None or len(omega) != outputs else omega


class Linear(Model):
    """Square linear extractor theta [D, D] and a linear head without bias, by conf/model/linear.yaml.

    A `random` theta is uniform in +-1/sqrt(D), torch's default. The head starts at zero from `identity`, else standard
    normal. The baseline is the inputs, also where a `checkpoint` replaces theta.
    """

    preconditioned = True

    @checked("model/linear")
    def __init__(
        self,
        pair: TaskPair,
        init: Literal["identity", "orthogonal", "random"],
        bias: bool,
        checkpoint: str | None,
    ) -> None:
        super().__init__()
        if not isinstance(pair, TaskPair):
            nets = "digits_net" if pair.channels == 1 else "resnet18, vit_b16_clip or timm"
            raise ConfigError(f"dataset '{pair.name}' holds images; choose model={nets} for it")
        like = {"dtype": pair.primary.train.x.dtype, "device": pair.primary.train.x.device}
        d, outputs = pair.dim, pair.primary.outputs
        # drawn on the CPU, so that a seed means the same numbers on every device
        layer = nn.Linear(d, d, dtype=like["dtype"])
        theta, offset = layer.weight.data.T.contiguous(), layer.bias.data
        omega = torch.randn(outputs, d, dtype=like["dtype"])
        if init == "orthogonal":
            nn.init.orthogonal_(theta)
            offset.zero_()
        elif init == "identity":
            nn.init.eye_(theta)
            offset.zero_()
            omega.zero_()
        elif init != "random":
            raise ConfigError(f"model.init must be identity, orthogonal or random, not {init!r}")
        if checkpoint is not None:
            theta, omega = (tensor.to(theta) for tensor in _map_of(checkpoint, d, outputs))
        self.extractor = LinearMap(theta, offset if bias else None)
        self.head = nn.Linear(d, outputs, bias=False)
        self.head.weight = nn.Parameter(omega)
        self.to(**like)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear_map() is None:
            return super().forward(x)
        theta, omega = self.extractor.theta, self.head.weight
        if x.ndim > 2:
            return _stacked_logits(x, theta, omega)
        return x @ (theta @ omega.T)  # O(N D) instead of O(N D^2)

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return self(batch.x), None  # the features, O(N D^2), are not computed for them

    def hessian_term(
        self,
        regularizer: Regularizer,
        batch: Batch,
        mode: Precondition = "none",
        ridge: float = 1.0,
        side: str = "input",
        features: Tensor | None = None,
    ) -> Tensor:
        theta, bias = self.extractor.theta, self.extractor.bias
        x = batch.x if batch.root is None or bias is not None else batch.root
        if mode == "cancelled":
            return regularizer(x @ theta.detach(), theta=theta)
        features = preconditioned_product(x, theta, mode, ridge, side)
        return regularizer(features if bias is None else features + bias)

    def linear_map(self) -> nn.Parameter | None:
        return self.extractor.theta if self.extractor.bias is None else None

    def last_map(self, extractor: LinearMap) -> Tensor | None:
        return extractor.theta if extractor.bias is None else None

    @torch.no_grad()
    def factor(self, task: Task) -> Tensor:
        return self.features(task.train.x if self.linear_map() is None else task.root)

    def export(self) -> dict[str, Tensor]:
        """`theta` [D_in, D_out] (features are X @ theta), `omega` [outputs, D_out], `bias` [D_out] if there is one."""
        return self.extractor.state_dict() | {"omega": self.head.weight.detach()}


def _stacked_logits(x: Tensor, theta: Tensor, omega: Tensor) -> Tensor:
    """X theta omega^T [J, N, C] of jobs side by side, with gradients by hand: a graph costs more than its products.

    One job at a time: a product of a stack with vectors would have other last bits than each alone.
    """
    maps, heads = theta.detach(), omega.detach()
    logits = torch.stack([rows @ (a @ w.T) for rows, a, w in zip(x, maps, heads, strict=True)])

    def slopes(upstream: Tensor) -> list[Tensor]:
        back = [rows.T @ g for rows, g in zip(x, upstream, strict=True)]
        of_theta = [b @ w for b, w in zip(back, heads, strict=True)]
        return [torch.stack(of_theta), torch.stack([b.T @ a for b, a in zip(back, maps, strict=True)])]

    return by_hand(logits, slopes, theta, omega)


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
        fold_into(net, self.place.name, weight_of(self.extractor.theta.detach(), self.place), self.place.before)
        return net

    def deployed_before(self, start: Mapping[str, Tensor] | None = None) -> nn.Module:
        return (self.base.before or self.base).deployed()

    def export(self) -> dict[str, Tensor]:
        """The state dict of the net, of its own class, with the map at `place` (see `fold_into`), all in float64."""
        return released(self.deployed()).state_dict()

    def original(self) -> dict[str, Tensor]:
        return {} if self.base.before is None else self.base.original()

    def facts(self) -> dict[str, Any]:
        own = {"fold": self.place.name, "stripped_by": self.place.stripped_by, "dtype": "float64"}
        return self.base.facts() | own | ({"before": True} if self.place.before else {})

    @cached_property
    def place(self) -> Place:
        """Where the exported net has the map: inside of its last block where it can be, else before the classifier."""
        try:
            return fold_place(self._parts.net, self._parts.config["input_size"])
        except ConfigError:
            return Place(self._parts.classifier, False, "replacing the classifier", before=True)


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
