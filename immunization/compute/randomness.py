"""Random states as a whole: seeding, keeping and restoring them, and the same numbers in every run."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# cuBLAS reads it once in a process, at the first product on a GPU: before any run that may ask for the same bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def seed(number: int) -> None:
    """Seed torch (every device), numpy and Python."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def states() -> dict[str, Any]:
    """The states of the global generators of torch, numpy and Python, as tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore(states: dict[str, Any]) -> None:
    """Set all of them back to what `states` returned; states of GPUs that are not there are left out."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"]):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Inside, random numbers are drawn without a trace outside."""
    before = states()
    try:
        yield
    finally:
        restore(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch takes only algorithms that give the same bits every time, or refuses where there is none."""
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
