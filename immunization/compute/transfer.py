"""Onto a GPU without waiting for it: what fits stays there, what does not is read ahead of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SHARE = 0.25
"""Of a GPU's free memory, what is kept there for good may take so much."""


def room(device: torch.device, most: float = math.inf) -> float:
    """Bytes that may be kept on `device`: up to `most`, and no more than a share of what a GPU has free."""
    return most if device.type == "cpu" else min(most, SHARE * torch.cuda.mem_get_info(device)[0])


def onto(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the dtype and on the device of `like`; the copy onto a GPU makes the program wait for nothing."""
    return x.to(like, non_blocking=like.is_cuda)


def gathered(x: Tensor, chunks: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """`x[rows]` on `device` for the indices `rows` [n] of every chunk.

    Rows of the CPU (of a file, where `x` is memory-mapped) that a GPU wants are gathered by a thread, one chunk ahead,
    into pinned memory, from which they are copied while the GPU works.
    """
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
