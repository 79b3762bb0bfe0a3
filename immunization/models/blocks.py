"""The blocks of a net, found by what it computes: where attackers read it, and where training can begin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

LEAST = 8
"""Of a net with fewer blocks, its classifier counted as one, the costliest are taken apart as far as they can be."""

UNREAD = 0.3
"""Largest share of the operations without an output that can be read; of the nets of timm, none has more than 0.06."""

PREFIX = 8
"""Most tokens that are looked for before those of an image's patches, where a net does not say how many there are."""

SAMPLED = 64
"""Values of an output by which another one is told to be the same."""


class Operations(TorchDispatchMode):
    """Inside, `total` counts floating-point operations as torch's FlopCounterMode does, but of nets that break it, too.

    That one follows modules by gradients, which views of weights may lack, and takes up to three times as long. Torch's
    attention has a fast path without gradients, which has no count: it is not taken inside.
    """

    counting = True
    """False while an artefact runs, which says itself what it costs."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton

        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.counts = 0.0, flop_registry

    def __enter__(self) -> Operations:
        self.fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self.fast)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, count = func(*args, **(kwargs or {})), self.counts.get(func._overloadpacket)
        if count is not None and self.counting:
            self.total += count(*args, **(kwargs or {}), out_val=output)
        return output


class Moment(NamedTuple):
    """A point of a pass: how many modules had begun before it, and which share of all operations was done."""

    begun: int
    share: float


@dataclass(frozen=True)
class Block:
    """What a module gives: a tensor with a row for each input, unlike rows for unlike inputs, at the moment `end`.

    `last`: channels come last, in maps [N, H, W, C] and tokens [N, T, C]. `prefix`: tokens before those of patches.
    `place`: which one of several tensors it is, `second`: tokens come first in it, [T, N, C]. `shortcut`: the module
    reads what another one beside it has read before.
    """

    end: Moment
    last: bool
    prefix: int
    place: int = 0
    second: bool = False
    shortcut: bool = False

    def read(self, output: object) -> Tensor | None:
        """The tensor [N, ...] in what the module gives."""
        tensors = tensors_of(output)
        x = tensors[self.place] if self.place < len(tensors) else None
        return x.transpose(0, 1) if x is not None and self.second else x


@dataclass(frozen=True)
class Found:
    """What one pass shows of a net, by names of modules.

    `blocks` are in the order in which they end. `outputs` has these and all other modules that give such a tensor,
    `begins` the moment at which each module that ran began first. `unread`: the longest part of the pass without such
    an output, as a share of all operations, from where to where; a layer that computes so much alone is none.
    """

    blocks: tuple[str, ...]
    outputs: Mapping[str, Block]
    begins: Mapping[str, Moment]
    unread: tuple[float, float] = (0.0, 0.0)

    @property
    def much_unread(self) -> bool:
        """Whether the part without outputs is more than what lies between the outputs of common nets."""
        return self.unread[1] - self.unread[0] > UNREAD

    @property
    def innermost(self) -> list[str]:
        """Blocks without another one inside."""
        return _innermost(self.blocks)

    def begin(self, name: str) -> Moment:
        """When a module first begins, or what is inside of one that is never called; else its container does."""
        inside = [moment for other, moment in self.begins.items() if f"{other}.".startswith(f"{name}.")]
        if inside or not name:
            return min(inside, default=Moment(0, 0.0))
        return self.begin(name.rpartition(".")[0])

    def before(self, names: Iterable[str]) -> list[str]:
        """Blocks that have ended before any of some modules begins."""
        first = min(map(self.begin, names), default=Moment(len(self.begins), 1.0))
        return [name for name in self.blocks if self.outputs[name].end.begun <= first.begun]


@dataclass(eq=False)
class _Call:
    """One call of a module; `trace` are some values of what it gives, None where that cannot be read.

    `place`, `second` and `shape`, [N, ...], are those of the tensor that is read, one of `options`. `read_on`: a later
    module reads it. `source`: the tensors that the module reads, by number and version.
    """

    name: str
    module: nn.Module
    begin: Moment
    end: Moment
    shape: tuple[int, ...] = ()
    place: int = 0
    second: bool = False
    shortcut: bool = False
    read_on: bool = False
    source: tuple[tuple[int, int], ...] = ()
    trace: list[float] | None = None
    options: list[_Call] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    @property
    def weighs(self) -> bool:
        return any(p.ndim > 1 for p in self.module.parameters())

    @property
    def block(self) -> bool:
        """Whether it can be one: what it gives can be read, and its module has weights."""
        return self.trace is not None and self.weighs

    def inside(self) -> Iterator[_Call]:
        for call in self.calls:
            yield call
            yield from call.inside()

    def parts(self) -> list[_Call]:
        """The largest calls inside that can be blocks; of several calls of a module the last."""
        last: dict[str, _Call] = {}
        for call in self.calls:
            for part in [call] if call.block else call.parts():
                last.pop(part.name, None)
                last[part.name] = part
        return list(last.values())

    def apart(self) -> list[_Call]:
        """Its parts and, where none of them gives what it gives (a residual sum), itself, which has no more parts."""
        parts = self.parts()
        same = any((part.shape, part.trace) == (self.shape, self.trace) for part in parts)
        return parts if same else [*parts, replace(self, calls=[])]


@torch.no_grad()
def find(net: nn.Module, forward: Callable[[Tensor], Any], inputs: Tensor, least: int = LEAST - 1) -> Found:
    """The blocks of a net, from passes of two unlike `inputs` [2, ...]; its classifier is none of its modules."""
    root = _traced(net, forward, inputs)
    if not root.parts():  # nothing of it tells inputs apart: it is dead
        root = _traced(net, forward, inputs, unlike=False)
    everything = list(root.inside())
    calls = [call for call in everything if call.trace is not None]
    last = _channels_last(calls, inputs)
    said = (getattr(module, "num_prefix_tokens", None) for module in net.modules())  # as timm's transformers do
    prefix = next((tokens for tokens in said if isinstance(tokens, int)), 0)
    outputs = {  # of several calls of a module the last
        call.name: Block(
            call.end, last[call.name], _prefix(call.shape, prefix, inputs), call.place, call.second, call.shortcut
        )
        for call in calls
    }
    begins = {call.name: call.begin for call in reversed(everything)}
    return Found(tuple(call.name for call in _blocks(root, least)), outputs, begins, _unread(everything))


def _traced(net: nn.Module, forward: Callable[[Tensor], Any], inputs: Tensor, unlike: bool = True) -> _Call:
    """The calls of one pass, below a root that stands for it; `unlike`: only unlike rows can be read.

    Of several tensors that a module gives, the first one counts that a later module reads, else the first one.
    Recurrent layers give all their outputs first, and then states. Of several modules that read the same, all but the
    costliest are shortcuts.
    """
    root = _passed(net, forward, inputs, unlike)
    doubtful = [own for call in root.inside() for own in call.options if own.second or own.place]
    lengths = {own.shape[1] for own in doubtful if own.second}
    more = next(count for count in itertools.count(4) if count not in lengths)
    same: set[tuple[str, int, bool]] = set()
    if doubtful:  # two of something else than inputs stay two
        with suppress(Exception):  # of any kind: the code of the net
            again = _passed(net, forward, inputs[torch.arange(more) % 2], unlike=False).inside()
            same = {(call.name, own.place, own.second) for call in again for own in call.options}
    for call in root.inside():
        sure = [o for o in call.options if not (o.second or o.place) or (call.name, o.place, o.second) in same]
        on = [] if isinstance(call.module, nn.RNNBase) else [own for own in sure if own.read_on]
        for own in (on or sure)[:1]:
            call.shape, call.place, call.second, call.trace = own.shape, own.place, own.second, own.trace
    _mark_shortcuts(root)
    return root


def _mark_shortcuts(call: _Call) -> None:
    """Mark, inside of a call, all but the costliest of the modules that read the same, and all that is in them."""
    beside: dict[tuple[tuple[int, int], ...], list[_Call]] = {}
    for part in call.calls:
        part.shortcut = call.shortcut
        if part.source and part.weighs:
            beside.setdefault(part.source, []).append(part)
    for parts in beside.values():
        main = max(reversed(parts), key=lambda part: part.end.share - part.begin.share)  # of equal ones the last
        for part in parts:
            part.shortcut |= part is not main
    for part in call.calls:
        _mark_shortcuts(part)


def _passed(net: nn.Module, forward: Callable[[Tensor], Any], inputs: Tensor, unlike: bool) -> _Call:
    """`_traced`, before one of the `options` of each call is chosen."""
    root = _Call("", net, Moment(0, 0.0), Moment(0, 0.0))
    stack, calls = [root], [root]
    numbers, numbered = WeakIdKeyDictionary(), itertools.count()  # ids are used again
    stored: dict[int, list[_Call]] = {}  # which of several tensors lie where
    kept: list[list[Tensor]] = []  # or others would take their places in the memory

    with Operations() as counted, ExitStack() as hooks:

        def now() -> Moment:
            return Moment(len(calls) - 1, counted.total)

        def enter(name: str, module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            source = []
            for x in (*arguments, *named.values()):
                if isinstance(x, Tensor):
                    number = numbers.setdefault(x, next(numbered))
                    source.append((number, 0 if x.is_inference() else x._version))
                    for option in stored.get(_storage(x), ()) if stored else ():
                        option.read_on = True
            call = _Call(name, module, now(), now(), source=tuple(source))
            stack[-1].calls.append(call)
            calls.append(call)
            stack.append(call)

        def leave(module: nn.Module, _inputs: object, output: object) -> None:
            while (call := stack.pop()).module is not module:
                pass  # it was left by an error that the net has caught
            call.end, tensors = now(), tensors_of(output)
            read = [found for place, x in enumerate(tensors) if (found := _read(call, place, x, inputs, unlike))]
            call.options = read
            if len(read) > 1:
                kept.append(tensors)
                for own in read:
                    stored.setdefault(_storage(tensors[own.place]), []).append(own)

        for name, module in net.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave))
        forward(inputs)
    total = counted.total or 1.0
    for call in calls:
        call.begin, call.end = (Moment(begun, done / total) for begun, done in (call.begin, call.end))
    return root


def _storage(x: Tensor) -> int:
    """Where the numbers of a tensor lie; 0 of one that has no memory of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones
        return 0


def _read(call: _Call, place: int, x: Tensor, inputs: Tensor, unlike: bool) -> _Call | None:
    """The call, read by one of the tensors that it gives; None where this one has no row for each input."""
    second = len(x) != len(inputs)
    if second and not (x.ndim == 3 and x.shape[1] == len(inputs)):
        return None
    x = x.transpose(0, 1) if second else x
    if unlike and torch.equal(x[0], x[1]):
        return None
    flat = x.reshape(-1)
    trace = flat[:: max(1, len(flat) // SAMPLED)].tolist()
    return replace(call, shape=tuple(x.shape), place=place, second=second, trace=trace)


def _unread(calls: Sequence[_Call]) -> tuple[float, float]:
    """`Found.unread`; nothing where no operation of the net is one that is counted."""
    if not any(call.end.share for call in calls):
        return 0.0, 0.0
    ends = sorted({0.0, 1.0, *(call.end.share for call in calls if call.trace is not None)})
    longest, found = 0.0, (0.0, 0.0)
    for begin, end in itertools.pairwise(ends):
        inside = (call for call in calls if not call.calls and begin <= call.begin.share and call.end.share <= end)
        left = end - begin - max((call.end.share - call.begin.share for call in inside), default=0.0)
        if left > longest:
            longest, found = left, (begin, end)
    return found


def _blocks(root: _Call, least: int) -> list[_Call]:
    """The parts of a net, Sequential ones taken apart, and while they are too few all of the costliest one's class."""
    blocks = root.parts()
    while whole := [call for call in blocks if call.parts()]:
        cut = [call for call in whole if type(call.module).forward is nn.Sequential.forward]
        if not cut:
            if len(_innermost([call.name for call in blocks])) >= least:
                break
            largest = max(whole, key=lambda call: call.end.share - call.begin.share)
            cut = [call for call in whole if type(call.module) is type(largest.module)]
        blocks = [part for call in blocks for part in (call.apart() if call in cut else [call])]
    return sorted(blocks, key=lambda call: call.end)


def _innermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _channels_last(calls: Sequence[_Call], inputs: Tensor) -> dict[str, bool]:
    """Whether channels come last in what calls give, by name.

    The sides of a map are to each other as those of the images. Where that does not tell, other maps of this class of
    modules do; else, as of tokens, whether a module ends in a convolution.
    """
    image = inputs.shape[2] / inputs.shape[3] if inputs.ndim == 4 else 1.0

    def seen(shape: tuple[int, ...]) -> bool | None:
        first, last = (abs(high - wide * image) < max(1, image) for high, wide in (shape[2:], shape[1:3]))
        return last if first != last else None

    def guessed(call: _Call) -> bool:
        convolution = nn.Conv1d if len(call.shape) == 3 else nn.Conv2d
        layers = [m for m in call.module.modules() if isinstance(m, (nn.Linear, convolution))]
        return isinstance(layers[-1], nn.Linear) if layers else len(call.shape) != 4

    maps = [(call, last) for call in calls if len(call.shape) == 4 and (last := seen(call.shape)) is not None]
    known: dict[object, bool] = {type(call.module): last for call, last in maps} | {c.name: last for c, last in maps}
    found = {}
    for call in calls:
        own = known.get(call.name, known.get(type(call.module)))
        found[call.name] = own if own is not None and len(call.shape) == 4 else guessed(call)
    return found


def _prefix(shape: Sequence[int], said: int, inputs: Tensor) -> int:
    """Tokens [N, T, C] before those of an image's patches, which fill a grid; of text, the first one stands for it."""
    if len(shape) != 3:
        return 0
    if inputs.ndim != 4:
        return int(not inputs.is_floating_point() and shape[1] > 1)
    image = inputs.shape[2] / inputs.shape[3]

    def fill(patches: int) -> bool:
        high = round(math.sqrt(max(patches, 0) * image))
        return patches > 0 and high * round(high / image) == patches

    return next((prefix for prefix in (said, *range(PREFIX + 1)) if fill(shape[1] - prefix)), 0)


def tensors_of(output: object) -> list[Tensor]:
    """The tensors of rows, tokens or maps that a module gives, also in a tuple, a list or a dict."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [x for part in output for x in tensors_of(part)]
    readable = isinstance(output, Tensor) and output.is_floating_point() and output.ndim in (2, 3, 4)
    return [output] if readable else []
