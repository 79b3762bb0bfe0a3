"""The same on the CPU and on a pretended GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from helpers.pretend_gpu import pretended_gpu
from torch import Tensor

from immunization import Result, run
from immunization.training.divergence import Watch

TOLERANCE = 1e-8
"""Relative; here and there the CPU takes routines that a GPU has not, which round otherwise (BLAS's syrk and trmm)."""


def agree(one: Result, other: Result, tolerance: float = TOLERANCE) -> None:
    """Assert that two results are the same: metrics and curves to `tolerance`, reasons and flags in full."""
    assert one.metrics.keys() == other.metrics.keys()
    for name, value in one.metrics.items():
        expected = value if value is None else pytest.approx(value, rel=tolerance, abs=1e-12, nan_ok=True)
        assert other.metrics[name] == expected, name
    assert set(one.flags) == set(other.flags)
    assert one.reasons.keys() == other.reasons.keys()
    assert one.curves.keys() == other.curves.keys()


def run_on_both(overrides: Sequence[str], folder: Path) -> tuple[Result, Result, Counter]:
    """Results of a run on the CPU and on a pretended GPU, and what the latter has counted."""
    cpu = run([*overrides, "device=cpu"], folder / "cpu", quiet=True)
    with pretended_gpu() as seen:
        gpu = run([*overrides, "device=cuda"], folder / "gpu", quiet=True)
    assert seen["to_cpu"], "nothing was computed on the pretended GPU"
    return cpu, gpu, seen


def waits_of_steps(overrides: Sequence[str], folder: Path) -> list[int]:
    """How often Python waits for the pretended GPU from the loss of a step to the next, in a run that logs nothing.

    The first step is left out: its loss is looked at, and weights are balanced.
    """
    counts, see = [], Watch.see
    with pretended_gpu() as seen:

        def counted(watch: Watch, loss: Tensor, look: bool) -> None:
            counts.append(seen["waits"])
            see(watch, loss, look)

        with mock.patch.object(Watch, "see", counted):
            run([*overrides, "device=cuda", "log_every=1000", "evaluation=[]"], folder, quiet=True)
    return [after - before for before, after in pairwise(counts[1:])]
