"""Nets in the number formats that people run them in: weights and activations rounded as deployment tools do.

Values stay in float32, so that every format runs on every machine; only what a format can hold is left of them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from immunization.models.fold import LinearMap

Module = TypeVar("Module", bound=nn.Module)
Per = Literal["tensor", "channel"] | int
"""What shares a scale: a whole weight, what leads to one output, or so many of an output's inputs that lie together."""


@dataclass(frozen=True)
class Format:
    """How a format rounds. `weights`, `activations`: bits of an integer, None for none; `per`: who shares a scale.

    `dtype`: every value, also between layers, is one of it. `mantissa`: bits that are left to what enters products.
    """

    weights: int | None = None
    per: Per = "channel"
    activations: int | None = None
    dtype: torch.dtype = torch.float32
    mantissa: int | None = None


FORMATS = {
    "float64": Format(dtype=torch.float64),
    "float32": Format(),
    "tf32": Format(mantissa=10),
    "float16": Format(dtype=torch.float16),
    "bfloat16": Format(dtype=torch.bfloat16),
    "int8": Format(8, activations=8),
    "int8_per_tensor": Format(8, "tensor", activations=8),
    "int8_weights": Format(8),
    "int4": Format(4),
    "int4_per_tensor": Format(4, "tensor"),
    "int4_groups": Format(4, 32),
}
"""Formats by name."""


@torch.no_grad()
def round_weights(weight: Tensor, bits: int, per: Per = "channel", axis: int = 0) -> Tensor:
    """`weight` rounded to integers times a scale: the largest size among those that share it / (2^(bits-1) - 1).

    `axis` is that of outputs. A group of `per` weights lies along the inputs of one output; the last may be smaller.
    Same shape and dtype. Zeros stay zeros.
    """
    rows = weight.movedim(axis, 0)
    flat = rows.reshape(1 if per == "tensor" else len(rows), -1)
    size = per if isinstance(per, int) else flat.shape[1]
    parts = [_to_integers(part, bits) for part in flat.split(size, 1)]
    return torch.cat(parts, 1).view(rows.shape).movedim(0, axis)


@torch.no_grad()
def round_layers(net: Module, bits: int, per: Per = "channel") -> Module:
    """`net` with the weights of its linear layers, convolutions and folded map rounded in place by `round_weights`."""
    for layer, name, axis in products(net):
        weight = getattr(layer, name)
        weight.copy_(round_weights(weight, bits, per, axis))
    return net


def _to_integers(x: Tensor, bits: int) -> Tensor:
    """Each row of x [rows, n] in symmetric integers times a scale."""
    scale = (x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round() * scale


@torch.no_grad()
def in_format(net: nn.Module, form: str | Format, images: Sequence[Tensor] = ()) -> nn.Module:
    """A copy of `net`, in eval mode, that computes as `net` does in one of `FORMATS`, and is of the same class.

    It takes and gives float32 (float64 for that format). Linear layers, convolutions and attention are rounded, and so
    is the folded map; embeddings, norms and biases only by float16 and bfloat16. Integer activations have a zero point,
    and one scale for what enters a layer: that of all `images`, batches that the net reads; without images, each call
    has its own. Raises ValueError for an unknown name.
    """
    if isinstance(form, str) and form not in FORMATS:
        raise ValueError(f"{form!r} is no number format; there are {', '.join(FORMATS)}")
    how = FORMATS[form] if isinstance(form, str) else form
    net = copy.deepcopy(net).eval()
    if how.dtype == torch.float64:
        return net.double()
    net = net.float()
    if how.dtype != torch.float32:
        return _in_half(net, how.dtype)
    layers = list(products(net))
    ranges = _ranges(net, [layer for layer, _, _ in layers], images) if how.activations else {}
    if how.weights:
        round_layers(net, how.weights, how.per)
    for layer, name, _ in layers:
        if how.mantissa:
            getattr(layer, name).copy_(cut(getattr(layer, name), how.mantissa))
            _round_inputs(layer, partial(cut, bits=how.mantissa))
        if how.activations:
            _round_inputs(layer, partial(_affine, bits=how.activations, span=ranges.get(layer)))
    return net


def products(net: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Layers that multiply by a weight, its name, and the axis of its outputs."""
    for layer in net.modules():
        if isinstance(layer, nn.modules.conv._ConvTransposeNd):
            yield layer, "weight", 1
        elif isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            yield layer, "weight", 0
        elif isinstance(layer, LinearMap):
            yield layer, "theta", 1
        elif type(layer).__name__ == "Conv1D":  # of transformers
            yield layer, "weight", 1
        elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            yield layer, "in_proj_weight", 0


def _in_half(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`net` with its weights, and what enters and leaves each of its modules, rounded to `dtype`; sums are float32."""
    to = partial(_to_dtype, dtype=dtype)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(to(tensor))
    for module in net.modules():
        _round_inputs(module, to)
        module.register_forward_hook(lambda _m, _i, output: tree_map_only(Tensor, to, output))
    return net


def _to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype) if x.is_floating_point() else x


def cut(x: Tensor, bits: int) -> Tensor:
    """float32 `x` with `bits` of its 23 of mantissa, rounded to the nearest, halves away from 0."""
    drop = 23 - bits
    return ((x.float().contiguous().view(torch.int32) + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32)


def _affine(x: Tensor, bits: int, span: Tensor | None) -> Tensor:
    """`x` in integers from 0 to 2^bits - 1 with a zero point, over `span` (least, largest) or that of `x` itself."""
    if not x.is_floating_point():
        return x
    low, high = torch.stack(x.aminmax()) if span is None else span.to(x.device)
    scale = ((high.clamp(min=0) - low.clamp(max=0)) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    zero = (-low.clamp(max=0) / scale).round()
    return ((x / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale


def _round_inputs(layer: nn.Module, to: Callable[[Tensor], Tensor]) -> None:
    """From now on every tensor that enters `layer` by position is rounded by `to`; masks come by name."""

    layer.register_forward_pre_hook(lambda _m, inputs: tree_map_only(Tensor, to, inputs))


def _ranges(net: nn.Module, layers: Iterable[nn.Module], images: Sequence[Tensor]) -> dict[nn.Module, Tensor]:
    """(least, largest) value [2] that enters each layer, over all images."""
    seen: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args:
            span = torch.stack(args[0].aminmax())
            old = seen.get(layer, span)
            seen[layer] = torch.stack([torch.minimum(old[0], span[0]), torch.maximum(old[1], span[1])])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep))
        for batch in images:
            net(batch)
    return seen
