"""The folder of one run: created, locked, logged to and filled. It also records a failure."""

import errno
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue
from torch import Tensor

from immunization.errors import ConfigError, Preempted, UserError
from immunization.runs import environment, filenames, files, resume
from immunization.runs.result import Result
from immunization.runs.tracker import Guarded, Recorder, Tracker, logged
from immunization.usage import explained

log = logging.getLogger("immunization")

MOST_SHOWN = 12
"""Classes of the primary task that are shown."""


class RunFolder:
    """One run's folder, made, and kept from other processes, inside `with`; every message goes into its run.log.

    Raises ConfigError for a folder that cannot be written, or in which another process is at work.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        self.recorder: Recorder | None = None
        self.said: dict[str, str] = {}  # files that say what the run is
        self.again = False  # whether a completed run is done again: it stays as it is until this one is completed
        self.trackers: list[Tracker] = []

    @property
    def path(self) -> Path:
        return cast(Path, self.result.folder)  # None only in a helping process of a training that ends

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                file = logging.FileHandler(self.path / filenames.RUN_LOG)
            except OSError as error:
                raise ConfigError(
                    f"the run folder cannot be written ({error}); choose another one, hydra.run.dir=..."
                ) from error
            stack.enter_context(_logging_to(file))
            stack.enter_context(files.locked(self.path / filenames.RUN_LOG))
            (self.path / filenames.LOST).unlink(missing_ok=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, a failure is written into result.json before it goes on; one of the disk in words of its own.

        The sound result of a completed run stays in its place.
        """
        self.again = Result.completed_in(self.path)
        try:
            yield
        except BaseException as error:
            error = in_words(error, self.path)
            self.result.fail(error)
            with suppress(OSError):  # which would hide the error itself
                if not self.again:
                    self.result.write(self.path)
            log.error("%s", self.result.error, exc_info=not isinstance(error, UserError | Preempted))
            for tracker in self.trackers:
                tracker.close(failed=True)
            raise error from error.__cause__

    def begin(self, config: DictConfig, overrides: Sequence[str]) -> None:
        self._say(filenames.CONFIG, OmegaConf.to_yaml(config, resolve=True))
        self._say(filenames.OVERRIDES, OmegaConf.to_yaml(overrides))

    def _say(self, name: str, content: str) -> None:
        """Write a file that says what the run is: now, or in the place of a completed run's once this one is, too."""
        self.said[name] = content
        if not self.again:
            files.write(self.path / name, content)

    def track(self, tracker: Tracker, settings: dict[str, Any], state: Mapping[str, Any] | None) -> None:
        """Start a tracker; `state` is that of the checkpoint to go on from."""
        tracker.run_id = state["tracker"] if state else None
        guarded = Guarded(tracker)
        guarded.start(self.path, settings, self.path.name, settings["name"], settings["tags"] or [])
        self.trackers.append(guarded)

    def record(
        self, device: torch.device, state: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Remove what an unfinished run left, as far as `state` does not go on from it, and log steps from here on.

        Raises DataError where that run had other `inputs`.
        """
        if state or self.again:
            resume.check_inputs(self.path, inputs or {})
        described = environment.describe(device) | {resume.INPUTS: inputs or {}}
        self._say(filenames.ENVIRONMENT, files.as_json(described))
        names = [Result.file, filenames.WEIGHTS, filenames.ORIGINAL, filenames.ROWS, filenames.ARRAYS]
        names += [filenames.MODEL_CARD, filenames.CLASSES]
        names = ([] if self.again else names) + ([] if state else [filenames.CHECKPOINT])
        for path in (*(self.path / name for name in names), *self.path.glob(f".*{files.PART}")):
            path.unlink(missing_ok=True)
        self.recorder = Recorder(self.path, state["recorder"] if state else None)
        for tracker in self.trackers:
            waits = isinstance(tracker, Guarded) and tracker.waiting
            if state and (waits or tracker.run_id != state["tracker"]):  # another run of its own, without these steps
                for step, metrics in logged(self.path):
                    tracker.log(step, metrics)
        self.trackers.insert(0, self.recorder)

    def tabulate(self, classes: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
        """Write the classes of each role, with the output and the rows of each; the same as lines for people."""
        if not classes:
            return []
        self._say(filenames.CLASSES, files.as_json(classes))
        lines = [line for role, rows in classes.items() for line in _table(role, rows)]
        for line in lines:
            log.info("%s", line)
        return lines

    @property
    def _aside(self) -> Path:
        return self.path / f".{filenames.ORIGINAL}{files.PART}"

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Put the wall-clock seconds spent inside into the result."""
        started = time.perf_counter()
        yield
        self.result.seconds[name] = time.perf_counter() - started

    def keep_original(self, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write what training will change, without which nobody could compare with it later; nothing for none."""
        if weights:  # those of a completed run stay until this one is completed, too
            files.write_weights(self._aside if self.again else self.path / filenames.ORIGINAL, weights, facts)

    def keep(
        self, weights: Mapping[str, Tensor], facts: Mapping[str, Any], origins: Mapping[str, tuple[str, Tensor]]
    ) -> None:
        """Write the immunized model, and, of each split of each task, its source and the rows of it."""
        files.write_weights(self.path / filenames.WEIGHTS, weights, facts)
        if origins:
            rows = {split: places for split, (_, places) in origins.items()}
            sources = {split: source for split, (source, _) in origins.items()}
            files.write_tensors(self.path / filenames.ROWS, rows, sources)

    def finish(self, arrays: Mapping[str, Tensor]) -> None:
        """Write the completed result and all arrays that were measured; nothing is left to go on from."""
        if arrays:
            files.write_tensors(self.path / filenames.ARRAYS, arrays)
        for name, content in self.said.items() if self.again else ():
            files.write(self.path / name, content)
        if self._aside.exists():
            self._aside.replace(self.path / filenames.ORIGINAL)
        self.result.status = "completed"
        self.result.write(self.path)
        for name in (filenames.CHECKPOINT, filenames.ATTACKS):
            (self.path / name).unlink(missing_ok=True)


def _table(role: str, rows: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The classes of a role with the output and the rows of each; of many, the first and the last."""
    names, most = list(rows), MOST_SHOWN if role == "primary" else 2
    shown = range(len(names)) if len(names) <= most + 1 else (*range(most - 1), -1)  # no line stands for one class
    lines = []
    for i in shown:
        counts = dict(rows[names[i]])
        name, output = names[i] if names[i].isprintable() else ascii(names[i]), counts.pop("output")
        label = f"output {output}" if role == "primary" else f"label {output}"  # others have no outputs of the head
        lines.append(f"  {label}: {name}, {' + '.join(map(str, counts.values()))}")
    if len(lines) < len(names):
        lines.insert(-1, f"  ... ({filenames.CLASSES} has all)")
    return [f"{role}: {len(names)} classes, rows to train + validate + test", *lines]


@contextmanager
def _logging_to(file: logging.Handler) -> Iterator[None]:
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    setattr(file, "handleError", lambda record: None)  # noqa: B010  a full disk is reported where it matters
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    screen.addFilter(lambda record: record.levelno < logging.ERROR)  # errors are raised, and shown by the caller
    log.setLevel(logging.INFO)
    propagate, log.propagate = log.propagate, False
    for handler in (file, screen):
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, screen):
            log.removeHandler(handler)
        log.propagate = propagate
        with suppress(OSError):
            file.close()


class _Aside(logging.Handler):
    def __init__(self, said: list[logging.LogRecord]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record)


@contextmanager
def aside(said: list[logging.LogRecord] | None = None) -> Iterator[list[logging.LogRecord]]:
    """Inside, what is logged joins a list, for `log.handle` when its run is the one that is logged."""
    said = [] if said is None else said
    before, propagate, log.propagate = log.handlers, log.propagate, False
    log.handlers = [_Aside(said)]
    try:
        yield said
    finally:
        log.handlers, log.propagate = before, propagate


def in_words(error: BaseException, folder: Path) -> BaseException:
    """A mistake that OmegaConf met in an interpolation, or a full disk, in one line of ours; others as they are."""
    if isinstance(error, InterpolationResolutionError | MissingMandatoryValue):
        message = ConfigError(explained(error))
    elif isinstance(error, OSError) and error.errno in (*files.NO_ROOM, errno.EROFS, errno.EACCES):
        message = ConfigError(
            f"{error.filename or folder}: {error.strerror}; make room there, or choose another disk with "
            "hydra.run.dir=... (what was written before is intact)"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.EEXIST, errno.ENOTDIR):
        message = ConfigError(f"{error.filename}: {error.strerror}; a folder is needed there")
    else:
        return error
    message.__cause__ = error
    return message
