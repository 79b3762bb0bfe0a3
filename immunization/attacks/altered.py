"""Nets that an attacker alters before use: rounded, pruned, re-initialized, or with new BatchNorm statistics."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from immunization.errors import Inapplicable
from immunization.models.chain import Network, norms_of
from immunization.models.formats import GROUP, Per, round_layers

Precision = Literal[
    "float32", "bfloat16",
    "int8", "int8_per_tensor", "int8_groups",
    "int4", "int4_per_tensor", "int4_groups",
    "int3", "int3_per_tensor", "int3_groups",
]  # fmt: skip
"""Number formats of weights; integers have one scale per output, per tensor, or for each `GROUP` inputs."""
SHARED: dict[str, Per] = {"": "channel", "per_tensor": "tensor", "groups": GROUP}
Module = TypeVar("Module", bound=nn.Module)

BATCH = 64
"""Images of a batch."""


@torch.no_grad()
def rounded(module: Module, precision: Precision | None) -> Module:
    """`module` with its weights rounded in place; to integers only those of layers that multiply by them."""
    if precision is None:
        return module
    if precision.startswith("int"):
        kind, _, shared = precision.partition("_")
        return round_layers(module, int(kind[3:]), SHARED[shared])
    for parameter in module.parameters():
        parameter.copy_(parameter.to(getattr(torch, precision)))
    return module


def pruned(network: Network, part: str, share: float) -> Network:
    """`network` with this share of the weights of each layer of a part, the smallest ones, set to 0 in place."""
    for layer in (layer for module in network.part(part) for layer in module.modules()):
        for name in [name for name, weight in layer.named_parameters(recurse=False) if weight.ndim > 1]:
            weight = getattr(layer, name)
            weight.data = weight.data.contiguous()  # a folded map's is not, and prune reads a view
            prune.l1_unstructured(layer, name, share)
            prune.remove(layer, name)
    return network


@torch.no_grad()
def redrawn(network: Network, part: str = "full") -> Network:
    """`network` with every weight of a part drawn anew, in place, as its layers and then the net itself draw them.

    Raises Inapplicable for a part with weights that neither draws.
    """
    drawn = copy.deepcopy(network)
    for parameter in drawn.parameters():
        parameter.fill_(torch.nan)
    for module in drawn.modules():
        if callable(draw := getattr(module, "reset_parameters", None)):
            draw()
    if callable(draw := getattr(drawn.whole.net, "init_weights", None)):  # of timm
        draw()
    left = {parameter: name for name, parameter in drawn.named_parameters() if not torch.isfinite(parameter).all()}
    for old, new in zip(network.part(part), drawn.part(part), strict=True):
        if names := [left[parameter] for parameter in new.parameters() if parameter in left]:
            raise Inapplicable(f"no initializer is known for the weights {', '.join(names)}")
        old.load_state_dict(new.state_dict())
    return network


def renew_from(network: nn.Module, images: Tensor) -> int:
    """Give each BatchNorm the statistics of images, and say of how many.

    Raises Inapplicable for a net without BatchNorm.
    """
    if not norms_of(network):
        raise Inapplicable("the net has no BatchNorm whose statistics could be renewed")
    batches = images.tensor_split(math.ceil(len(images) / BATCH))  # none of one image, which may have no variance
    renew(network, batches)
    return len(images)


@torch.no_grad()
def renew(network: nn.Module, batches: Iterable[Tensor], forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """Give each BatchNorm the mean, over batches, of their statistics; the rest, dropout too, stays in eval mode.

    `forward` passes a batch, where `network` is only a part of what does so.
    """
    norms = cast(list[nn.BatchNorm2d], norms_of(network))
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    for batch in batches:
        (forward or network)(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
