"""Signals that end a run: a training first finishes its step and writes a checkpoint."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from immunization.errors import OtherEnded, Preempted, Requeued

Handler = Callable[[int, FrameType | None], object] | int | None  # what `signal.getsignal` returns

STARTING: dict[int, Handler] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""What `preemptible` takes the place of: a handler that somebody else has set stays."""


@contextmanager
def preemptible() -> Iterator[None]:
    """Inside, SIGTERM (and Ctrl-C, until `imported`) ends the process with one line and exit code 143 (130)."""
    main = threading.current_thread() is threading.main_thread()
    taken = {number: old for number, old in STARTING.items() if main and signal.getsignal(number) is old}
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


def imported() -> None:
    """From here on Ctrl-C is KeyboardInterrupt: no import is left that would swallow it."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def between_runs() -> None:
    """From here on SIGTERM is Preempted where no run listens: before the first one, between two, behind the last."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, _preempt)


def _leave(number: int, frame: FrameType | None) -> None:
    """At once: an exception amid the start of an extension becomes an ImportError, and there is nothing to tidy up."""
    print(f"error: {signal.Signals(number).name}: interrupted before the run began", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _preempt(number: int, frame: FrameType | None) -> None:
    print(f"error: {signal.Signals(number).name}: interrupted", file=sys.stderr, flush=True)
    raise Preempted(128 + number)


def end_at_once() -> None:
    """From here on Ctrl-C and SIGTERM end the process without a word more: what can be kept is being kept."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))


class Stop:
    """SIGTERM, Ctrl-C and a cluster launcher's signal: while `held`, a first one waits for a step and a checkpoint.

    Once the run has `failed`, a first one waits until that is written down.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.held = self.failed = False
        self.raised: BaseException | None = None
        self.before: dict[int, Handler] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Take over the signals inside; only a process's main thread can, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name, None)  # Windows has only the first two
            before = number and signal.getsignal(number)
            if name == "SIGTERM" or callable(before):  # submitit requeues a job on one of the others
                self.before[number] = before
                signal.signal(number, self._heard)
        try:
            with self.unmasked():
                yield self
        except OtherEnded:  # torchrun ends what is left by SIGTERM
            raise
        except Exception as error:
            if self.asked:
                self.now(f"interrupted; the run had failed before: {error}")
            raise
        finally:
            for number, before in self.before.items():
                signal.signal(number, before)

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """An error that leaves after a signal was to end the run is that end, which an import may turn into another."""
        try:
            yield
        except Exception as error:
            self.failed = True
            if self.raised is None:
                raise
            raise self.raised from error

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.asked:
            self.now("interrupted after the last step; resume=true goes on")

    def _heard(self, number: int, frame: FrameType | None) -> None:
        wait = (self.held or self.failed) and self.asked is None
        self.asked = number
        if not wait:
            self.now("interrupted; resume=true goes on from the last checkpoint, if there is one")
        elif number == signal.SIGINT:
            first = "the failure is written down" if self.failed else "a checkpoint after this step"
            print(f"\ninterrupted: {first}; once more to stop at once", file=sys.stderr, flush=True)

    def now(self, message: str) -> None:
        """End the run: by KeyboardInterrupt on Ctrl-C, by Preempted, or by the handler of the signal before."""
        number, self.asked = self.asked, None
        before = self.before[number]
        try:
            submitits = getattr(before, "__module__", "").startswith("submitit.")
            if submitits and number != signal.SIGTERM:  # which submitit lets pass
                _hand_over(before, number)
                return
            if callable(before) and before not in (_leave, _preempt) and not submitits:
                before(number, None)
                return
            print(f"error: {signal.Signals(number).name}: {message}", file=sys.stderr, flush=True)
            raise Preempted(128 + number)
        except BaseException as error:
            self.raised = error
            raise


def _hand_over(handler: Handler, number: int) -> None:
    """To submitit, which puts the job back into the queue and exits, or raises why it does not."""
    assert callable(handler)
    try:
        handler(number, None)
    except SystemExit as end:
        raise Requeued(end.code) from None
    except Exception as error:
        end = Preempted(128 + number)
        end.why = str(error)
        raise end from error
