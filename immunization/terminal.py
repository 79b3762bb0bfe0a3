"""The wait before a run has anything to show: what it is for, on a terminal, and shorter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `what` on a terminal while inside, on a line that the next one replaces; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"{what} ...\r")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\x1b[K")
        sys.stderr.flush()


@contextmanager
def importing(what: str) -> Iterator[None]:
    """`waiting` without the garbage collector: it would walk over all modules time and again, a quarter of the wait."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with waiting(what):
            yield
    finally:
        if collects:
            gc.enable()
