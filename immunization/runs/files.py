"""Atomic writing of files, strict JSON, tensors with a checksum, and locks."""

import errno
import hashlib
import io
import json
import logging
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import yaml
from torch import Tensor

from immunization.errors import BusyError, DataError

log = logging.getLogger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PART = ".part"
"""Ends the names of files that are being written; a killed process may leave one, which is then of no use."""

LONGEST_YAML = 2**20
"""Bytes of a YAML file of a run folder; ours have some thousand."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it, ten times faster
_KEY, _FACTS = "sha256", "immunization"


def write(path: Path, content: bytes | memoryview | str) -> None:
    """Write `content` to `path` as a whole, or raise OSError, which names `path`, with the old file as it was."""
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}{PART}")  # on shared disks two machines have one PID
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def sha256(path: Path) -> str | None:
    """The digest of a file in hexadecimal digits; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def read_yaml(path: Path) -> Any:
    """The plain content of a YAML file; raises DataError for what is none.

    A file cut off within a line can still be valid, so the last line must end. A file with aliases, or longer than
    LONGEST_YAML, is refused. Aliases let a short file stand for any amount of memory. No file of ours has them.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_YAML + 1)
        if len(content) > LONGEST_YAML:
            raise ValueError(f"it is longer than {LONGEST_YAML:,} bytes")
        if not content.endswith(b"\n"):
            raise ValueError("it was cut off or edited, as its last line does not end")
        loader = _LOADER(content.decode())
        try:
            root = loader.get_single_node()
            _refuse_aliases(root)
            return root and loader.construct_document(root)
        finally:
            loader.dispose()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _refuse_aliases(root: yaml.Node | None) -> None:
    """Raise ValueError where a part of a YAML document is in two places."""
    seen, left = set(), [root] if root else []
    while left:
        node = left.pop()
        if id(node) in seen:
            raise ValueError(f"line {node.start_mark.line + 1} has an anchor, and aliases are not read; write it out")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def plain(value: object) -> Any:
    """`value` with tensors and arrays as lists, non-finite numbers as None, and other objects as text."""
    if type(value) is float:  # most of them, first
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # tensors, arrays and numpy scalars
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def as_json(value: object) -> str:
    """`value`, made `plain`, as JSON that every parser reads."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """Write `value` `as_json`; raises OSError as `write` does."""
    write(path, as_json(value))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in one step, a SHA-256 of everything in it in its header; equal content, equal bytes."""
    from safetensors.torch import save

    tensors, places = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, set()
    for name, tensor in tensors.items():
        if (place := tensor.untyped_storage().data_ptr()) in places:  # tied weights, which safetensors refuses
            tensors[name] = tensor.clone()
        places.add(place)
    header, body = _split(save(tensors, dict(metadata or {})))
    header.setdefault("__metadata__", {})[_KEY] = _digest(header, body)
    text = _canonical(header)
    text += b" " * (-len(text) % 8)
    write(path, b"".join([len(text).to_bytes(8, "little"), text, body]))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; raises DataError for one that was cut off or altered."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
        tensors = load(content)
        header, body = _split(content)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    metadata = header.get("__metadata__", {})
    expected = metadata.pop(_KEY, None)
    if expected is not None and expected != _digest(header, body):
        raise DataError(f"{path} was altered or damaged: its checksum does not agree")
    return tensors, metadata


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors with `facts` of a net, plain values, in the header, if there are any, beside other `metadata`."""
    write_tensors(path, tensors, {**(metadata or {}), **({_FACTS: json.dumps(facts)} if facts else {})})


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts that `write_weights` wrote, {} for any other safetensors file; raises DataError."""
    tensors, metadata = read_tensors(path)
    try:
        facts = json.loads(metadata.get(_FACTS, "{}"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise DataError(f"{path}: the description of the net in its header is not a JSON object")
    return tensors, facts


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]


def _canonical(header: Mapping[str, Any]) -> bytes:
    """The header in one order: safetensors writes the entries of its metadata in any."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _digest(header: Mapping[str, Any], body: memoryview) -> str:
    metadata = {key: value for key, value in header.get("__metadata__", {}).items() if key != _KEY}
    digest = hashlib.sha256(_canonical({**header, "__metadata__": metadata}))
    digest.update(body)
    return digest.hexdigest()


def write_archive(path: Path, content: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values; raises TypeError for any other object."""
    archive = io.BytesIO()
    torch.save(content, archive)
    archive.seek(0)
    if objects := torch.serialization.get_unsafe_globals_in_checkpoint(archive):
        raise TypeError(f"{path.name} keeps tensors and plain values alone, not {', '.join(objects)}")
    write(path, archive.getbuffer())


def read_archive(path: Path) -> dict[str, Any]:
    """The content of a file of `write_archive`, on the CPU; raises DataError for a damaged file or any other."""
    try:
        with zipfile.ZipFile(path) as archive:
            if entry := archive.testzip():
                raise zipfile.BadZipFile(f"{entry} does not agree with its checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each part of a damaged archive fails in its own way, from BadZipFile to KeyError
        raise DataError(f"{path} is damaged or cannot be read") from error


def lock_of(path: Path) -> Path:
    """The empty file to lock for something kept at `path`. It is never deleted: waiters would hold an unlinked file."""
    return path.parent / ".locks" / path.stem


@contextmanager
def locked(path: Path, wait: bool = False, meanwhile: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """Hold the file at `path`, or do something `meanwhile` and `wait`, or raise BusyError.

    Yields False on a file system without locks, and for a file that only another account may write.
    """
    from filelock import FileLock, Timeout  # loads asyncio, which nobody needs who only reads results

    lock = FileLock(path, blocking=False, fallback_to_soft=False)  # a soft lock would outlive a killed process
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        if not wait:
            raise BusyError(
                f"{path.parent}: another process is at work in this run folder; wait for it, or choose another folder "
                "with hydra.run.dir=..."
            ) from None
        meanwhile()
        lock.acquire(blocking=True)
    except OSError as error:
        log.warning("%s cannot be locked (%s); a second process could write into the same folder", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()
