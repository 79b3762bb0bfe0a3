"""Any number of result.json files as one table, and a list of every folder that was left out of it, with the reason."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from immunization.errors import DataError
from immunization.results.formatting import spreadsheet
from immunization.runs.environment import command_of
from immunization.runs.filenames import CONFIG, LOST, REFUSED, RUN_LOG
from immunization.runs.numbers import unspelled
from immunization.runs.result import Result
from immunization.runs.resume import differing_inputs, read_config, recorded_inputs, result_settings

if TYPE_CHECKING:
    import pandas as pd

PAIR = ("dataset.primary", "dataset.harmful", "dataset.benign", "dataset.unseen", "pair")
"""Keys that choose the classes of the tasks: runs that differ in nothing else are averaged."""
TRAINING = ("method.", "optimizer.", "scheduler.")
"""Prefixes of keys that say how a model is immunized: runs that differ in them stand side by side in one table."""
AUDITED = "model.checkpoint"
"""Key of the run whose net is attacked where nothing is immunized."""
LAYERS = "model.trainable"
"""Key of the part of a net that is immunized, which in a leaderboard is the method's choice."""
TRAINED_BY = ("device", "model.amp", "model.channels_last")
"""Keys that say how a machine trains a net: itself, and the formats that suit it."""
ATTACK = "attack."
"""Starts the keys of the configuration that say how a run is attacked."""
MEASURING = ("evaluation.", ATTACK)
"""Prefixes of keys that say how it is measured."""
ROW = "row"
"""Under this key `about` of a row of the leaderboard holds what else is in a `Run`."""


@dataclass
class Run:
    """A completed run: its result and the configuration that made it.

    Of a row of the leaderboard, `track` is the track's name, and `result.folder` the file of the row.
    """

    result: Result
    config: dict[str, Any]
    command: str | None
    track: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Flat names and values of the configuration, without the run's seed, places of files and bookkeeping."""
        flat = flatten(result_settings(self.config))
        seed = flat.pop("seed", None)
        if flat.get("dataset.seed") == seed and "dataset.seed=" not in (self.command or ""):  # it is the run's
            flat.pop("dataset.seed", None)
        return flat

    @cached_property
    def pair(self) -> str:
        """The classes of both tasks where the data set has them, `0→1`, else nothing."""
        classes = [self.settings.get(key) for key in PAIR[:2]]
        return "" if None in classes else "→".join(map(str, classes))

    @property
    def folder(self) -> Path:
        """The run folder, or the file of the row."""
        return self.result.folder or Path()

    @property
    def place(self) -> tuple[int, str, str]:
        """Seed, pair of classes, and benign and unseen classes: what tells runs of one setting apart."""
        return self.result.seed, self.pair, str([self.settings.get(key) for key in PAIR[2:4]])

    @cached_property
    def group(self) -> str:
        """What has to agree for runs to be in one table: the data and its preparation, model and evaluation.

        Of audits not the checkpoint: they compare some.
        """
        audited = AUDITED if self.settings.get("immunize") is False else ""
        return _key(self.settings, lambda name: not name.startswith(TRAINING) and name not in (*PAIR, audited))

    @cached_property
    def board(self) -> str:
        """What has to agree for runs to be rows of one table of the leaderboard: track, suite, data and model."""
        others = (*TRAINING, *MEASURING, LAYERS, *TRAINED_BY)
        return self.track + _key(self.settings, lambda name: not name.startswith(others) and name not in PAIR)

    @cached_property
    def setting(self) -> str:
        """What has to agree for runs to be averaged: everything but the seed and the pair of classes."""
        return _key(self.settings, lambda name: name not in PAIR)

    @cached_property
    def identity(self) -> tuple[str, str, int]:
        return self.track, _key(self.settings, lambda name: True), self.result.seed


Kind = Literal["failed", "interrupted", "requeued", "lost", "unfinished", "unreadable", "repeated", "of other inputs"]


@dataclass
class Problem:
    """A run folder that is left out of every average, and why."""

    folder: Path
    kind: Kind
    message: str
    run: Run | None = None  # of a failed or interrupted run whose configuration can be read


@dataclass
class Collection:
    """The completed runs below some folders, and everything else that was found there."""

    runs: list[Run] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def counts(self) -> str:
        """One line: how many runs there are and how many of what kind are left out."""
        kinds = Counter(problem.kind for problem in self.problems)
        return ", ".join([f"{len(self.runs)} completed", *(f"{n} {kind}" for kind, n in sorted(kinds.items()))])

    def frame(self) -> "pd.DataFrame":
        """A tidy table: a row for each completed run, columns of what it was, what differs, and what was measured."""
        import pandas as pd

        varied = [key for key in varying([run.settings for run in self.runs]) if key != "pair"]
        rows = [
            {
                **{key: getattr(run.result, key) for key in ("dataset", "model", "method", "seed")},
                "pair": run.pair,
                # lists and other objects as text
                **{k: _text(v) if isinstance(v := run.settings.get(k), list | dict) else v for k in varied},
                **run.result.metrics,
                **{f"seconds/{name}": value for name, value in run.result.seconds.items()},
                "flags": " ".join(run.result.flags),
                "folder": str(run.folder),
            }
            for run in self.runs
        ]
        return pd.DataFrame(rows)

    def csv(self) -> str:
        """The table as a CSV file."""
        frame = self.frame().map(lambda cell: spreadsheet(cell) if isinstance(cell, str) else cell)
        return frame.rename(columns=spreadsheet).to_csv(index=False)


def collect(paths: Iterable[str | Path]) -> Collection:
    """Read every run folder at or below `paths`; a path may also be a result.json, or a row of the leaderboard.

    Runs that did not complete, files that cannot be read or are of another schema, and all but the last of runs that
    are the same in configuration and seed become problems; one of other inputs than the last says so. Raises DataError
    if a path does not exist or there is no run at all.
    """
    collection = Collection()
    latest: dict[tuple[str, str, int], Run] = {}
    for folder in {folder.resolve(): folder for path in paths for folder in _run_folders(Path(path))}.values():
        try:
            run = _read(folder)
        except DataError as error:
            kind: Kind = "unreadable" if _file(folder).exists() else "unfinished"
            if lost := _lost(folder):
                kind = "lost"
            collection.problems.append(Problem(folder, kind, lost or str(error)))
            continue
        if (refused := folder / REFUSED).exists():  # what completed here is none of this multirun's
            collection.problems.append(Problem(folder, "failed", refused.read_text()))
            continue
        if run.result.status != "completed":
            kind, why = ("failed", run.result.error or "no reason given")
            lost = _lost(folder)
            if run.result.interrupted:
                kind = "requeued" if run.result.status == "requeued" else "interrupted"
                more = (run.result.error or "").partition(": ")[2]
                why = "; ".join(filter(None, [lost, more, "resume=true goes on with it"]))
            elif lost:
                kind, why = "lost", lost
            collection.problems.append(Problem(folder, kind, why, run if run.config else None))
            continue
        if before := latest.get(run.identity):
            older, run = sorted((before, run), key=lambda r: _file(r.folder).stat().st_mtime)
            message, kind = f"the same configuration and seed as {run.folder}, which is newer", "repeated"
            if other := differing_inputs(recorded_inputs(older.folder), recorded_inputs(run.folder)):
                kind = "of other inputs"
                message += (
                    f", but another content of {', '.join(other)}: give the folders one by one, or make runs on "
                    "changed data under another dataset.name"
                )
            collection.problems.append(Problem(older.folder, kind, message))
        latest[run.identity] = run
    collection.runs = sorted(latest.values(), key=lambda run: _natural(run.folder))
    if not collection.runs and not collection.problems:
        raise DataError(f"no {Result.file} in or below {', '.join(map(str, paths))}; give folders of runs or sweeps")
    return collection


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with names joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def varying(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that do not have one and the same value everywhere."""
    settings = list(settings)
    names = dict.fromkeys(name for setting in settings for name in setting)
    return [name for name in names if len({_text(setting.get(name)) for setting in settings}) > 1]


def _run_folders(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path.parent if path.name == Result.file else path
        return
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give folders of runs or sweeps, or {Result.file} files")
    for folder, subfolders, files in os.walk(path):
        subfolders.sort()
        if {Result.file, CONFIG, RUN_LOG, LOST} & set(files):
            subfolders.clear()  # what lies deeper belongs to the run
            yield Path(folder)


def _lost(folder: Path) -> str:
    """Why the engine of a multirun lost the job of a folder; empty where it did not."""
    return (folder / LOST).read_text() if (folder / LOST).exists() else ""


def _file(place: Path) -> Path:
    """The file of a result: in a run folder, or the row itself."""
    return place if place.is_file() else place / Result.file


def _read(place: Path) -> Run:
    if not _file(place).exists():
        raise DataError(f"{place} has no {Result.file}; the run was killed or is still going")
    result = Result.read(place)
    if place.is_file():
        if ROW not in result.about:
            raise DataError(f"{place} is not a row of the leaderboard")
        result.folder = place
        row = result.about.pop(ROW)
        return Run(result, **row | {"config": unspelled(row["config"])})
    try:
        config = read_config(place)
    except DataError:
        if result.status == "completed":
            raise
        config = {}  # it failed before there was one
    return Run(result, config, command_of(place))


def _key(settings: Mapping[str, Any], keep: Callable[[str], bool]) -> str:
    """The settings whose names pass `keep`, as text, so that equal settings have equal keys."""
    return json.dumps({name: value for name, value in sorted(settings.items()) if keep(name)}, default=str)


def _text(value: object) -> str:
    return json.dumps(value, default=str)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sorts job 10 after job 9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", str(path))]
