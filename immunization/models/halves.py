"""A text net in two units: everything before its last block, whose input can be cached, and the rest."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.models.adapted import BODY, Adapted, logits_of
from immunization.models.blocks import Found
from immunization.models.named import Named

GROUPS = 4
"""Into so many, by their length, the texts of a batch are parted."""
WORTHWHILE = 0.7
"""Share of a batch's tokens, those that pad it included, that is left at most where it is parted."""


class Reached(Exception):
    """A pass has reached a block, which reads this."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Half(nn.Module):
    """The part of a net's `body` before or from its module `block` on; it holds the `modules` that run there."""

    def __init__(self, body: Named, block: nn.Module, modules: list[nn.Module]) -> None:
        super().__init__()
        self._net = (body, block)  # in a tuple: of these its parameters are those of `part` alone
        self.part = nn.ModuleList(modules)


class Before(Half):
    """Packed texts [N, K, T] -> [N, T, D + K]: what the block reads of each token, and the texts' own fields."""

    def forward(self, x: Tensor) -> Tensor:
        def stop(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            raise Reached(inputs[0])

        body, block = self._net
        hook = block.register_forward_pre_hook(stop)
        try:
            body(x)
        except Reached as reached:
            hidden = reached.hidden if reached.hidden.ndim == 3 else reached.hidden[:, None]  # of one token
            hidden = F.pad(hidden, (0, 0, 0, x.shape[2] - hidden.shape[1]))
        finally:
            hook.remove()
        return torch.cat([hidden, x.mT.to(hidden)], -1)  # float32 has every id below 2^24


class From(Half):
    """What `Before` gives -> features [N, D]: the blocks before hand on what they get.

    Texts of unlike lengths are passed in `GROUPS`, each cut to its longest, unless somebody watches what modules give.
    """

    def __init__(self, body: Named, block: nn.Module, modules: list[nn.Module], skipped: dict[nn.Module, bool]) -> None:
        super().__init__(body, block, modules)
        self._skipped = (skipped,)

    def forward(self, x: Tensor) -> Tensor:
        body, _ = self._net
        read = body.mask(x[..., x.shape[-1] - len(body.fields) :].mT)
        lengths = (read * torch.arange(1, x.shape[1] + 1, device=x.device)).amax(1)
        order = lengths.argsort()
        parts = order.tensor_split(GROUPS)
        tokens = sum(len(rows) * int(lengths[rows].max()) for rows in parts if len(rows))
        watched = any(module._forward_hooks for module in self.part.modules())
        if watched or tokens > WORTHWHILE * len(x) * int(lengths.max()):
            return self._passed(x)
        return torch.cat([self._passed(x[rows, : int(lengths[rows].max())]) for rows in parts])[order.argsort()]

    def _passed(self, x: Tensor) -> Tensor:
        body, block = self._net
        hidden, fields = x.tensor_split([x.shape[-1] - len(body.fields)], -1)

        def put(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            own = hidden[:, : inputs[0].shape[1]] if inputs[0].ndim == 3 else hidden[:, 0]
            return own.contiguous(), *inputs[1:]

        with ExitStack() as inside:
            inside.callback(block.register_forward_pre_hook(put).remove)
            for module, in_tuple in self._skipped[0].items():
                inside.enter_context(_handing_on(module, in_tuple))
            return logits_of(body(fields.mT.long()))


@contextmanager
def _handing_on(module: nn.Module, in_tuple: bool) -> Iterator[None]:
    """Inside, a module gives the first of what it gets."""
    module.forward = lambda hidden, *_, **__: (hidden,) if in_tuple else hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


@torch.no_grad()
def halves(net: Adapted, found: Found, block: str, sample: Tensor) -> list[tuple[str, nn.Module]]:
    """`Before` and `From` of the block called so, checked on a `sample` of texts; [] for a net that has no such two."""
    before, behind = _split(net.body, BODY, found, block)
    skipped: dict[nn.Module, bool] = {}

    def see(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if inputs and isinstance(first, Tensor) and first.shape == getattr(inputs[0], "shape", None):
            skipped[module] = isinstance(output, tuple)

    with ExitStack() as hooks:
        for name in {*found.before([block])} & {*found.innermost}:
            hooks.enter_context(net.get_submodule(name).register_forward_hook(see))
        expected = net.forward_features(sample)
    body, end = net.body, net.get_submodule(block)
    units = Before(body, end, before), From(body, end, behind, skipped)
    try:
        same = torch.equal(units[1](units[0](sample)), expected)
    except Exception:  # of any kind: the code of the net
        same = False
    return [(f"{block}.before", units[0]), (block, units[1])] if same else []


def _split(module: nn.Module, path: str, found: Found, block: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """The largest modules inside of one at `path` that begin before a block, and those from it on."""
    parts: tuple[list[nn.Module], list[nn.Module]] = [], []
    first = found.begin(block).begun
    for child, part in module.named_children():
        name = f"{path}{child}"
        late = [moment.begun >= first for other, moment in found.begins.items() if f"{other}.".startswith(f"{name}.")]
        if any(late) and not all(late):
            for own, more in zip(parts, _split(part, f"{name}.", found, block), strict=True):
                own += more
        else:
            parts[bool(late) and late[0]].append(part)
    return parts
