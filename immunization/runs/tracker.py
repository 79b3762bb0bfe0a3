"""Where numbers of a run go: always to metrics.jsonl, and to a tracker such as W&B (conf/tracker)."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from immunization.errors import DataError, UserError
from immunization.runs import files
from immunization.runs.filenames import METRICS
from immunization.runs.result import Curve, Result

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds of a run in which a tracker that waits is not started."""

DataTable = tuple[list[str], list[list[str | float | bool | None]]]  # header and rows


class Tracker:
    """The interface; here every method does nothing. A tracker never fails a run (`Guarded`).

    `run_id` is the tracker's own name of the run, if any. It is set before `start` to go on with an interrupted run,
    else by `start`.
    """

    run_id: str | None = None
    waits = False
    """Whether nobody looks at the run before it has ended: `start`, which takes seconds, can then wait."""

    def start(self, folder: Path, config: dict[str, Any], name: str, group: str, tags: list[str]) -> None:
        """Open a run called `name` in `group`; files of the tracker go into the run folder."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record numbers of one step; steps only ever grow."""

    def finish(self, result: Result, figures: list[Path]) -> None:
        """Record the final measures and pictures; called once, before `close`, and not for a failed run."""

    def report(self, tables: Mapping[str, DataTable], figures: list[Path], page: Path) -> None:
        """Record what sums up many runs: tables (name -> header and rows), PNG pictures and an HTML page."""

    def close(self, failed: bool) -> None:
        """End the run; may be called without `start` and twice."""


class Guarded(Tracker):
    """Another tracker, of which the first failure is a warning and the last call but `close`: the run goes on.

    A UserError of its start ends the run: somebody can mend it. One that `waits` starts with the first line logged
    after `PATIENCE`, or at the end of a shorter run, whose table is then on the screen.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.failed = tracker, False
        self.waiting: tuple[float, tuple[Any, ...], dict[str, Any]] | None = None
        self.lines: list[tuple[int, dict[str, float | None]]] = []

    @property
    def run_id(self) -> str | None:  # type: ignore[override]  # read alone: the tracker's own
        return self.tracker.run_id

    def start(self, *arguments: Any, **options: Any) -> None:
        self.waiting = time.monotonic(), arguments, options
        if not self.tracker.waits or self.tracker.run_id:
            self._start()

    def _start(self) -> None:
        """Start the tracker if it waits, and give it the lines so far."""
        if self.waiting is None:
            return
        (_, arguments, options), self.waiting = self.waiting, None
        self._call("start", *arguments, **options)
        for line in self.lines:
            self._call("log", *line)
        self.lines = []

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self.waiting and time.monotonic() - self.waiting[0] < PATIENCE:
            self.lines.append((step, dict(metrics)))
            return
        self._start()
        self._call("log", step, metrics)

    def finish(self, result: Result, figures: list[Path]) -> None:
        self._start()
        self._call("finish", result, figures)

    def report(self, *arguments: Any) -> None:
        self._start()
        self._call("report", *arguments)

    def close(self, failed: bool) -> None:
        try:
            self._start()
        except UserError as error:  # the run has ended, perhaps by an error of its own
            log.warning("the tracker %s could not start: %s", type(self.tracker).__name__, error)
        self.failed = False
        self._call("close", failed)

    def _call(self, method: str, /, *arguments: Any, **options: Any) -> None:
        if self.failed:
            return
        try:
            getattr(self.tracker, method)(*arguments, **options)
        except Exception as error:
            if method == "start" and isinstance(error, UserError):
                raise
            self.failed = True
            said = type(self.tracker).__name__, method, type(error).__name__, error
            log.warning("the tracker %s failed in %s (%s: %s) and is left out; the run goes on", *said)


class Recorder(Tracker):
    """Writes metrics.jsonl, a line a logged step; goes on after `state`, or raises DataError for another file."""

    def __init__(self, folder: str | Path, state: Mapping[str, Any] | None = None) -> None:
        path = Path(folder) / METRICS
        kept = b""
        if state:
            with suppress(FileNotFoundError):
                kept = path.read_bytes()[: state["bytes"]]
            if hashlib.sha256(kept).hexdigest() != state["sha256"]:
                raise DataError(
                    f"{path} was changed since the checkpoint; give another hydra.run.dir=... to start a new run"
                )
        self.digest = hashlib.sha256(kept)
        self.file = path.open("r+b" if state else "wb")
        self.file.truncate(len(kept))
        self.file.seek(len(kept))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        line = (json.dumps(files.plain({"step": step, **metrics}), allow_nan=False) + "\n").encode()
        self.file.write(line)
        self.file.flush()
        self.digest.update(line)

    def state_dict(self) -> dict[str, Any]:
        """How much was logged, safely on disk from here on."""
        os.fsync(self.file.fileno())
        return {"bytes": self.file.tell(), "sha256": self.digest.hexdigest()}

    def close(self, failed: bool) -> None:
        with suppress(OSError):  # of a full disk, which ended the run when it was written to
            self.file.close()


def logged(folder: str | Path) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Each step in a run folder's metrics.jsonl, if there is one, and what was logged of it."""
    path = Path(folder) / METRICS
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            metrics = json.loads(line)
        except ValueError:  # the last line, cut off by a killed process
            break
        yield metrics.pop("step"), metrics


def history(folder: str | Path) -> dict[str, Curve]:
    """The curves in a run folder's metrics.jsonl, if there is one, by name: x steps, y values."""
    curves: dict[str, Curve] = {}
    for step, metrics in logged(folder):
        for name, value in metrics.items():
            curve = curves.setdefault(name, {"x": [], "y": []})
            curve["x"].append(step)
            curve["y"].append(value)
    return curves
