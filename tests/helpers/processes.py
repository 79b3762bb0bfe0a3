"""Processes forked from this one, which has paid the imports: a signal costs a fraction of a second."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def in_a_child(work: Callable[[], object], said: Path = Path(os.devnull)) -> int:
    """The id of a process that does `work` and leaves with code 0 if that ended well; `said` has what it prints."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = sys.stderr = said.open("w")
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Exit code of a child, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened, two minutes at most."""
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
