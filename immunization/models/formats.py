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
Range = Literal["images", "mean", "call", "row"]
"""Whose extremes bound activations: all images', the means of each image's, a call's, or those of each row of it."""
Integers = Literal["symmetric", "signed", "unsigned"]
"""Integers of weights; of 8 bits from -127, from -128 (torch: the scale is max / 127.5), or from the least weight."""
GROUP = 32
"""Inputs of an output that share a scale in the formats that end in `_groups`."""
CONVOLUTIONS = (nn.modules.conv._ConvNd,)


@dataclass(frozen=True)
class Format:
    """How a format rounds. `weights`, `activations`: bits of an integer or, of weights, a float8; None for none.

    `per`: which weights share a scale; `integers`: theirs. `range`: that of activations. `mantissa`: bits that are left
    to what enters products. `convolutions` may stay as they are. `dtype`: every value, also between layers, is one.
    """

    weights: int | torch.dtype | None = None
    per: Per = "channel"
    integers: Integers = "symmetric"
    activations: int | None = None
    range: Range = "images"
    mantissa: int | None = None
    convolutions: bool = True
    dtype: torch.dtype = torch.float32


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
    "int4_groups": Format(4, GROUP),
}
"""Formats by name."""


@torch.no_grad()
def round_weights(
    weight: Tensor, bits: int | torch.dtype, per: Per = "channel", axis: int = 0, integers: Integers = "symmetric"
) -> Tensor:
    """`weight` in integers of `bits`, or in a float8, times a scale: for the largest size among those that share it.

    `axis` is that of outputs. A group of `per` weights lies along the inputs of one output; the last may be smaller.
    Zeros stay zeros, but for `unsigned` integers, which begin at the least weight. Same shape and dtype.
    """
    rows = weight.movedim(axis, 0)
    flat = rows.reshape(1 if per == "tensor" else len(rows), -1)
    size = per if isinstance(per, int) else flat.shape[1]
    parts = [_rounded(part, bits, integers) for part in flat.split(size, 1)]
    return torch.cat(parts, 1).view(rows.shape).movedim(0, axis)


@torch.no_grad()
def round_layers(net: Module, bits: int, per: Per = "channel") -> Module:
    """`net` with the weights of its linear layers, convolutions and folded map rounded in place by `round_weights`."""
    for layer, name, axis in products(net):
        weight = getattr(layer, name)
        weight.copy_(round_weights(weight, bits, per, axis))
    return net


def _rounded(x: Tensor, bits: int | torch.dtype, integers: Integers) -> Tensor:
    """Each row of x [rows, n] with a scale of its own."""
    if integers == "unsigned":
        return _between(x, bits, *x.aminmax(dim=1, keepdim=True))
    most = torch.finfo(bits).max if isinstance(bits, torch.dtype) else 2 ** (bits - 1) - 1
    scale = x.abs().amax(1, keepdim=True) / (most + 0.5 * (integers == "signed"))
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)
    if isinstance(bits, torch.dtype):
        return (x / scale).to(bits).to(x) * scale
    return (x / scale).round().clamp(max=most) * scale


def _between(x: Tensor, bits: int, low: Tensor, high: Tensor, zero: bool = False) -> Tensor:
    """`x`, cut off at `low` and `high`, in 2^bits - 1 equal steps, moved so that `zero` is among them."""
    scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    low = (low / scale).round() * scale if zero else low
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


def cut(x: Tensor, bits: int) -> Tensor:
    """float32 `x` with `bits` of its 23 of mantissa, rounded to the nearest, halves away from 0."""
    drop = 23 - bits
    return ((x.contiguous().view(torch.int32) + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32)


@torch.no_grad()
def in_format(net: nn.Module, form: str | Format, images: Sequence[Tensor] = ()) -> nn.Module:
    """A copy of `net`, in eval mode, that computes as `net` does in one of `FORMATS`, and is of the same class.

    It takes and gives float32 (float64 for that format). Linear layers, convolutions and attention are rounded, and so
    is the folded map; embeddings, norms and biases only by float16 and bfloat16. Integer activations have one scale for
    what enters a layer or a pooling: that of all `images`, batches that the net reads; without images, each call has
    its own. A hook before the others of a layer sees what is not rounded yet. Raises ValueError for an unknown name.
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
    layers = [one for one in products(net) if how.convolutions or not isinstance(one[0], CONVOLUTIONS)]
    if how.activations:
        _round_activations(net, [layer for layer, _, _ in layers], how, images)
    for layer, name, axis in layers:
        weight = getattr(layer, name)
        if how.weights:
            weight.copy_(round_weights(weight, how.weights, how.per, axis, how.integers))
        if how.mantissa:
            weight.copy_(cut(weight, how.mantissa))
            _round_inputs(layer, partial(cut, bits=how.mantissa))
    return net


def products(net: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Layers that multiply by a weight, its name, and the axis of its outputs."""
    for layer in net.modules():
        if isinstance(layer, nn.modules.conv._ConvTransposeNd) or type(layer).__name__ == "Conv1D":  # of transformers
            yield layer, "weight", 1
        elif isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            yield layer, "weight", 0
        elif isinstance(layer, LinearMap):
            yield layer, "theta", 1
        elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            yield layer, "in_proj_weight", 0


def _round_inputs(layer: nn.Module, to: Callable[[Tensor], Tensor]) -> None:
    """From now on every tensor that enters `layer` by position is rounded by `to`; masks come by name."""
    layer.register_forward_pre_hook(lambda _m, inputs: tree_map_only(Tensor, to, inputs))


def _in_half(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`net` with its weights, and what enters and leaves each of its modules, rounded to `dtype`; sums are float32."""

    def to(x: Tensor) -> Tensor:
        return x.to(dtype).to(x.dtype) if x.is_floating_point() else x

    for tensor in (*net.parameters(), *net.buffers()):
        tensor.copy_(to(tensor))
    for module in net.modules():
        _round_inputs(module, to)
        module.register_forward_hook(lambda _m, _i, output: tree_map_only(Tensor, to, output))
    return net


def _round_activations(net: nn.Module, layers: Sequence[nn.Module], how: Format, images: Sequence[Tensor]) -> None:
    """From now on activations are integers: with a range known beforehand also those that are pooled."""
    known = how.range in ("images", "mean")
    layers = [*layers, *(m for m in net.modules() if known and "Pool" in type(m).__name__)]
    ranges = _ranges(net, layers, images, how.range) if known else {}
    for layer in layers:

        def to(x: Tensor, span: tuple[Tensor, Tensor] | None = ranges.get(layer)) -> Tensor:
            low, high = span or (_extremes(x) if how.range == "row" else x.aminmax())
            return _between(x, how.activations, low.to(x).clamp(max=0), high.to(x).clamp(min=0), zero=True)

        _round_inputs(layer, to)


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value of each row of x [n, ...]: [n, 1, ...]."""
    low, high = x.flatten(1).aminmax(dim=1)
    shape = (-1, *[1] * (x.ndim - 1))
    return low.view(shape), high.view(shape)


def _ranges(
    net: nn.Module, layers: Iterable[nn.Module], images: Sequence[Tensor], kind: Range
) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """(least, largest) value that enters each layer: the extremes over all images, or the means of each image's."""
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    with ExitStack() as hooks:
        for layer, spans in seen.items():
            keep = partial(lambda spans, _m, inputs: spans.append(torch.stack(_extremes(inputs[0])).flatten(1)), spans)
            hooks.enter_context(layer.register_forward_pre_hook(keep))
        for batch in images:
            net(batch)
    ends = {layer: torch.cat(spans, 1) for layer, spans in seen.items() if spans}
    if kind == "mean":
        return {layer: (low.mean(), high.mean()) for layer, (low, high) in ends.items()}
    return {layer: (low.min(), high.max()) for layer, (low, high) in ends.items()}
