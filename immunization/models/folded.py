"""A linear map behind the features of a net and its inverse in the head: in training, and in the exported net."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.models.linear import Linear, LinearMap

if TYPE_CHECKING:
    from immunization.models.timm import Timm

FOLD = "immunization"


class Folded(Linear):
    """An invertible linear map theta [D, D] behind the features of a frozen net, its inverse in the primary head.

    The inputs are the net's features, so every method and measure of linear models applies; the baseline theta = I is
    the net as it was. The primary logits do not depend on theta: omega' = theta^-1 omega.
    """

    def __init__(self, base: Timm, pair: TaskPair) -> None:
        super().__init__(pair)
        self.base = (base,)  # in a tuple: its parameters are not this model's
        self.head = InverseHead(self.extractor, base.head)

    @property
    def name(self) -> str:
        return self.base[0].name

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))

    def set_head(self, weight: Tensor) -> None:
        """The net keeps its own head."""

    @torch.no_grad()
    def original_logits(self, features: Tensor) -> Tensor:
        """Outputs [N, C] of the net's own head on its own features."""
        return F.linear(features, self.head.omega, self.head.bias)

    def export(self) -> dict[str, Tensor]:
        """The state dict of the timm model with the map in its pooling (see `fold_into`), all in float64."""
        base = self.base[0]
        state = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in base.export().items()
        }
        head = {"weight": self.head.weight, "bias": self.head.bias}
        state |= {f"{base.classifier}.{name}": tensor for name, tensor in head.items() if tensor is not None}
        place = fold_place(base.net, base.config["input_size"])
        state = {_moved(name, place): tensor for name, tensor in state.items()}
        state[f"{place}.{FOLD}.weight"] = self.extractor.theta.T
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def metadata(self) -> dict[str, str]:
        base = self.base[0]
        facts = json.loads(base.metadata()["immunization"])
        facts |= {"fold": fold_place(base.net, base.config["input_size"]), "dtype": "float64"}
        return {"immunization": json.dumps(facts)}


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


@torch.no_grad()
def fold_place(net: nn.Module, input_size: Sequence[int]) -> str:
    """Name of the last module that `forward_head(..., pre_logits=True)` runs, behind which a map changes the features.

    The map then belongs to what timm calls the features. Raises ConfigError for a net without such a module.
    """
    like = next(net.parameters())
    image = torch.zeros(1, *input_size).to(like)
    ran: list[tuple[str, Any]] = []
    hidden = net.forward_features(image)
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, name=name: ran.append((name, output)))
        for name, module in net.named_modules()
        if name and not any(module.children())
    ]
    features = net.forward_head(hidden, pre_logits=True)
    for hook in hooks:
        hook.remove()
    for name, output in reversed(ran):
        if isinstance(output, Tensor) and output.shape == features.shape and torch.equal(output, features):
            return name
    raise ConfigError(f"{type(net).__name__} runs no module last in forward_head; a map cannot be folded into it")


def fold_into(net: nn.Module, place: str, size: int, **like: Any) -> None:
    """Put a linear layer of `size` features, called `immunization`, behind the module at `place`."""
    module = net.get_submodule(place)
    chain = nn.Sequential()
    chain.add_module("original", module)
    chain.add_module(FOLD, nn.Linear(size, size, bias=False, **like))
    net.set_submodule(place, chain)


@torch.no_grad()
def unfold(net: nn.Module) -> None:
    """Take the map out of an exported timm model, in place, and its inverse out of the classifier."""
    place = next(name for name, _ in net.named_modules() if name.endswith(f".{FOLD}")).removesuffix(f".{FOLD}")
    chain, classifier = net.get_submodule(place), net.get_classifier()
    classifier.weight.copy_(classifier.weight @ chain.get_submodule(FOLD).weight)
    net.set_submodule(place, chain.get_submodule("original"))


def folded_map(net: nn.Module) -> Tensor | None:
    """theta [D, D] that was folded into an exported net; None where there is none."""
    layers = (module for name, module in net.named_modules() if name.endswith(f".{FOLD}"))
    layer = next(layers, None)
    return None if layer is None else layer.weight.T


def _moved(name: str, place: str) -> str:
    return name.replace(f"{place}.", f"{place}.original.", 1) if name.startswith(f"{place}.") else name
