"""Checkpoints: everything that a killed run needs to continue as if it had not been interrupted."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from immunization.checks import AtLeastOne, Positive
from immunization.errors import ConfigError, DataError
from immunization.runs import files
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.resume import different, result_settings
from immunization.training.signals import Stop

log = logging.getLogger(__name__)

VERSION = 3
SHARE = 0.01  # largest share of a run's time that goes into checkpoints which the clock asks for


class Checkpointer:
    """Writes a checkpoint `every` steps, or (None) every `seconds` up to `SHARE` of the time; both None: on SIGTERM."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        stop: Stop,
        every: AtLeastOne | None = None,
        seconds: Positive | None = 60.0,
    ) -> None:
        self.path, self.stop, self.every, self.seconds = folder / CHECKPOINT, stop, every, seconds
        self.began = time.monotonic()
        self.due = self._next(0.0)
        self.config = json.loads(json.dumps(result_settings(config), default=str))

    def _next(self, cost: float) -> float:
        if self.every is not None or self.seconds is None:
            return float("inf")
        return time.monotonic() + max(self.seconds, cost / SHARE)

    def __call__(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Call after step `step`. Raises Preempted once SIGTERM has come and the checkpoint is written."""
        if self.stop.asked or (self.every and step % self.every == 0) or time.monotonic() >= self.due:
            self.write(step, state)
            if self.stop.asked:
                self.stop.now(f"interrupted after step {step}; resume=true goes on from there")

    def write(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint of `state()`; raises TypeError for an object in it that only a pickle could bring back."""
        started = time.monotonic()
        files.write_archive(self.path, {"version": VERSION, "config": self.config, "state": state()})
        cost = time.monotonic() - started
        self.due = self._next(cost)
        log.info("checkpoint after step %d (%.3f s)", step, cost)

    def finish(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """After the last step: keep a training that took longer than the interval while its result is measured."""
        if self.every or time.monotonic() - self.began >= (self.seconds or float("inf")):
            self.write(step, state)


def read(folder: Path, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The state in a run folder's checkpoint; None if there is none, it is damaged, or `config` is None.

    Raises ConfigError for a checkpoint of another configuration, DataError for one of another version.
    """
    if config is None:
        return None
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        content = files.read_archive(path)
        version, before, state = (content[key] for key in ("version", "config", "state"))
    except (DataError, KeyError, TypeError) as error:
        reason = error if isinstance(error, DataError) else f"{path} is not a checkpoint"
        log.warning("%s; the run starts from the beginning", reason)
        return None
    if version != VERSION:
        raise DataError(f"{path} was made by another version; give another hydra.run.dir=... to start a new run")
    if differing := different(result_settings(before), result_settings(config)):
        raise ConfigError(
            f"{folder} holds a run of another configuration ({', '.join(differing)}); give its values to resume it, "
            "or another hydra.run.dir=... to start a new run"
        )
    return state
