"""Where a run is, every minute, for those who see no progress bar: in files of a cluster, and in run.log."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from immunization.terminal import where

log = logging.getLogger("immunization")

SECONDS = 60.0
"""Between two lines."""


@contextmanager
def heartbeat(aloud: bool) -> Iterator[None]:
    """Inside, log `where` the run is every minute; `aloud` also on stderr."""
    ended, began = threading.Event(), time.monotonic()

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
