"""Standard output and error, and the wait before a run has anything to show: what it is for, and shorter."""

from __future__ import annotations

import gc
import io
import os
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


class _Pipe(io.FileIO):
    """A standard stream that takes everything, and says nothing, once nobody reads it any more (`| head`)."""

    def write(self, content: bytes) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(content)


def robust_streams() -> None:
    """Let no reader who leaves early end a run, and no terminal that lacks a sign: it shows another one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            written = io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False))
            how = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(written, errors="replace", **how))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
