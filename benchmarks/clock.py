"""How the benchmarks measure: functions take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def seconds(*functions: Callable[[], object], repeats: int, cuda: bool = False, calls: int = 1) -> list[float]:
    """Median seconds a call of each function over `repeats` turns of `calls` calls.

    On a CPU it is the process's own time (all threads), which other processes disturb little; with CUDA wall time.
    """
    clock = time.perf_counter if cuda else time.process_time
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, mine in zip(functions, times, strict=True):
            if cuda:
                torch.cuda.synchronize()
            start = clock()
            for _ in range(calls):
                function()
            if cuda:
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                mine.append((clock() - start) / calls)
    return [median(mine) for mine in times]
