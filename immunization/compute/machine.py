"""The device of a run, its threads, and asynchronous copies to a GPU."""

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from threadpoolctl import ThreadpoolController
from torch import Tensor

from immunization.compute import distributed
from immunization.errors import ConfigError

SMALL = 256
"""Up to this many features one thread is faster than several, and a CPU, which starts no kernels, than a GPU."""


def device_of(choice: str, dim: int | None = None) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here; raises ConfigError for a GPU that is not there.

    `auto` is a GPU where there is one, but the CPU for a linear model of up to `SMALL` features `dim` (None: a net).
    If there are several GPUs, a process of torchrun has that of its rank, and the jobs of a multirun take turns.
    """
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=auto or device=cpu")
    small = choice == "auto" and dim is not None and dim <= SMALL
    if choice == "cpu" or small or not torch.cuda.is_available():
        return torch.device("cpu")
    if distributed.size() > 1:
        return distributed.own_gpu()
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    job = hydra.job.num if hydra is not None and hydra.mode == RunMode.MULTIRUN else 0
    return torch.device("cuda", job % torch.cuda.device_count())


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16, or, as a CPU of older kind, emulates it, which is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, a GPU computes float32 in float32: errors of TF32, cuDNN's default, exceed the rank tolerance."""
    kinds, name, exact = (torch.backends.cudnn, torch.backends.cuda.matmul), "allow_tf32", False
    try:
        before = [getattr(kind, name) for kind in kinds]
    except RuntimeError:  # the process uses torch's newer names, which must not be mixed with the older ones
        kinds = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
        name, exact = "fp32_precision", "ieee"
        before = [getattr(kind, name) for kind in kinds]
    for kind in kinds:
        setattr(kind, name, exact)
    try:
        yield
    finally:
        for kind, value in zip(kinds, before, strict=True):
            setattr(kind, name, value)


@contextmanager
def gpu_memory(purpose: str, remedy: str) -> Iterator[None]:
    """Inside, a GPU whose memory is used up is a ConfigError that says for what and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the GPU has no memory for {purpose}; {remedy}") from error


def memory(device: torch.device) -> float:
    """Bytes of memory of a device, used or not; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return math.inf


def check_room(size: float) -> None:
    """Raise ValueError for data of `size` bytes that take more than half of the memory, as work needs a copy."""
    if 2 * size > (most := memory(torch.device("cpu"))):
        raise ValueError(f"it takes {size / 2**30:.3g} GiB of memory, and half of {most / 2**30:.3g} is free for it")


def cores() -> int:
    """Processor cores that this process may use: its share of those of its machine, where torchrun started several."""
    from joblib import cpu_count  # knows what a container may use

    return max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def set_threads(number: int) -> None:
    """`number` threads of torch, and one of the BLAS that numpy and scipy bring.

    Both keep a pool whose idle threads spin, so two pools on the same cores wait for each other: on 2 cores, attacks
    on a net took 77 s with 2 threads of each, 49 s with 1 of each, and 38 s with 2 of torch and 1 of numpy's BLAS.
    """
    _libraries().limit(limits=1, user_api="blas")
    torch.set_num_threads(number)  # last: where torch shares its BLAS with numpy, this number holds


def keep_freed_memory() -> None:
    """Let glibc keep what is freed.

    Taking memory for a net's outputs anew costs 14 % of the time: ResNet18's features of 16 images of 224 pixels took
    0.92 s of one core, 0.79 s with memory kept.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        libc.mallopt(trim_threshold, -1)
        libc.mallopt(mmap_max, 0)


def choose_threads(choice: int | None, dim: int | None) -> None:
    """Set `choice` threads; None: one for up to `SMALL` features `dim`, else all cores, or OMP_NUM_THREADS."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number per nesting level
    most = int(first) if first.isdecimal() and int(first) else cores()
    set_threads(choice or (1 if dim is not None and dim <= SMALL else most))


@contextmanager
def same_threads() -> Iterator[None]:
    """Inside, the number of threads may change; afterwards it is what it was."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        set_threads(before)


_libraries = cache(ThreadpoolController)  # of this process, which take 5 ms to find


KEPT_SHARE = 0.25  # largest share of a GPU's free memory that is kept for good
FEW_IMAGES = 256  # fewer are read before processes that read them have started


def reading(
    device: torch.device, images: int, workers: int | None = None, drawn: bool = False, loaders: int = 1
) -> dict[str, Any]:
    """Options of a DataLoader over `images` images for a net on `device`; `loaders`: how many are read side by side.

    `workers` processes read; None: as many as there are cores for all loaders, but none for a CPU, whose cores the net
    takes, for few images, or where images are `drawn` at random, which would then depend on the number of cores.
    Processes end with their pass: kept ones would shuffle later passes by other numbers than a resumed run.
    """
    if workers is None:
        workers = 0 if device.type == "cpu" or drawn or images < FEW_IMAGES else cores() // loaders
    return {"num_workers": workers, "pin_memory": device.type == "cuda", "persistent_workers": False}


def room(device: torch.device, most: float = math.inf) -> float:
    """Bytes that may be kept on `device`: up to `most`, and no more than a share of what a GPU has free."""
    return most if device.type == "cpu" else min(most, KEPT_SHARE * torch.cuda.mem_get_info(device)[0])


def onto(x: Tensor, like: Tensor) -> Tensor:
    """`x` on the device of `like` and, but for integers, in its dtype; a copy onto a GPU is not waited for."""
    return x.to(like.device, like.dtype if x.is_floating_point() else None, non_blocking=like.is_cuda)


def moved(content: Any, device: torch.device) -> Any:
    """Nested dicts, lists and tuples with their tensors on `device`."""
    if isinstance(content, Tensor):
        return content.to(device)
    if isinstance(content, Mapping):
        return {key: moved(value, device) for key, value in content.items()}
    return type(content)(moved(value, device) for value in content) if isinstance(content, list | tuple) else content


def gathered(x: Tensor, chunks: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """`x[rows]` on `device` for the indices `rows` [n] of every chunk; for a GPU, a thread gathers one chunk ahead."""
    if x.device.type != "cpu" or device.type == "cpu":
        for rows in chunks:
            yield x[rows.to(x.device, non_blocking=True)].to(device)
        return
    with ThreadPoolExecutor(1) as thread:
        waiting = None
        for rows in (*chunks, None):
            ready = waiting
            if rows is not None:
                pinned = torch.empty(len(rows), *x.shape[1:], dtype=x.dtype, pin_memory=True)
                waiting = thread.submit(torch.index_select, x, 0, rows, out=pinned)
            if ready is not None:
                yield ready.result().to(device, non_blocking=True)
