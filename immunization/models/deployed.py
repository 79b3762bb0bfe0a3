"""Deployed nets, which are run and never changed: quantized, TorchScript, exported programs and ONNX files.

A tensor is narrow if all that comes later depends on the inputs through it alone. Of the narrow ones between two layers
the largest is a block; the last one before the last layer holds the features.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.data.fields import MASK, unpack
from immunization.errors import ConfigError
from immunization.models.artefacts import Artefact, OnnxFile, Operation, Program, is_packed, numbers
from immunization.models.blocks import Operations

LOOKUP = re.compile("embedding|gather", re.IGNORECASE)
"""Layers that make numbers of token ids."""
SQUASHES = re.compile("softmax|sigmoid", re.IGNORECASE)
MOST_BLOCKS = 16
"""Of more, so many are read, evenly spaced."""
MISFIT = 0.5
"""Error of the head, relative to the largest output, from which on it is none."""
ROWS = (2, 1, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of batches that are tried, as some artefacts read no others than one."""


class Step(nn.Module):
    """Gives what a block gave; its `weights` [1, n] are the constants since the block before, as data."""

    def __init__(self, operations: Sequence[Operation], cost: float) -> None:
        super().__init__()
        parts = [x.flatten() for op in operations for weight in op.weights for x in numbers(weight)]
        self.weights, self.cost = nn.Parameter(torch.cat([torch.zeros(0), *parts])[None], requires_grad=False), cost

    def forward(self, value: Tensor | None, rows: float) -> Tensor | None:
        n = round(self.cost * rows / 2)
        torch.mm(torch.empty(1, n, device="meta"), torch.empty(n, 1, device="meta"))  # counted, and not computed
        return value


class Deployed(nn.Module):
    """An artefact as a net whose parameters are data: inputs -> blocks -> features -> `head`.

    `inputs` are some that it reads, the shortest text first, in batches of `rows`; `features` names the tensor that is
    taken for them. Raises ConfigError.
    """

    def __init__(self, artefact: Artefact, inputs: Sequence[Tensor], rows: int, features: str | None = None) -> None:
        super().__init__()
        self._artefact, self._one = artefact, inputs[0][0].numel()
        self._rows: int | None = rows
        operations, self.title = artefact.operations, artefact.title
        makers = {name: op for op in operations for name in op.gives}
        if artefact.end not in makers:
            raise ConfigError(
                f"{self.title} hides what it computes, so that there are no features to read: give it as it was before "
                "torch.jit.optimize_for_inference, or the nn.Module it was made from"
            )
        while SQUASHES.search(makers[artefact.end].kind):
            artefact.end = makers[artefact.end].reads[0]
        cuts, layers = narrow(artefact), [op for op in operations if op.is_layer]
        if features not in (None, *makers):
            raise ConfigError(f"features={features}: {self.title} has no such tensor; it has {', '.join(makers)}")
        first = [x[torch.arange(rows) % len(x)] for x in inputs]
        self._shortest = [x[:1] for x in inputs] if artefact.fields else []
        names = dict.fromkeys(
            [*cuts.values(), *(op.gives[0] for op in layers), artefact.end, *filter(None, [features])]
        )
        values = artefact.values(first, names)
        blocks, last = _chosen(operations, {i: n for i, n in cuts.items() if _is_readable(values[n], rows)}, values)
        self._features = features or last
        if not _is_readable(values.get(self._features, torch.zeros(0)), rows) or values[artefact.end].ndim != 2:
            raise ConfigError(
                f"{self.title} shows no features [n, D] before its last layer and logits [n, classes] behind: name the "
                f"features, audit(..., features=<name>), of {', '.join(makers)}"
            )
        self._blocks, self.steps, start = list(blocks.values()), nn.Module(), 0
        for i, name in blocks.items():
            own, start = operations[start : i + 1], i + 1
            cost = sum(_cost(op, values[op.gives[0]]) for op in own if op in layers) / rows
            self.steps.add_module(name.replace(".", "_"), Step(own, cost))
        if self._reads([torch.cat([x, x[:1]]) for x in first]):
            self._rows = None
        seen = self._values(inputs, [self._features, artefact.end])
        self.head, known = head_of(layers[-1].weights, rows_of(seen[self._features]), seen[artefact.end])
        self.fixed = (
            f"{self.title} is run as it is: no attacker trains its layers or changes its weights; its head is {known}"
        )

    def _reads(self, inputs: Sequence[Tensor]) -> bool:
        try:
            return len(self._artefact.values(inputs, [self._features])[self._features]) == len(inputs[0])
        except Exception:  # of any kind: of torch, of onnxruntime
            return False

    @torch.no_grad()
    def forward(self, *inputs: Tensor, **fields: Tensor) -> Tensor:
        inputs = inputs or tuple(fields[name] for name in self._artefact.fields)
        steps = dict(zip(self._blocks, self.steps.children(), strict=True))
        watched = [name for name, step in steps.items() if step._forward_hooks or step._forward_pre_hooks]
        Operations.counting = False  # steps say what it costs
        try:
            values = self._values(inputs, [*watched, self._features])
        except Exception as error:  # of any kind: of torch, of onnxruntime
            raise RuntimeError(f"{self.title}: {' '.join(str(error).split())}") from error
        finally:
            Operations.counting = True
        for name, step in steps.items():
            value = values[name].to(self.head.weight) if name in watched else None
            step(value, len(inputs[0]) * inputs[0][0].numel() / self._one)
        return self.head(rows_of(values[self._features]).to(self.head.weight))

    def _values(self, inputs: Sequence[Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Tensors for any number of rows, passed in batches of the size that the artefact reads."""
        size, found = self._rows or len(inputs[0]), []
        for part in zip(*(x.split(size) for x in inputs), strict=True):
            full = [x[torch.arange(size).clamp(max=len(x) - 1)] for x in part]
            if self._shortest and not self._rows:  # else some nets go another way, without a mask
                full = [torch.cat([x, own]) for x, own in zip(full, self._shortest, strict=True)]
            values = self._artefact.values(full, names)
            found.append({name: x[: len(part[0])] for name, x in values.items()})
        return {name: torch.cat([values[name] for values in found]) for name in names}


def narrow(artefact: Artefact) -> dict[int, str]:
    """Narrow tensors, by the number of the operation behind which they are.

    What depends on tokens' ids in another way than by looking up their vectors, as masks do, does not count.
    """
    carrying, used = set(artefact.sources), dict[str, int]()
    for i, op in enumerate(artefact.operations):
        if carrying.intersection(op.reads) or (op.is_layer and LOOKUP.search(op.kind)):
            carrying.update(op.gives)
        used |= dict.fromkeys(op.reads, i)
    used[artefact.end] = len(artefact.operations)
    live, found = set(artefact.sources), dict[int, str]()
    for i, op in enumerate(artefact.operations):
        live = {name for name in live | carrying.intersection(op.gives) if used.get(name, -1) > i}
        if len(live) == 1 and not live & {*found.values(), artefact.end}:
            (found[i],) = live
    return found


def _is_readable(x: Tensor, rows: int) -> bool:
    return x.is_floating_point() and x.ndim in (2, 3, 4) and len(x) == rows


def _chosen(
    operations: Sequence[Operation], cuts: Mapping[int, str], values: Mapping[str, Tensor]
) -> tuple[dict[int, str], str]:
    """Blocks, a part of `cuts`, and the features."""
    blocks, best, last, features, begun = list[int](), -1, "", "", False
    for i, op in enumerate(operations):
        if op.is_layer:
            blocks += [best] if begun and best >= 0 else []
            best, features, begun = -1, last, True
        if i in cuts:
            last = cuts[i]
            best = i if best < 0 or values[last].numel() >= values[cuts[best]].numel() else best
    even = torch.linspace(len(blocks) - 1, 0, min(len(blocks), MOST_BLOCKS)).round().int().flip(0).tolist()
    return {blocks[k]: cuts[blocks[k]] for k in even}, features


def _cost(op: Operation, output: Tensor) -> float:
    """Operations of a layer: two for each place of its output and each weight of that."""
    if LOOKUP.search(op.kind):
        return 0.0
    size = max(x.numel() for weight in op.weights for x in numbers(weight))
    return 2.0 * output.numel() * size / output.shape[1 if output.ndim == 4 else -1]


def rows_of(features: Tensor) -> Tensor:
    """Features [n, D]; of a map or tokens its mean over places, as a linear layer may stand before that, too."""
    return features.flatten(2).mean(2) if features.ndim == 4 else features.mean(1) if features.ndim == 3 else features


@torch.no_grad()
def head_of(weights: Sequence[Any], features: Tensor, logits: Tensor) -> tuple[nn.Linear, str]:
    """The last layer, features [n, D] -> logits [n, C], and how well it is known.

    Its matrix is among `weights`; the step and the zero of each row's numbers follow from these logits. Where it is
    packed, the smallest layer that gives them is taken.
    """
    x, y = features.double().cpu(), logits.double().cpu()
    found = [fitted(x, y)]
    for stored in (m for weight in weights for m in numbers(weight)):
        for matrix in (stored.flatten(1), stored.flatten(1).T) if stored.ndim > 1 else ():
            if matrix.shape == (y.shape[1], x.shape[1]):
                found.append(fitted(x, y, matrix.double()))
    head = min(found[1:] or found, key=lambda head: (head(x) - y).norm())
    error = ((head(x) - y).abs().max() / y.abs().max()).item()
    known = f"known to {error:.1g} of its largest output" if found[1:] else f"only fitted to {len(x)} rows"
    if not error < MISFIT:  # or NaN
        raise ConfigError(
            f"the layers after the features are not linear (a linear layer differs by {error:.0%}): give a net that "
            "ends in a linear layer, or name the input of its last linear layer, audit(..., features=<name>)"
        )
    return head.to(features.device, torch.float32), known


def fitted(x: Tensor, y: Tensor, matrix: Tensor | None = None) -> nn.Linear:
    """The linear layer nearest to x [n, D] -> y [n, C]; its rows are those of a matrix, scaled and shifted."""
    one, head = torch.ones_like(y), nn.Linear(x.shape[1], y.shape[1], dtype=x.dtype)
    if matrix is None:
        weight, bias = torch.linalg.lstsq(F.pad(x, (0, 1), value=1), y).solution.split([x.shape[1], 1])
        head.weight.copy_(weight.T)
    else:
        terms = torch.stack([x @ matrix.T, x.sum(1, keepdim=True) * one, one], -1).transpose(0, 1)
        step, zero, bias = torch.linalg.lstsq(terms, y.T[..., None]).solution.unbind(1)
        head.weight.copy_(step * matrix + zero)
    head.bias.copy_(bias.flatten())
    return head


def kind_of(net: object) -> str | None:
    """What a net is called that is only run; None for an ordinary module."""
    if isinstance(net, str | Path):
        return Path(net).name
    if isinstance(net, torch.jit.ScriptModule):
        return "TorchScript"
    nodes = net.graph.nodes if isinstance(net, torch.fx.GraphModule) else ()
    exported = isinstance(net, torch.export.ExportedProgram | torch.export.UnflattenedModule)
    if exported or any(isinstance(node.target, torch._ops.OpOverload) for node in nodes):
        return "an exported program"
    if not isinstance(net, nn.Module):
        return None
    own = any(is_packed(x) for x in (*net.parameters(), *net.buffers()))
    packed = own or any(hasattr(module, "_packed_params") for module in net.modules())
    return f"a quantized {type(net).__name__}" if packed else None


def deployed(net: Any, inputs: Tensor, fields: Sequence[str] = (), features: str | None = None) -> Deployed:
    """A net that is only run, or an ONNX file at a path; `inputs` are some that it reads. Raises ConfigError."""
    if isinstance(net, str | Path) and Path(net).suffix.lower() != ".onnx":
        raise ConfigError(
            f"{net}: only ONNX files, <name>.onnx, are read from a path; load other files by torch.export.load, "
            "torch.jit.load or immunization.load, and give the result"
        )
    if str(kind_of(net)).startswith("a quantized") and net.training:
        raise ConfigError(f"{kind_of(net)} is in train mode; give net.eval(), as it is deployed")
    if MASK in fields:
        inputs = inputs[inputs[:, list(fields).index(MASK)].sum(1).argsort()]  # the shortest text first
    given = list(unpack(inputs, fields).values()) if fields else [inputs]
    failed: list[Exception] = []
    for rows in ROWS:
        first = [x[torch.arange(rows) % len(x)] for x in given]
        try:
            if isinstance(net, str | Path):
                return Deployed(OnnxFile(Path(net), fields), given, rows, features)
            module = net.module() if isinstance(net, torch.export.ExportedProgram) else net
            return Deployed(Program(module, str(kind_of(net)), fields, first), given, rows, features)
        except ConfigError:
            raise
        except Exception as error:  # of any kind: the code of the net
            failed.append(error)
    told = " ".join(str(failed[0]).split())[:200]
    raise ConfigError(f"{kind_of(net)} cannot read inputs of shape {tuple(inputs.shape[1:])}: {told}") from failed[0]
