"""Terminal output, progress, and start-up time."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

Given, Returned = ParamSpec("Given"), TypeVar("Returned")
Batch = TypeVar("Batch", bound=Sequence[Sized])

SECONDS = 60.0  # between two lines of `heartbeat`
_doing: list[Callable[[], str]] = []
_verbose: ContextVar[bool] = ContextVar("verbose", default=True)


def where() -> str:
    """What this process is doing, in words: the whole first, then the part of it."""
    return ", ".join(say() for say in [*_doing]) or "at work"


def shows() -> bool:
    """Whether bars are shown: on a terminal and in a notebook, unless a call of `reporting` is to say nothing."""
    return _verbose.get() and (sys.stderr.isatty() or "ipykernel.ipkernel" in sys.modules)


def progress_bar(*arguments: object, **options: object) -> tqdm:
    """tqdm's bar on stderr, which is shown only where `shows` says so."""
    from tqdm import tqdm

    return tqdm(*arguments, disable=not shows(), **options)


def reporting(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function whose keyword `verbose` says whether it shows its progress.

    None: bars where there can be some (`shows`). True: elsewhere a line a minute on stderr. False: nothing.
    """

    @wraps(call)
    def reported(*arguments: Given.args, **options: Given.kwargs) -> Returned:
        token = _verbose.set(options.get("verbose") is not False)
        try:
            with heartbeat(aloud=options.get("verbose") is True and not shows()):
                return call(*arguments, **options)
        finally:
            _verbose.reset(token)

    return reported


@contextmanager
def doing(say: Callable[[], str]) -> Iterator[None]:
    """Inside, `where` says what `say` returns then."""
    _doing.append(say)
    try:
        yield
    finally:
        _doing.remove(say)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """`doing` that is shown on a terminal too, on a line that the next one replaces."""
    shown = shows()
    if shown:
        print(f"{what} ...", end="\r", file=sys.stderr, flush=True)
    try:
        with doing(lambda: what):
            yield
    finally:
        if shown:
            print(end="\x1b[K", file=sys.stderr, flush=True)


def counted(batches: Iterable[Batch], what: str) -> Iterator[Batch]:
    """`batches`, of which the first part has the rows: how many are done, for `where`, and a bar on a terminal."""
    done = 0
    bar = progress_bar(batches, desc=what, unit="batch", leave=False)
    with bar, doing(lambda: f"{what}, {done:,} done"):
        for batch in bar:
            yield batch
            done += len(batch[0])


@contextmanager
def heartbeat(aloud: bool) -> Iterator[None]:
    """Inside, log `where` the run is every minute; `aloud` also on stderr."""
    log, ended, began = logging.getLogger("immunization"), threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(SECONDS):
            line = f"{where()}, {(time.monotonic() - began) / 60:.0f} min since the start"
            log.info("%s", line)
            if aloud:
                print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def importing(what: str) -> Iterator[None]:
    """`waiting` without the garbage collector, whose walks over all modules take 13 % of the time of the imports."""
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
