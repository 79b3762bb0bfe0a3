"""Checkpoints: everything a run needs to go on after it was killed as if nothing had happened.

A checkpoint is one file, `checkpoint.safetensors` in the run folder: tensors, the rest as JSON in its header, and a
SHA-256 of both. It is replaced in one step, and removed when the result is written.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from immunization.errors import ConfigError, DataError, Preempted
from immunization.runs import files
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.resume import different

log = logging.getLogger(__name__)

VERSION = 1
SHARE = 0.01
"""Largest share of a run's time that goes into checkpoints which the clock asks for."""


def kept_of(model: nn.Module) -> dict[str, Tensor]:
    """What training may change in a model: its trained parameters, and all buffers."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return trained | dict(model.named_buffers())


def load_into(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Put the tensors of `kept_of` back into a model of the same making."""
    with torch.no_grad():
        for name, tensor in kept_of(model).items():
            tensor.copy_(kept[name])


class Checkpointer:
    """Says after each step whether a checkpoint is due, and writes it.

    `every` steps, or (None) every `seconds`, but never more than `SHARE` of the time; None for both: only on SIGTERM.
    `state` returns what has to be kept, nested dicts, lists and tuples of tensors and plain values.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        stop: Stop,
        every: int | None = None,
        seconds: float | None = 60.0,
    ) -> None:
        self.path, self.config, self.stop = folder / CHECKPOINT, _plain(config), stop
        self.every, self.seconds = every, seconds
        self.began = time.monotonic()
        self.due = self._next(0.0)

    def _next(self, cost: float) -> float:
        if self.every is not None or self.seconds is None:
            return float("inf")
        return time.monotonic() + max(self.seconds, cost / SHARE)

    def __call__(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Call after step `step`. Raises Preempted once SIGTERM has come and the checkpoint stands."""
        if self.stop.asked or (self.every and step % self.every == 0) or time.monotonic() >= self.due:
            self.write(step, state)
            if self.stop.asked:
                self.stop.now(f"interrupted after step {step}; resume=true goes on from there")

    def write(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint of `state()`."""
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        content = {"version": VERSION, "config": self.config, "state": files.pack(state(), tensors)}
        files.write_tensors(self.path, tensors, {"checkpoint": json.dumps(content)})
        cost = time.monotonic() - started
        self.due = self._next(cost)
        log.info("checkpoint after step %d (%.3f s)", step, cost)

    def finish(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """After the last step: keep a training that took longer than the interval while its result is measured."""
        if self.every or time.monotonic() - self.began >= (self.seconds or float("inf")):
            self.write(step, state)


def read(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state in a run folder's checkpoint, or None where there is none, or none that can be trusted.

    Raises ConfigError if it belongs to another configuration than `config`.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        tensors, metadata = files.read_tensors(path)
        content = json.loads(metadata["checkpoint"])
        if content["version"] != VERSION:
            raise DataError(f"{path} was written by another version of this program")
        state = files.unpack(content["state"], tensors)
    except (DataError, KeyError, ValueError, TypeError) as error:
        log.warning(
            "%s; the run starts from the beginning", error if isinstance(error, DataError) else f"{path} is damaged"
        )
        return None
    if differing := different(content["config"], config):
        raise ConfigError(
            f"{folder} holds a run of another configuration ({', '.join(differing)}): give that one to go on with it, "
            "another hydra.run.dir=..., or resume=false to start afresh"
        )
    return state


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(config, default=str))


class Stop:
    """SIGTERM, which says that this process has to end, and the signal a cluster's launcher listens to.

    While `held`, a signal waits for the next step, after which a checkpoint is written; a second one does not wait.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.held = False
        self.before: dict[int, Any] = {}

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
    def training(self) -> Iterator[None]:
        """Inside, signals wait for the end of a step."""
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.asked:
            self.now("interrupted after the last step; resume=true goes on")

    def _heard(self, number: int, frame: Any) -> None:
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
