"""A GPU that is not there, so that what would fail or wait on one is seen on any machine.

    with pretended_gpu() as seen:
        immunization.run(["device=cuda"])
    assert seen["waits"] < 10

Inside, `cuda` is a device: its tensors lie in the memory of the CPU, are computed with on the CPU, and therefore give
the CPU's numbers, but every operation that would mix devices raises what CUDA raises, and every one that makes Python
wait for the GPU is counted. It cannot show speed, other rounding, or errors of the kernels themselves.

How: a tensor on the pretended GPU is a `GpuTensor`, a wrapper without data of its own around a CPU tensor. To C++ it is
on "meta", the one device besides the CPU whose autograd needs no driver; to Python it says cuda:0. Two modes of torch
stand between: `_Calls` sees calls of Python and turns the device "cuda" into "meta"; `_Operations` sees the operations
of ATen below autograd, backward ones too, checks their devices, and runs them on the wrapped tensors.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, META, AUTOCAST = torch.device("cuda", 0), torch.device("meta"), torch.autocast
COPIES, INDEXED = {"copy_", "_to_copy"}, {"index", "index_put", "index_put_", "_index_put_impl_"}
MIX = {"fill_", "masked_fill", "masked_fill_", "where"}
"""What takes CPU tensors without dimensions beside GPU tensors, as all pointwise operations and lists of them do."""
FLOATING = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addr"}  # of which CUDA has no integer ones
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount", "linalg_pinv"}
WAITS |= {"_linalg_check_errors", "_linalg_eigh", "_linalg_svd"}
"""What gives a number, a size that depends on numbers, or the flag of a decomposition: Python waits for the GPU."""
LOW = {torch.conv2d, torch._C._nn.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm}
"""What autocast computes in low precision; its other rules are left out."""


class GpuTensor(Tensor):
    """`held`, a tensor on the CPU, as it would be on a GPU."""

    device = property(lambda self: CUDA)
    is_cuda, is_meta = property(lambda self: True), property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.shape, device=META, **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Outside of `pretended_gpu` there is no GPU, but tensors that outlive it still work."""
        return _run(func, args, kwargs or {}, Counter(), None)

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")

    __array__ = numpy

    def tolist(self) -> list:
        return self.cpu().tolist()

    def __repr__(self, **_) -> str:
        return f"{self.held!r} on {CUDA}"

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.held.__reduce_ex__(protocol)  # what is read again with map_location="cpu"

    def __deepcopy__(self, memo: dict) -> GpuTensor:
        return memo.setdefault(id(self), _like(self, self.held.clone()))


def _like(given: Tensor, held: Tensor) -> GpuTensor:
    made = GpuTensor(held).requires_grad_(given.requires_grad)
    made._is_param = isinstance(given, torch.nn.Parameter)
    return made


def _tensors(*trees: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def _check(func, name: str, args: tuple, kwargs: dict, written: list[Tensor]) -> None:
    """Raise where CUDA would refuse an operation on these tensors, of which one at least is on the GPU."""
    tensors = _tensors(args, kwargs)
    if name in INDEXED:
        if not isinstance(args[0], GpuTensor) and any(isinstance(index, GpuTensor) for index in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        tensors = [args[0], *args[2:3]]  # indices on the CPU are moved by CUDA itself
    others = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
    lists = name.startswith(("_foreach", "_fused"))
    mixes = torch.Tag.pointwise in func.tags or name in MIX | INDEXED or lists
    mixes = mixes and (name != "where" or isinstance(args[0], GpuTensor))
    own = not lists and not all(isinstance(one, GpuTensor) for one in written)
    if own or (others and not (mixes and all(tensor.dim() == 0 for tensor in others))):
        said = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        raise RuntimeError(f"{said} ({func}; on the cpu: {', '.join(str(tuple(x.shape)) for x in others)})")
    if name in FLOATING and not all(tensor.is_floating_point() for tensor in tensors):
        raise RuntimeError(f'"{name}_cuda" not implemented for {tensors[0].dtype}')


def _count(name: str, args: tuple, kwargs: dict, onto: bool, seen: Counter) -> None:
    """Add to `to_cpu`, `to_gpu` (copies), `waits` and `waits: <operation>`."""
    waits = name in WAITS
    if name in COPIES:
        into = isinstance(args[0], GpuTensor) if name == "copy_" else onto
        if isinstance(args[name == "copy_"], GpuTensor) != into:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2]))
            name = "to_gpu" if into else "to_cpu"
            seen[name] += 1
    elif name in INDEXED:  # a mask is made indices by nonzero; indices on the CPU are copied
        waits = any(i is not None and (i.dtype == torch.bool or not isinstance(i, GpuTensor)) for i in args[1])
    if waits:
        seen.update(["waits", f"waits: {name}"])


def _run(func, args: tuple, kwargs: dict, seen: Counter, generator: torch.Generator | None) -> object:
    """An operation where its tensors are, or where it is told to make one."""
    device, tensors = kwargs.get("device"), _tensors(args, kwargs)
    met = any(isinstance(tensor, GpuTensor) for tensor in tensors)
    onto = met if device is None else torch.device(device).type == "meta"
    if not (met or onto):
        return func(*args, **kwargs)
    name, schema = func.overloadpacket.__name__, func._schema
    assert not any(one.is_meta for one in tensors), f"the pretended GPU is at fault: {func} met a tensor without data"
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    writes = [one for one in schema.arguments if one.alias_info and one.alias_info.is_write and one.name in named]
    if met and name not in COPIES:
        _check(func, name, args, kwargs, _tensors([named[one.name] for one in writes]))
    if onto and named.get("generator") is not None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    _count(name, args, kwargs, onto, seen)
    kwargs = kwargs if device is None else {**kwargs, "device": "cpu"}
    args, kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, GpuTensor) else leaf, (args, kwargs))
    draws = onto and generator is not None and torch.Tag.nondeterministic_seeded in func.tags
    with _drawing(generator) if draws else contextlib.nullcontext():
        out = func(*args, **kwargs)
    written = {alias: named[one.name] for one in writes for alias in one.alias_info.before_set}
    aliases = [one.alias_info.before_set if one.alias_info else () for one in schema.returns]
    if len(aliases) > 1:
        return tuple(_outer(*pair, written, onto) for pair in zip(out, aliases, strict=True))
    return _outer(out, aliases[0] if aliases else (), written, onto)


@contextlib.contextmanager
def _drawing(generator: torch.Generator) -> Iterator[None]:
    """Inside, what draws random numbers on the CPU takes those of `generator`."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    yield
    generator.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(before)


def _outer(value: object, aliases: object, written: dict[str, Tensor], onto: bool) -> object:
    """What an operation gave, as a tensor of the GPU; what it wrote into is returned as it was given."""
    for given in (written[alias] for alias in aliases if alias in written):
        if isinstance(given, GpuTensor) and (given.shape, given.stride()) != (given.held.shape, given.held.stride()):
            Tensor.data.__set__(given, GpuTensor(given.held))  # squeeze_ and the like, and out=
        return given
    if isinstance(value, list | tuple):
        return type(value)(_outer(one, (), written, onto) for one in value)
    return GpuTensor(value) if isinstance(value, Tensor) and onto else value


class _Operations(TorchDispatchMode):
    where: tuple[Counter, torch.Generator]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, *self.where)


def _meta(value: object) -> object:
    return META if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class _Calls(TorchFunctionMode):
    """Calls of Python that name a device, or that C++ would answer from a tensor on "meta" without its data."""

    low: torch.dtype | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, first = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}, args[0] if args else None
        if func == Tensor.data.__set__ and isinstance(args[1], GpuTensor):
            if isinstance(first, GpuTensor):
                func(*args)
                first.held = args[1].held
            else:  # module.to("cuda")
                torch.utils.swap_tensors(first, _like(first, args[1].held))
            return None
        if isinstance(first, GpuTensor):
            if func is Tensor.new_tensor:
                return torch.tensor(args[1], dtype=kwargs.get("dtype") or first.dtype).to(META)
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                place = args[1] if isinstance(args[1], tuple) else (args[1],)
                place = tuple(torch.tensor(i).to(META) if isinstance(i, list) else i for i in place)
                values = (v if isinstance(v, Tensor) else torch.tensor(v, dtype=first.dtype) for v in args[2:])
                args = (first, place, *values)
        if func is Tensor.cuda:
            func, args = Tensor.to, (first, META, *args[2:])
        elif func is Tensor.to:
            args = (first, *map(_meta, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _meta(kwargs["device"])
        if kwargs.get("device") == META and func in (torch.tensor, torch.as_tensor):
            made = first if isinstance(first, Tensor) else torch.tensor(first, dtype=kwargs.get("dtype"))
            return made.to(META, kwargs.get("dtype") or made.dtype)
        if self.low and func in LOW:
            args = tuple(x.to(self.low) if isinstance(x, GpuTensor) and x.dtype == torch.float32 else x for x in args)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def autocast(self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> Iterator[None]:
        """torch.autocast, which has no rules for "meta"."""
        before, self.low = self.low, dtype if enabled and device_type == "cuda" else self.low
        with AUTOCAST(device_type, dtype, enabled and device_type != "cuda"):
            yield
        self.low = before


@contextlib.contextmanager
def pretended_gpu(devices: int = 1) -> Iterator[Counter]:
    """Inside, this machine has a GPU (or says that it has several); gives what is counted, see `_count`."""
    calls, operations, kinds = _Calls(), _Operations(), [*optimizer._foreach_supported_types, GpuTensor]
    operations.where = seen, generator = Counter(), torch.Generator()
    facts = {"is_available": True, "is_initialized": True, "device_count": devices, "current_device": 0}
    facts |= {"set_device": None, "_lazy_init": None, "synchronize": None, "get_device_name": "pretended GPU"}
    facts |= {"mem_get_info": (2**33, 2**33), "get_device_properties": mock.Mock(total_memory=2**33)}
    patches = {name: lambda *_, fact=fact, **__: fact for name, fact in facts.items()}
    patches |= dict.fromkeys(["manual_seed", "manual_seed_all"], generator.manual_seed)
    patches |= {"get_rng_state_all": lambda: [generator.get_state()], "get_rng_state": lambda *_: generator.get_state()}
    patches |= {"set_rng_state": lambda state, *_: generator.set_state(state)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **patches))
        stack.enter_context(mock.patch.object(torch, "autocast", calls.autocast))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda held, *_: held))
        stack.enter_context(mock.patch.object(optimizer, "_foreach_supported_types", kinds))
        for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):  # by torch's age
            stack.enter_context(mock.patch.object(optimizer.Optimizer, name, create=True))
        stack.enter_context(operations)
        stack.enter_context(calls)
        yield seen
