"""A linear map folded into a timm net, behind its features, with the map's inverse in the classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from immunization.errors import ConfigError

FOLD = "immunization"
"""How the map's layer is called in the net."""


@torch.no_grad()
def fold_place(net: nn.Module, input_size: Sequence[int]) -> str:
    """Name of the last module that `forward_head(..., pre_logits=True)` runs, behind which a map changes the features.

    The map then belongs to what timm calls the features. Raises ConfigError for a net without such a module.
    """
    like = next(net.parameters())
    image = torch.zeros(1, *input_size).to(like)
    ran: list[tuple[str, object]] = []
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


def fold_into(
    net: nn.Module,
    place: str,
    size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Put a linear layer of `size` features, called `immunization`, behind the module at `place`."""
    module = net.get_submodule(place)
    chain = nn.Sequential()
    chain.add_module("original", module)
    chain.add_module(FOLD, nn.Linear(size, size, bias=False, dtype=dtype, device=device))
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


def folded_name(name: str, place: str) -> str:
    """What the tensor `name` of a net is called once a map stands behind the module at `place`."""
    return name.replace(f"{place}.", f"{place}.original.", 1) if name.startswith(f"{place}.") else name
