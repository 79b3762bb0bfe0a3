"""Operations, constants and tensors of an exported net, recorded in passes."""

import re
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from immunization.compute.machine import onto
from immunization.errors import ConfigError
from immunization.models.blocks import tensors_of

LAYER = re.compile("mm|linear|conv|gemm|matmul|embedding|gather|attention|transformer", re.IGNORECASE)
SAME = ("detach.default", "alias.default", "clone.default", "as_strided_.default")
"""Operations of torch that give what they read, done or not as libraries and the order of numbers in memory have it."""
OF_SHAPES = ("Shape", "Size")
"""Operations of ONNX that read no values of a tensor."""
DTYPES = {"float": "float32", "double": "float64"} | {n: n for n in ("float16", "int64", "int32", "uint8", "bool")}
"""numpy's names of ONNX's."""


class Operation(NamedTuple):
    """One on what depends on the inputs; tensors have names, `weights` are the constants that it reads, as stored."""

    kind: str
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    weights: list[Any]

    @property
    def is_layer(self) -> bool:
        """Whether it multiplies with a matrix of its own, or looks up its rows."""
        own = any(len(getattr(weight, "shape", (2, 2))) > 1 for weight in self.weights)  # what is packed has no shape
        return own and LAYER.search(self.kind) is not None


class _Pass(TorchDispatchMode):
    """Inside, `found` gets the `wanted` tensors; where `inputs` are given, `operations` all that is done with them."""

    def __init__(self, wanted: Collection[str] = (), inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.count, self.found = set(wanted), 0, dict[str, Tensor]()
        self.names = {id(x): f"input_{k}" for k, x in enumerate(inputs)}
        self.kept: list[Any] = list(inputs)  # so that no other tensor gets the id of one
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        reads = {id(x): self.names[id(x)] for x in given if id(x) in self.names and "_like" not in func.__name__}
        output = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        names = [
            f"{func.__name__.partition('.')[0].strip('_')}_{self.count}" + f"_{k}" * (k > 0) for k in range(len(made))
        ]
        if func.__name__ in SAME:
            names = list(reads.values())
        else:
            self.count += 1
            self.found |= {name: plain(x) for name, x in zip(names, made, strict=True) if name in self.wanted}
            weights = [x for x in given if isinstance(x, Tensor | torch.ScriptObject) and id(x) not in reads]
            self.operations += [Operation(func.__name__, (*reads.values(),), (*names,), weights)] * bool(reads)
        if reads:
            self.names |= zip(map(id, made), names, strict=True)
            self.kept.append(output)
        return output


class Artefact:
    """What reads `fields`, or images; `sources` are its floating-point inputs, `end` its logits."""

    title: str
    fields: Sequence[str]
    operations: list[Operation]
    sources: list[str]
    end: str

    def __deepcopy__(self, _memo: object) -> "Artefact":
        return self  # it is never changed

    def values(self, inputs: Sequence[Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Some tensors of one pass, as plain ones. Raises what the net does, and ValueError."""
        raise NotImplementedError


class Program(Artefact):
    """A module that torch runs."""

    def __init__(self, net: nn.Module, title: str, fields: Sequence[str], inputs: Sequence[Tensor]) -> None:
        self._net, self.title, self.fields = net, title, fields
        own = (x for x in (*net.parameters(), *net.buffers()) if x.is_floating_point())
        self._like = torch.zeros(0).to(next(own, torch.zeros(0)))
        self._output(inputs, _Pass())  # some operations run the first time alone
        inputs = [onto(x, self._like) for x in inputs]
        logits = self._output(inputs, traced := _Pass(inputs=inputs))
        self.operations, self._count = traced.operations, traced.count
        self.sources = [traced.names[id(x)] for x in inputs if x.is_floating_point()]
        self.end = traced.names.get(id(logits), "")

    def _output(self, inputs: Sequence[Tensor], inside: _Pass) -> Tensor | None:
        inputs = [onto(x, self._like) for x in inputs]
        named = dict(zip(self.fields, inputs, strict=True)) if any(self.fields) else {}
        unoptimized = torch.jit.optimized_execution(False)  # else the operations of a script change as it runs
        with torch.no_grad(), unoptimized, inside:
            return next(iter(tensors_of(self._net(**named) if named else self._net(*inputs))), None)

    def values(self, inputs: Sequence[Tensor], names: Collection[str]) -> dict[str, Tensor]:
        self._output(inputs, watched := _Pass(names))
        if watched.count != self._count:
            raise ValueError(f"it does {watched.count} operations for these inputs, and {self._count} for others")
        return watched.found


class OnnxFile(Artefact):
    """An ONNX file, which onnxruntime runs and nothing else does. Raises ConfigError for a file that is none."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        try:
            self._onnx, self._runtime = import_module("onnx"), import_module("onnxruntime")
            self._model = self._onnx.load(path)
        except ImportError as error:
            raise ConfigError(f"{path}: ONNX files need pip install 'immunization[onnx]'") from error
        except Exception as error:  # of protobuf, of onnx, of the file system
            raise ConfigError(f"{path} cannot be read as an ONNX file: {' '.join(str(error).split())[:200]}") from error
        graph, array = self._model.graph, self._onnx.numpy_helper.to_array
        constants = {x.name: [array(x)] for x in graph.initializer}
        own = [x.name for x in graph.input if x.name not in constants]
        self.title, self.fields, self._inputs = path.name, fields, list(fields) if any(fields) else own
        if len(own) > 1 != any(fields) or set(own) != set(self._inputs):
            told = ", ".join(fields) or "one tensor"
            raise ConfigError(f"{path.name} reads {', '.join(own)}, and the loaders give {told}: both must be the same")
        self.sources, self._sessions = [] if fields else own, dict[tuple[str, ...], Any]()
        self.end = next((x.name for x in graph.output if x.name == "logits"), graph.output[0].name)
        self._scales, self.operations = dict[str, list[np.ndarray]](), list[Operation]()
        for node in graph.node:
            names = [name for name in node.input if name]
            reads = tuple(name for name in names if name not in constants)
            weights = [x for name in names for x in constants.get(name, ())]
            weights += [array(x.t) for x in node.attribute if x.name == "value"]
            if reads and node.op_type not in OF_SHAPES:
                self.operations.append(Operation(node.op_type, reads, (*filter(None, node.output),), weights))
                if names[0] in reads and [x.dtype.itemsize for x in weights[:2]] == [
                    4,
                    1,
                ]:  # ints, their step, their zero
                    self._scales[names[0]] = weights[:2]
            else:
                constants |= dict.fromkeys(node.output, weights)

    def values(self, inputs: Sequence[Tensor], names: Collection[str]) -> dict[str, Tensor]:
        place = tuple(names)
        if place not in self._sessions:
            model, options = self._onnx.ModelProto(), self._runtime.SessionOptions()
            model.CopyFrom(self._model)
            del model.graph.output[:]
            model.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in names)
            options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
            session = self._runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            self._sessions[place] = session
        given, fed = dict(zip(self._inputs, inputs, strict=True)), self._sessions[place].get_inputs()
        arrays = {x.name: given[x.name].cpu().numpy().astype(DTYPES[x.type[7:-1]]) for x in fed}
        found = dict(zip(names, self._sessions[place].run(list(names), arrays), strict=True))
        for name in found.keys() & self._scales.keys():
            step, zero = self._scales[name]
            found[name] = (found[name].astype(np.float32) - zero) * step
        return {name: torch.from_numpy(np.asarray(x)) for name, x in found.items()}


def is_packed(x: Tensor) -> bool:
    """Whether a tensor stands for others that it holds, as those of torchao and optimum-quanto; not torch's DTensor."""
    made_of_others = hasattr(type(x), "__tensor_flatten__") and not type(x).__module__.startswith("torch.")
    return x.is_quantized or made_of_others


def plain(x: Tensor) -> Tensor:
    """A copy of a tensor as an ordinary one: neither quantized nor of a library's own layout or class."""
    if x.is_mkldnn:
        return x.to_dense()
    return x.dequantize() if is_packed(x) else x.detach().clone()


def numbers(weight: Any) -> list[Tensor]:
    """A constant as float32 tensors; NaN, which equals nothing, for what cannot be read."""
    try:
        parts = tree_leaves(weight.unpack() if isinstance(weight, torch.ScriptObject) else weight)
        parts = [
            plain(x) if isinstance(x, Tensor) else torch.tensor(x.astype("float32")) for x in parts if x is not None
        ]
        return [x.detach().float().cpu() for x in parts]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # each library packs in its own way
        return [torch.full((1,), torch.nan)]
