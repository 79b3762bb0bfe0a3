"""What an attacker reads of a net: the output of every block, pooled in several ways."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from immunization.attacks.altered import BATCH
from immunization.attacks.blocks import block_outputs, prefix_flops
from immunization.compute.machine import room
from immunization.data.fields import mirrored as mirror
from immunization.data.task import SPLITS, Once
from immunization.models.chain import Network, reads, twice
from immunization.models.named import mask_of

CHANNELS = 512
"""Of more channels, poolings other than the average read this many orthonormal combinations, drawn at random."""

COVARIANCES = 192
"""The same for the covariance of channels."""

INSIDE, INNER = " inside", ("average", "maximum", "deviation", "2x2", "class")
"""Added to the name of a block for what the layers inside of it give, side by side, and how this is pooled."""

CHANGED = " of the changed net"
"""Added to the names of blocks of a second net, while it is passed beside the first."""

SMALL, TWICE = 128, " at twice the size"
"""Longest side of images that are also read at twice their size, and what is then added to the names of blocks."""

TILES, SIDE = " of tiles", 3
"""Added to the names of blocks that read tiles of the image, each passed alone, and how many stand side by side."""

PIECE = 2**20
"""Numbers of maps that are taken to float64 at a time: memory that is used again need not be cleared."""

NEAR = 1 / 16
"""Share of the room on a GPU that one pooling of a block may take there; others go to the CPU's memory."""

REMEMBERED = 2**29
"""Bytes of predictions that attackers keep for those who read the same."""

NUMBERS = itertools.count()
"""Of outputs that were read: a block has the number of those it was first read with."""

T = TypeVar("T")

CELLS, FINE = ("maximum", "deviation", "2x2", "class"), ("3x3", "4x4")
POOLINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "average": (("average",),),
    "rich": (("average",), CELLS),
    "fine": (("average",), CELLS, FINE),
    "second": (("average",), CELLS, ("covariance",)),
    "covariance": (("covariance",),),
}
"""Poolings that are read side by side, by name, in groups that are always read together; a block has some of them."""


class Remembered:
    """What attackers made of outputs, by what they read: the last `most` bytes of it, in the order of use."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self.most, self.held = most, 0
        self.known: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __call__(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """`compute()`, of `size` bytes, the first time."""
        if key not in self.known:
            made = compute()
            self.known[key] = made, size(made)
            self.held += self.known[key][1]
            while self.held > self.most:
                self.held -= self.known.popitem(last=False)[1][1]
            return made
        self.known.move_to_end(key)
        return self.known[key][0]


@dataclass
class Outputs:
    """The outputs of blocks for the images of a task.

    `parts` [views, N, D], by block and pooling and then by split, in float32: views are the image and, where it was
    asked for, its mirror image. Kernels of them are computed on `device`, where they need not lie. `passes`, one for
    each size of the images: operations of one image from the input up to and with a block, in the order in which blocks
    run; `renewed`: images that were passed before, for statistics. `once` keeps what attackers compute of them,
    `remembered` what they make of blocks that others read, too: those of one number in `origin` have the same outputs.
    """

    parts: dict[tuple[str, str], dict[str, Tensor]]
    passes: Sequence[Mapping[str, float]]
    renewed: Sequence[int] = (0,)
    device: torch.device | str = "cpu"
    origin: Mapping[str, int] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=Remembered, repr=False)
    once: Once = field(default_factory=Once, init=False, repr=False)

    def __post_init__(self) -> None:
        new = next(NUMBERS)
        self.origin = {block: self.origin.get(block, new) for block, _ in self.parts}

    @property
    def views(self) -> int:
        return len(next(iter(self.parts.values()))["train"])

    @property
    def blocks(self) -> list[str]:
        found = {block for block, _ in self.parts}
        return [block for flops in self.passes for block in flops if block in found]

    def of(self, blocks: Iterable[str]) -> Outputs:
        """The outputs of some blocks."""
        own = set(blocks)
        return replace(self, parts={part: x for part, x in self.parts.items() if part[0] in own})

    def columns(self, block: str, pooling: str, split: str) -> Tensor:
        """A pooling of a block, [views, N, D], on `device`; D is 0 where it has none."""
        part = self.parts.get((block, pooling))
        found = part[split] if part else next(iter(self.parts.values()))[split][..., :0]
        return found.to(self.device)

    def cost(self, blocks: Iterable[str], images: float) -> float:
        """Operations of so many images, and of those for statistics, up to the last of some blocks at each size."""
        own, total = set(blocks), 0.0
        for flops, rows in zip(self.passes, self.renewed, strict=True):
            total += (images + rows) * max((flops[name] for name in own & flops.keys()), default=0.0)
        return total

    def __or__(self, more: Outputs) -> Outputs:
        """These and those of other blocks."""
        passes, renewed = [*self.passes, *more.passes], [*self.renewed, *more.renewed]
        parts, origin = self.parts | more.parts, {**self.origin, **more.origin}
        return replace(self, parts=parts, passes=passes, renewed=renewed, origin=origin)

    def named(self, end: str) -> Outputs:
        """The same with something added to the names of blocks: `TWICE` or `TILES`."""
        parts = {(block + end, pooling): x for (block, pooling), x in self.parts.items()}
        passes = [{block + end: flops for block, flops in one.items()} for one in self.passes]
        return replace(self, parts=parts, passes=passes, origin={b + end: n for b, n in self.origin.items()})


Read = Callable[[Tensor], Mapping[tuple[str, str], Tensor]]
"""What is read of a batch of images, by block and pooling."""


@torch.no_grad()
def outputs_of(
    network: Network,
    images: Mapping[str, Tensor],
    mirrored: bool,
    renewed: int = 0,
    inside: bool = False,
    side: int = 1,
    read: Read | None = None,
) -> Outputs:
    """The outputs of every block of a net for images [N, C, H, W] by split, and for their mirror images.

    `renewed` images were passed before, for the statistics of BatchNorm. `inside`: what the layers inside of a block
    give, side by side, is one more. `side`: of how many tiles the net makes a row of an image (`in_tiles`).
    """
    network.to(memory_format=torch.channels_last)  # two thirds of the time of convolutions
    parts = gathered(read or partial(_read, network, inside, side, ()), images, mirrored)
    flops = prefix_flops(network, images["train"][len(images["train"]) // 2 :][:1])  # texts stand by their length
    if inside:
        flops |= {block + INSIDE: cost for block, cost in flops.items()}
    return Outputs(parts, [flops], [renewed], images["train"].device)


@torch.no_grad()
def outputs_of_both(
    network: Network,
    changed: Network,
    start: int,
    images: Mapping[str, Tensor],
    mirrored: bool,
    renewed: int = 0,
    inside: bool = False,
    side: int = 1,
) -> tuple[Outputs, Outputs] | None:
    """`outputs_of` of two nets with the same units before the one with index `start`, which images pass once.

    None where `changed` gives anything else for a few images than alone. `changed` is of no use afterwards: its units
    before `start` give what they read, the last of them what that of `network` gave, so that its own code runs behind
    them.
    """
    shared = [unit for _, unit in changed.units[:start]]
    begin = max((number + 1 for number, unit in enumerate(shared) if not isinstance(unit, nn.Module)), default=0)
    passed = [cast(nn.Module, unit) for unit in shared[begin:]]  # what a net does between its modules, it does itself
    inner = [part for unit in passed for part in unit.modules()]
    others = {part for _, unit in changed.units[start:] for part in cast(nn.Module, unit).modules()}
    if not passed or len(set(inner)) < len(inner) or others & set(inner):
        return None  # a module that runs twice
    same, few = set(changed.found.before([changed.units[start][0]])), images["train"][:4]
    for net in (network, changed):
        net.to(memory_format=torch.channels_last)
    read_changed = partial(_read, changed, inside, side, same)
    alone, given = read_changed(few), list[Tensor]()
    for unit in passed:
        unit.forward = lambda x: x
    passed[-1].forward = lambda _: given.pop()

    def read(batch: Tensor) -> dict[tuple[str, str], Tensor]:
        own = _read(network, inside, side, (), batch)
        return own | {(block + CHANGED, pooling): x for (block, pooling), x in read_changed(batch).items()}

    last = cast(nn.Module, network.units[start - 1][1])
    with last.register_forward_hook(lambda _, __, output: given.append(output)):
        try:
            tried = _changed(read(few))
        except Exception:  # of any kind: the code of the net
            return None
        if tried.keys() != alone.keys() or not all(torch.equal(x, alone[part]) for part, x in tried.items()):
            return None
        both = outputs_of(network, images, mirrored, renewed, inside, side, read)
    again = _changed(both.parts)
    first = replace(both, parts={part: x for part, x in both.parts.items() if not part[0].endswith(CHANGED)})
    blocks = {block for block, _ in again}
    kept = {part: x for part, x in first.parts.items() if part[0] not in blocks}
    return first, replace(first, parts=kept | again, origin={block: first.origin[block] for block, _ in kept})


def _changed(parts: Mapping[tuple[str, str], T]) -> dict[tuple[str, str], T]:
    """The parts of the changed net, by the names that its blocks have."""
    return {(name.removesuffix(CHANGED), pooling): x for (name, pooling), x in parts.items() if name.endswith(CHANGED)}


def _read(
    network: Network, inside: bool, side: int, without: Container[str], batch: Tensor
) -> dict[tuple[str, str], Tensor]:
    """What is read of a batch of images, by block, but for some, and pooling."""
    of_block = partial(poolings, side=side)
    of_layer = partial(of_block, covariance=False) if inside else None
    if (mask := mask_of(network, batch)) is not None:
        of_block = partial(of_tokens, mask)
        of_layer = of_block if inside else None
    batch = batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    columns: dict[tuple[str, str], list[Tensor]] = {}
    for name, pools in block_outputs(network, batch, of_block, of_layer, without).items():
        block, layer, _ = name.partition("/")
        for pooling in [pooling for pooling in pools if not layer or pooling in INNER]:
            columns.setdefault((block + INSIDE if layer else block, pooling), []).append(pools[pooling])
    return {part: torch.cat(x, 1) for part, x in columns.items()}


def gathered(
    read: Read,
    images: Mapping[str, Tensor],
    mirrored: bool,
    batch: int = BATCH,
) -> dict[tuple[str, str], dict[str, Tensor]]:
    """`Outputs.parts` of what is read of batches of images; what has not a row for each image is left out.

    All is written to its place: pieces kept between the large arrays of batches would break up the memory.
    """
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for split in SPLITS:
        for view, own in enumerate([images[split], mirror(images[split])][: 1 + mirrored]):
            for begin in range(0, len(own), batch):
                some = own[begin : begin + batch]
                for part, x in read(some).items():
                    if len(x) == len(some):
                        found = parts.setdefault(part, {})
                        if split not in found:
                            shape = 1 + mirrored, len(own), x.shape[1]
                            near = 4 * math.prod(shape) <= NEAR * room(x.device)
                            found[split] = torch.empty(shape, dtype=torch.float32, device=x.device if near else "cpu")
                        found[split][view, begin : begin + batch] = x
    return parts


def at_twice_the_size(network: Network, images: Tensor) -> Network | None:
    """`network`, which from now on enlarges what it reads; None for images above `SMALL` or a net of one size.

    What is small in an image fills more places of the early blocks, and pooling cuts it into finer cells.
    """
    return None if images.ndim != 4 or max(images.shape[2:]) > SMALL else _reading(twice, network, images)


def in_tiles(network: Network, images: Tensor) -> Network | None:
    """`network`, which from now on passes `SIDE` x `SIDE` overlapping tiles of half the sides; None for one size.

    No tile shows the whole of what a defense recognizes.
    """
    return None if images.ndim != 4 else _reading(cut, network, images)


def _reading(change: Callable[[Tensor], Tensor], network: Network, images: Tensor) -> Network | None:
    network.register_forward_pre_hook(lambda _network, inputs: (change(inputs[0]), *inputs[1:]))
    return network if reads(network, images) else None


def cut(images: Tensor) -> Tensor:
    """Tiles [N SIDE^2, C, H/2, W/2] of images [N, C, H, W], row by row, from one end to the other."""
    for axis in (2, 3):
        length = images.shape[axis] // 2
        images = images.unfold(axis, length, (images.shape[axis] - length) // (SIDE - 1))
    return images.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def poolings(x: Tensor, last: bool, prefix: int, covariance: bool = True, side: int = 1) -> dict[str, Tensor]:
    """[N, d] of the output of a block by the name of the pooling: of a map, of tokens, of rows.

    `last`: channels of a map come last. `prefix`: tokens before those of the image's patches. `side`: x has a row for
    each of side^2 tiles, whose maps are put side by side; other outputs are averaged.
    """
    if x.ndim == 2:
        return {"average": _averaged(x, side)}
    tokens = None
    if x.ndim == 3:
        tokens, x = x[:, :prefix], x[:, prefix:]
        length = round(x.shape[1] ** 0.5)
        x = x.transpose(1, 2).unflatten(2, (length, length) if length**2 == x.shape[1] else (x.shape[1], 1))
    elif last:
        x = x.permute(0, 3, 1, 2)
    if side > 1:
        x = x.unflatten(0, (-1, side, side)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    found = {"average": x.mean((2, 3))}
    if tokens is not None and tokens.shape[1]:
        found["class"] = _averaged(tokens[:, 0], side)
    if x.shape[2] * x.shape[3] == 1:
        return found
    if x.shape[1] > CHANNELS:
        x = _combined(x, CHANNELS)
    flat = x.flatten(2)
    found["maximum"] = flat.amax(2)
    for cells in (2, 3, 4):
        if min(x.shape[2:]) >= cells:
            found[f"{cells}x{cells}"] = F.adaptive_avg_pool2d(x, cells).flatten(1)
    most = max(1, PIECE // max(1, flat[0].numel())) if flat.device.type == "cpu" else len(flat)
    pieces = [_second_moments(part, covariance) for part in flat.split(most)]
    return found | {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _second_moments(x: Tensor, covariance: bool) -> dict[str, Tensor]:
    """Deviations of channels over places, [N, C], of x [N, C, P], and roots of covariances."""
    centered = x.to(torch.float64, copy=True)
    centered -= centered.mean(2, keepdim=True)
    found = {"deviation": torch.linalg.vector_norm(centered, dim=2) / x.shape[2] ** 0.5}
    if covariance:
        root = covariance_root(centered if x.shape[1] <= COVARIANCES else _combined(centered, COVARIANCES))
        i, j = torch.triu_indices(*root.shape[1:])
        found["covariance"] = root[:, i, j]
    return found


def of_tokens(mask: Tensor, x: Tensor, last: bool, prefix: int) -> dict[str, Tensor]:
    """[N, d] by pooling of the output [N, T, C] of a block for texts, over the tokens that `mask` [N, M] leaves.

    `class` is the first of these. The last tokens, from T on, only pad. Other outputs are read as they are, [N, d].
    """
    if x.ndim != 3 or x.shape[1] > mask.shape[1]:
        return {"average": x.flatten(1)} if x.ndim == 2 else {}
    mask = mask[:, : x.shape[1]]
    share = (mask / mask.sum(1, keepdim=True).clamp(min=1)).to(x)[..., None]
    found = {"average": (x * share).sum(1), "class": x[torch.arange(len(x)), mask.int().argmax(1)]}
    if x.shape[2] > CHANNELS:
        x = _combined(x.mT, CHANNELS).mT
    mean = (x * share).sum(1, keepdim=True)
    found["maximum"] = x.masked_fill(~mask[..., None], -torch.inf).amax(1)
    return found | {"deviation": ((x - mean).square() * share).sum(1).sqrt()}


def _averaged(x: Tensor, side: int) -> Tensor:
    """[N, d] of rows [N side^2, d]."""
    return x.unflatten(0, (-1, side**2)).mean(1) if side > 1 else x


def covariance_root(x: Tensor) -> Tensor:
    """The square root of the covariance of channels over places, [N, C, C], of x [N, C, P] of mean 0 over places.

    The root is less uneven than the covariance (Li et al., Is second-order information helpful for large-scale visual
    recognition?, ICCV 2017). Taken from the smaller one of both Gram matrices.
    """
    wide = x.shape[1] > x.shape[2]
    gram = x.transpose(1, 2) @ x if wide else x @ x.transpose(1, 2)
    values, vectors = (found.to(x) for found in torch.linalg.eigh(gram.cpu()))  # a GPU takes one after the other
    alive = values > len(values[0]) * torch.finfo(values.dtype).eps * values[:, -1:]
    powers = values.where(alive, 1.0) ** (-0.25 if wide else 0.25) * alive
    half = (x @ vectors if wide else vectors) * powers[:, None]
    return half @ half.transpose(1, 2) / x.shape[2] ** 0.5


def _combined(x: Tensor, channels: int) -> Tensor:
    return torch.einsum("cd,nc...->nd...", _mixing(x.shape[1], channels).to(x), x)


@lru_cache
def _mixing(channels: int, fewer: int) -> Tensor:
    generator = torch.Generator().manual_seed(fewer)
    return torch.linalg.qr(torch.randn(channels, fewer, generator=generator, dtype=torch.float64)).Q
