"""Signals that end a run: what is being trained comes to the end of its step, and into a checkpoint, first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from immunization.errors import Preempted

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.getsignal` returns."""


class Stop:
    """SIGTERM, which says that this process has to end, and the signal a cluster's launcher listens to.

    While `held`, a signal waits for the next step, after which a checkpoint is written; a second one does not wait.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.held = False
        self.before: dict[int, Handler] = {}

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take over the signals inside; only a process's main thread can, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name, None)  # Windows has the first alone
            before = number and signal.getsignal(number)
            if name == "SIGTERM" or callable(before):  # submitit requeues a job on one of the others
                self.before[number] = before
                signal.signal(number, self._heard)
        try:
            yield self
        finally:
            for number, before in self.before.items():
                signal.signal(number, before)

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """Inside, signals wait for the end of a step."""
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.asked:
            self.now("interrupted after the last step; resume=true goes on")

    def _heard(self, number: int, frame: FrameType | None) -> None:
        wait = self.held and self.asked is None
        self.asked = number
        if not wait:
            self.now("interrupted; resume=true goes on from the last checkpoint, if there is one")

    def now(self, message: str) -> None:
        """End the run by Preempted, unless whoever listened to the signal before us has other plans."""
        number, self.asked = self.asked, None
        before = self.before[number]
        if callable(before):
            before(number, None)
            return
        print(f"error: {signal.Signals(number).name}: {message}", file=sys.stderr, flush=True)
        raise Preempted(128 + number)
