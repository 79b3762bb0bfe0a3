"""One computation on the CPU and on a pretended GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.pretend_gpu import pretended_gpu

from immunization import Result, run

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
