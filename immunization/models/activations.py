"""The outputs of a frozen part of a net for images, computed once and kept in memory-mapped files.

An entry is a folder named by a hash of everything its content depends on; it holds `data.bin` (rows one after another),
`labels.bin` (int64) and `entry.json` (shape, dtype, checksums, images left out). A whole entry is renamed into place.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from immunization.compute import randomness
from immunization.data.image_loading import Unreadable, unreadable
from immunization.errors import DataError
from immunization.runs import files
from immunization.terminal import counted

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"  # what the name of an entry begins with while it is written


@dataclass(frozen=True)
class Activations:
    """`x` [N, ...] as computed, memory-mapped where it is kept on disk; `labels` [N]; `skipped` unreadable images."""

    x: Tensor
    labels: Tensor
    skipped: tuple[Unreadable, ...] = ()


class Stream:
    """Activations too many to keep: computed from the images whenever they are read, in order (`split`)."""

    def __init__(
        self, loader: Callable[[int], Iterable], compute: Callable[[Tensor], Tensor], shape: Sequence[int]
    ) -> None:
        self.loader, self.compute, self.shape = loader, compute, torch.Size(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def split(self, size: int) -> Iterator[Tensor]:
        """Batches of `size` rows, in order."""
        for images, *_ in counted(self.loader(size), f"activations of {len(self)} images"):
            if len(images):
                yield self.compute(images)


def take(x: Tensor | Stream, rows: Tensor) -> Tensor:
    """Rows of a tensor, or of a stream by one pass over it."""
    if isinstance(x, Tensor):
        return x[rows.to(x.device)]
    wanted, found, start = rows.cpu(), {}, 0
    for part in x.split(256):
        for row in wanted[(wanted >= start) & (wanted < start + len(part))].tolist():
            found[row] = part[row - start]
        start += len(part)
    return torch.stack([found[row] for row in wanted.tolist()])


class _Writer:
    """Writes one entry batch by batch; gathers it in memory with `root=None`, and where nothing may be written."""

    def __init__(self, root: Path | None, key: str) -> None:
        self.root, self.key, self.parts, self.crc, self.shape = root, key, [], 0, None
        if root is None:
            return
        try:
            self.folder = Path(tempfile.mkdtemp(dir=root, prefix=f"{UNFINISHED}{key}-"))
            self.folder.chmod(0o777 & ~_umask())  # mkdtemp's own mode keeps everybody else out
        except OSError as error:
            if error.errno in files.NO_ROOM:
                raise OSError(error.errno, error.strerror, str(root)) from error
            told = "%s: %s; activations are kept in memory, dataset.cache=<folder> keeps them on another disk"
            log.warning(told, root, error.strerror)
            self.root = None
            return
        self.file = (self.folder / "data.bin").open("wb")

    def add(self, batch: Tensor) -> None:
        batch = batch.detach().cpu().contiguous()
        if self.root is None:
            self.parts.append(batch)
            return
        data = memoryview(batch.numpy()).cast("B")
        with self._named():
            self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.shape, self.dtype = tuple(batch.shape[1:]), str(batch.dtype).removeprefix("torch.")

    def finish(self, labels: Tensor, skipped: Sequence[Unreadable]) -> Activations:
        """What was written, which is there also where it cannot be kept; raises OSError, which names the folder."""
        if self.root is None:
            return Activations(torch.cat(self.parts), labels, tuple(skipped))
        entry = {"shape": [len(labels), *self.shape], "dtype": self.dtype, "skipped": list(skipped)}
        entry |= {"crc": self.crc, "labels": zlib.crc32(labels.numpy())}
        with self._named():
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            (self.folder / "labels.bin").write_bytes(labels.numpy().tobytes())
            (self.folder / "entry.json").write_text(json.dumps(entry | {"self": _checksum(entry)}))
            done = _read(self.folder)  # mapped, and so in memory's reach under whatever name
        try:
            os.replace(self.folder, self.root / self.key)
        except OSError as error:
            self.discard()
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or load(self.root, self.key) is None:
                log.warning("activations are not kept: %s: %s", self.root / self.key, error.strerror)
        return done

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Inside, an error of the disk names the folder, which a file that is open does not."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.root)) from error

    def discard(self) -> None:
        if self.root is not None:
            with suppress(OSError):  # what is left in its buffer may not fit on the disk
                self.file.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _umask() -> int:
    """The mask of this process, which can only be read by setting it."""
    os.umask(mask := os.umask(0o077))
    return mask


def load(root: Path | None, key: str) -> Activations | None:
    """The entry `key`, memory-mapped; None where there is none that can be read. A damaged one is removed; both say so.

    One that another account keeps for itself is left where it is.
    """
    if root is None:
        return None
    folder = root / key
    try:
        return _read(folder) if folder.is_dir() else None
    except PermissionError as error:
        log.warning("activations in %s cannot be read (%s) and are computed again", folder, error.strerror)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("activations in %s are damaged (%s) and are computed again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _read(folder: Path) -> Activations:
    entry = json.loads((folder / "entry.json").read_text())
    x = _mapped(folder / "data.bin", entry["shape"], getattr(torch, entry["dtype"]))
    labels = _mapped(folder / "labels.bin", entry["shape"][:1], torch.int64)
    skipped = tuple(Unreadable(row, why) for row, why in entry["skipped"])
    expected = entry.pop("self"), entry["crc"], entry["labels"]
    if expected != (_checksum(entry), zlib.crc32(x.numpy()), zlib.crc32(labels.numpy())):
        raise ValueError("wrong checksum")
    return Activations(x, labels, skipped)


def _mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if path.stat().st_size != prod(shape) * dtype.itemsize:
        raise ValueError("wrong size")
    return torch.from_file(str(path), shared=False, size=prod(shape), dtype=dtype).view(shape)


def _checksum(entry: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


@torch.no_grad()
def collect(
    loader: Iterable[tuple[Any, ...]],
    compute: Callable[[Tensor], dict[str, Tensor]],
    keys: dict[str, str],
    root: Path | None,
    title: str,
    skip: bool = False,
) -> dict[str, Activations]:
    """One pass over `loader`: what `compute` makes of the images, by name; entries that exist are not computed.

    `loader` gives images, labels, unreadable ones and perhaps kinds; `keys` has the key of each name. One of several
    processes computes, the others wait. Raises DataError for unreadable images, unless `skip`.
    """
    found = {name: load(root, key) for name, key in keys.items()}
    if all(found.values()):
        return found
    with _alone(root, list(keys.values())):
        found = {name: entry or load(root, keys[name]) for name, entry in found.items()}
        missing = [name for name, entry in found.items() if entry is None]
        if not missing:
            return found
        writers: dict[str, _Writer] = {}
        labels, bad, kinds = [], [], Counter()
        try:
            for name in missing:
                writers[name] = _Writer(root, keys[name])
            with randomness.isolated_rng():  # or a run that finds the entries would go on with other random numbers
                for images, targets, lost, *more in counted(loader, title):
                    bad += lost
                    kinds.update(*more)
                    if len(images) and not (bad and not skip):
                        outputs = compute(images)
                        labels.append(targets)
                        for name, writer in writers.items():
                            writer.add(outputs[name])
            if bad and not skip:
                raise unreadable(title, bad)
            if not labels:
                raise DataError(f"{title}: no image can be read{': ' + bad[0].why if bad else ''}")
            if kinds:
                among = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
                log.info("%s, all read as RGB with 8 bits; among them %s", title, among)
            y = torch.cat(labels)
            return found | {name: writer.finish(y, bad) for name, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise


@contextmanager
def _alone(root: Path | None, keys: Sequence[str]) -> Iterator[None]:
    """Keep other processes that need these entries out, and remove what a killed one left of them."""
    if root is None:
        yield
        return
    with ExitStack() as held:
        for key in sorted(keys):  # in one order for all: nobody waits for who waits for them
            if held.enter_context(files.locked(files.lock_of(root / key), wait=True)):
                for left in root.glob(f"{UNFINISHED}{key}-*"):
                    shutil.rmtree(left, ignore_errors=True)
        yield


def fingerprint(parts: Sequence[Callable[[Tensor], Tensor]]) -> str:
    """A hash of the structure and all tensors of modules (and of the net behind bound methods), of published curves.

    It is the same on every machine, and so knows nothing of options that are not printed: `compute/keys.py` does.
    Whether a layer has a bias is left to the tensors' names: torch prints it of more layers from 2.12 on.
    """
    digest = hashlib.sha256()
    for part in parts:
        module = part if isinstance(part, nn.Module) else part.__self__
        digest.update(re.sub(", bias=(True|False)", "", str(module)).encode())
        for name, tensor in module.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy() if tensor.ndim else
                          str(tensor.item()).encode())  # fmt: skip
    return digest.hexdigest()


def free_space(root: Path) -> float:
    """Free space in GiB on the disk of `root`, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free / 2**30
