"""Outputs of a frozen part of a net for images, kept in memory-mapped safetensors files.

A file is named by a hash of all that its content depends on. It holds `x` [N, ...] and `labels` [N] (int64), and in its
header their checksums and the images left out.
"""

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
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from immunization.compute import randomness
from immunization.data.image_files import DARK, DEEP
from immunization.data.images import Unreadable, unreadable
from immunization.errors import DataError
from immunization.runs import files
from immunization.terminal import counted

log = logging.getLogger(__name__)


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
        for images, *_ in counted(self.loader(size), f"activations of {len(self)} inputs"):
            if len(images):
                yield self.compute(images)


def take(x: Tensor | Stream, rows: Tensor) -> Tensor:
    """Rows of a tensor, or of a stream by one pass over it."""
    if isinstance(x, Tensor):
        return x[rows.to(x.device)]
    wanted, taken, start = rows.cpu(), {}, 0
    for part in x.split(256):
        for row in wanted[(wanted >= start) & (wanted < start + len(part))].tolist():
            taken[row] = part[row - start]
        start += len(part)
    return torch.stack([taken[row] for row in wanted.tolist()])


class _Rows:
    """Rows that come batch by batch: in an unnamed file in `root`, or in memory where that is None or not writable."""

    def __init__(self, root: Path | None) -> None:
        self.root, self.file, self.parts = root, None, []
        if root is None:
            return
        try:
            self.file = tempfile.TemporaryFile(dir=root)  # noqa: SIM115, closed by __exit__
        except OSError as error:
            if error.errno in files.NO_ROOM:
                raise OSError(error.errno, error.strerror, str(root)) from error
            told = "%s: %s; activations are kept in memory, dataset.cache=<folder> keeps them on another disk"
            log.warning(told, root, error.strerror)

    def __enter__(self) -> "_Rows":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            with suppress(OSError):  # what is left in its buffer may not fit on the disk
                self.file.close()

    def add(self, batch: Tensor) -> None:
        batch = batch.detach().cpu().contiguous()
        self.parts.append(batch if self.file is None else batch[:0])
        if self.file is not None:
            try:
                self.file.write(memoryview(batch.numpy()).cast("B"))
            except OSError as error:  # of an open file, which has no name
                raise OSError(error.errno, error.strerror, str(self.root)) from error

    def all(self, count: int) -> Tensor:
        """All `count` rows [N, ...]."""
        if self.file is None:
            return torch.cat(self.parts)
        self.file.flush()
        like = self.parts[0].numpy()
        return torch.from_numpy(np.memmap(self.file, like.dtype, "r+", shape=(count, *like.shape[1:])))


def _path(root: Path, key: str) -> Path:
    return root / f"{key}.safetensors"


def _keep(root: Path, key: str, done: Activations) -> None:
    """Write the entry `key` in one step; raises OSError, which names the folder, where there is no room for it."""
    path, part = _path(root, key), root / f".{key}{files.PART}"
    try:
        part.touch()
        mode = part.stat().st_mode  # safetensors makes files that only their owner may read
        save_file({"x": done.x, "labels": done.labels}, part, {"entry": json.dumps([done.skipped, _checksums(done)])})
        part.chmod(mode)
        part.replace(path)
    except SafetensorError as error:
        raise OSError(ENOSPC, str(error), str(root)) from error
    except OSError as error:  # of another account's folder or, on Windows, of a file that is read
        log.warning("activations are not kept: %s: %s", path, error.strerror)
    finally:
        with suppress(OSError):
            part.unlink()


def _checksums(entry: Activations) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(part.numpy())) for part in (entry.x, entry.labels)]


def load(root: Path | None, key: str) -> Activations | None:
    """The entry `key`, memory-mapped; None where there is none that can be read. A damaged one is removed; both say so.

    One that another account keeps for itself is left where it is.
    """
    if root is None or not os.path.exists(path := _path(root, key)):
        return None
    try:
        with safe_open(path, framework="pt") as file:
            skipped, checksums = json.loads(file.metadata()["entry"])
            entry = Activations(
                file.get_tensor("x"), file.get_tensor("labels"), tuple(Unreadable(*image) for image in skipped)
            )
        if checksums != _checksums(entry):
            raise ValueError("wrong checksum")
        return entry
    except PermissionError as error:
        log.warning("activations in %s cannot be read (%s) and are computed again", path, error.strerror)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        log.warning("activations in %s are damaged (%s) and are computed again", path, error)
        with suppress(OSError):
            path.unlink()
    return None


@torch.no_grad()
def collect(
    loader: Iterable[tuple[Any, ...]],
    compute: Callable[[Tensor, Sequence[str]], dict[str, Tensor]],
    keys: dict[str, str],
    root: Path | None,
    title: str,
    skip: bool = False,
) -> dict[str, Activations]:
    """One pass over `loader`: what `compute` makes of the images, by name; it is told the names that are missing.

    `loader` gives images, labels, unreadable ones and perhaps kinds; `keys` has the key of each name. One of several
    processes computes, the others wait. Raises DataError for unreadable images, unless `skip`.
    """
    entries = {name: load(root, key) for name, key in keys.items()}
    if all(entries.values()):
        return entries
    with _alone(root, list(keys.values())), ExitStack() as opened:
        entries = {name: own or load(root, keys[name]) for name, own in entries.items()}
        missing = [name for name, own in entries.items() if own is None]
        if not missing:
            return entries
        rows = {name: opened.enter_context(_Rows(root)) for name in missing}
        labels, bad, kinds = [], [], Counter()
        with randomness.isolated_rng():  # or a run that finds the entries would go on with other random numbers
            for images, targets, *more in counted(loader, title):
                bad += more[0] if more else ()
                kinds.update(*more[1:])
                if len(images) and not (bad and not skip):
                    outputs = compute(images, missing)
                    labels.append(targets.cpu().long())
                    for name, kept in rows.items():
                        kept.add(outputs[name])
        if bad and not skip:
            raise unreadable(title, bad)
        if not labels:
            raise DataError(f"{title}: no image could be read{': ' + bad[0].why if bad else ''}")
        if kinds:
            among = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
            log.info("%s, all read as RGB with 8 bits; among them %s", title, among)
        if kinds[DARK] and not kinds[DEEP]:
            told = "%s, of which all %d of 16 bits are below 4096, so nearly black as they are read: save %s"
            log.warning(told, title, kinds[DARK], "them with 8 bits, or with values up to 65535")
        y = torch.cat(labels)
        for name, kept in rows.items():
            done = Activations(kept.all(len(y)), y, tuple(bad))
            if kept.file is not None:
                _keep(root, keys[name], done)
                done = load(root, keys[name]) or done
            entries[name] = done
        return entries


@contextmanager
def _alone(root: Path | None, keys: Sequence[str]) -> Iterator[None]:
    """Keep other processes that need these entries out."""
    with ExitStack() as held:
        for key in sorted(keys) if root else ():  # in one order for all: nobody waits for who waits for them
            held.enter_context(files.locked(files.lock_of(root / key), wait=True))
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
