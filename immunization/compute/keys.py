"""Cache keys: named parts, each hashed by its content.

A key has all that the value depends on: inputs (`content` of files, tensors), code (`source` of this package, `code` of
classes of anybody else's), `versions` of the libraries, and of a net (`net`) what it makes of a fixed image besides its
tensors: how a net is printed leaves out options that its forward pass reads.
"""

import ast
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn

from immunization.compute import randomness

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = {"torch": "torch", "torchvision": "torchvision", "timm": "timm", "PIL": "pillow", "numpy": "numpy"}
LIBRARIES |= {"scipy": "scipy", "sklearn": "scikit-learn", "peft": "peft", "optuna": "optuna"}
"""Those that compute, or read what is computed with: the name of their module and of what is installed."""
BLOCK, SHARE = 2**12, 2**28
"""Bytes of a block that is read of a file, and of all blocks of a set of files together."""

_read: dict[str, str] = {}  # by the state of files on the disk, what `content` made of them in this process


def key(**parts: object) -> str:
    """32 hexadecimal digits, the same for parts of the same content.

    Parts are plain values, tensors, and mappings, sequences and iterators of parts; raises TypeError for others.
    """
    digest = hashlib.sha256()
    _add(digest, parts)
    return digest.hexdigest()[:32]


def _add(digest: Any, part: object) -> None:
    if isinstance(part, Tensor | np.ndarray):
        tensor = torch.as_tensor(part).detach().cpu().contiguous()
        _add(digest, f"{tensor.dtype} {tuple(tensor.shape)}")
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(part, Mapping):
        _add(digest, [[str(name), part[name]] for name in sorted(part, key=str)])
    elif isinstance(part, Sequence | Iterator) and not isinstance(part, str):
        digest.update(b"[")
        for item in part:
            _add(digest, item)
        digest.update(b"]")
    elif part is None or isinstance(part, str | int | float | torch.dtype | torch.device):
        text = repr(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    else:
        raise TypeError(f"no key is made of a {type(part).__name__}")


def net(modules: Iterable[Callable[[Tensor], Tensor]], forward: Callable[[Tensor], Tensor], sample: Tensor) -> str:
    """The key of modules (and of nets behind bound methods) that `forward` passes inputs like the `sample` through.

    Of its classes, tensors and options, and of what it makes of an input, in the bits of this machine.
    """
    parts = [part if isinstance(part, nn.Module) else part.__self__ for part in modules]
    with randomness.isolated_rng(), torch.no_grad():
        output = forward(sample)
    return key(
        printed=[str(part) for part in parts],
        code=code(*{type(module) for part in parts for module in part.modules()}),
        tensors=[part.state_dict() for part in parts],
        output=output,
    )


def content(paths: Iterable[str | Path]) -> str:
    """The key of the bytes of files, in this order, whatever they are called.

    Each file has an equal share of 256 MiB, three blocks of 4 KiB at least. One within its share is read whole, of a
    larger one its size and so many blocks, evenly spaced from its first to its last; of one that cannot be read, why.
    """
    paths = list(paths)
    seen = hashlib.sha256()
    for path in paths:
        state: tuple[int, ...] = ()
        with suppress(OSError):
            status = os.stat(path)
            state = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        seen.update(f"{path}|{state}\n".encode())
    if (state := seen.hexdigest()) not in _read:
        blocks = max(3, SHARE // BLOCK // max(1, len(paths)))
        _read[state] = key(bytes=(_bytes(path, blocks) for path in paths))
    return _read[state]


def named(options: object, place: Callable[[Path], Path] = Path, name: str = "") -> dict[str, str]:
    """`content` of every file that a value somewhere in `options` names, or whose `place` it does, by dotted names."""
    if isinstance(options, Mapping | list | tuple):
        items = options.items() if isinstance(options, Mapping) else enumerate(options)
        inside = (named(value, place, f"{name}.{own}".lstrip(".")) for own, value in items)
        return {dotted: digest for found in inside for dotted, digest in found.items()}
    with suppress(OSError, ValueError, RuntimeError):  # text that is no path
        path = place(Path(options).expanduser()) if isinstance(options, str) else None
        if path and path.is_file():
            return {name: content([path])}
    return {}


def _bytes(path: str | Path, blocks: int) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= blocks * BLOCK:
                digest.update(file.readall())
            else:
                for i in range(blocks):
                    file.seek((size - BLOCK) * i // (blocks - 1))
                    digest.update(file.read(BLOCK))
    except OSError as error:
        return f"{error.strerror}"
    return f"{size} {digest.hexdigest()}"


def source(*folders: str) -> str:
    """The key of all code in folders of this package."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code(*objects: Any) -> tuple[str, ...]:
    """The modules that define classes or functions, and their base classes, each with the hash of its code.

    With those that they import from their own package, or from no installed one. Without comments; without this package
    (`source`) and the `LIBRARIES` (`versions`). A module without a source has another hash every time.
    """
    kinds = {base for one in objects for base in (inspect.getmro(one) if inspect.isclass(one) else [one])}
    waiting, found = {kind.__module__: kind for kind in kinds if not _known(kind.__module__)}, {}
    while waiting:
        name, kind = waiting.popitem()
        if (module := sys.modules.get(name)) is None:
            continue
        found[name], imported = _code_of(module, kind)
        for other in imported:
            if other in sys.modules and other not in found and not _known(other) and _beside(other, name):
                waiting.setdefault(other, None)
    return tuple(f"{name} {digest}" for name, digest in sorted(found.items()))


def _known(module: str) -> bool:
    """Whether a module is covered by a version."""
    return module.partition(".")[0] in (*LIBRARIES, PACKAGE.name, *sys.stdlib_module_names) and module != "__main__"


def _beside(other: str, module: str) -> bool:
    """Whether a module is of the same package as another one, or of no installed package."""
    file = getattr(sys.modules[other], "__file__", None) or ""
    installed = any(file.startswith(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))
    return other.partition(".")[0] == module.partition(".")[0] or bool(file and not installed)


def _code_of(module: ModuleType, kind: object) -> tuple[str, list[str]]:
    """The hash of the code of a module, and the names of what it imports."""
    for defined in filter(None, [module, kind]):  # a notebook has no file, its classes have their cells
        try:
            tree = ast.parse(inspect.getsource(defined))
        except (OSError, TypeError, SyntaxError):
            continue
        return hashlib.sha256(ast.unparse(tree).encode()).hexdigest(), list(_imports(tree, module))
    file = getattr(module, "__file__", None)
    known = file is not None and Path(file).is_file()
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if known else uuid4().hex, []


def _imports(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    """Names under which imports may stand, those of functions and classes of a module among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            with suppress(ImportError, ValueError):  # a relative name outside of a package, which Python refused, too
                name = resolve_name(name, getattr(module, "__package__", None) or None)
            yield from (name, *(f"{name}.{alias.name}" for alias in node.names))


def versions() -> tuple[str, ...]:
    """The libraries that compute, with their versions."""
    return tuple(f"{name} {version_of(name)}" for name in LIBRARIES.values())


@cache
def version_of(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
