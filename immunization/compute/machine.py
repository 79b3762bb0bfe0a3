"""The device a run works on, and how many threads it takes."""

from __future__ import annotations

import os
from functools import cache

import torch
from threadpoolctl import ThreadpoolController

from immunization.compute import distributed
from immunization.errors import ConfigError

SMALL = 256
"""Up to this many features one thread is faster than several."""


def device_of(choice: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here; raises ConfigError for a GPU that is not there."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=auto or device=cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", distributed.local_rank()) if distributed.size() > 1 else torch.device("cuda")


def set_threads(number: int) -> None:
    """Threads of torch and of the BLAS that numpy and scipy bring, which does not ask torch for its number."""
    torch.set_num_threads(number)
    _blas().limit(limits=number, user_api="blas")


def choose_threads(choice: int | None, dim: int | None) -> None:
    """Set `choice` threads; None: one for small problems of `dim` features, else (or with `dim=None`) all cores.

    OMP_NUM_THREADS, which launchers set, bounds the automatic choice.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number a nesting level
    cores = int(first) if first.isdecimal() and int(first) else os.cpu_count() or 1
    set_threads(choice or (1 if dim is not None and dim <= SMALL else cores))


@cache
def _blas() -> ThreadpoolController:
    """The libraries in this process, which take 5 ms to find."""
    return ThreadpoolController()
