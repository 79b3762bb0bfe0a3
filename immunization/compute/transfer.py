"""Onto a GPU without waiting for it: what fits stays there, what does not is read ahead of the step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from immunization.compute.machine import cores

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
    """`x` in the dtype and on the device of `like`; the copy onto a GPU makes the program wait for nothing."""
    return x.to(like, non_blocking=like.is_cuda)


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
