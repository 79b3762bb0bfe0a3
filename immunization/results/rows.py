"""The rows of the leaderboard: one JSON file per run of a track, from which its tables, figures and page are made."""

import json
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from immunization.config import TRACK, slug
from immunization.errors import DataError
from immunization.results.collect import LAYERS, ROW, TRAINING, Run, collect
from immunization.runs import files
from immunization.runs.filenames import ENVIRONMENT, OVERRIDES
from immunization.runs.result import Result
from immunization.runs.resume import result_settings

FOLDER = Path("leaderboard/rows")
"""Rows of all tracks, in a folder each."""
CURVES = re.compile(r"worth|attack[^/]*/worst/")
"""Starts the names of curves that rows keep."""
LOCAL = re.compile(r"""(?<=["'= \[(])~?/[^\s"'`,\])]+""")
"""A path of this machine, in JSON."""


def write(paths: Iterable[Path], into: Path = FOLDER) -> list[Path]:
    """Write each run at or below `paths` as a row, `<into>/<track>/<method>-<seed>.json`; returns the files.

    Settings of the method that the command names, and the pair of classes, are part of the file's name. Runs that were
    interrupted are left out. Raises DataError for a run of no track, and for two of one name.
    """
    collection, rows = collect(paths), {}
    failed = [problem.run for problem in collection.problems if problem.kind == "failed" and problem.run]
    for run in [*collection.runs, *failed]:
        path, row = _row(run)
        if rows.setdefault(into / path, row) is not row and run not in failed:
            raise DataError(f"{run.result.folder} and another run are both the row {path}; give one of them")
    for path, row in rows.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        row.write(path)
    return list(rows)


def _row(run: Run) -> tuple[Path, Result]:
    """The path of a row below the folder of all, and its content, without paths of this machine."""
    folder, content = run.result.folder, run.result.as_dict()
    overrides, place = _overrides(folder), folder / ENVIRONMENT
    if (track := track_of(overrides)) is None:
        raise DataError(f"{folder} is no run of a track: none of its overrides is {TRACK}<track>")
    environment = json.loads(place.read_text()) if place.is_file() else {}
    row = {
        "track": track,
        "command": _command(run.command, overrides),
        "config": result_settings(run.config),
        "environment": {key: value for key, value in environment.items() if key not in ("command", "platform")},
    }
    content["about"] |= {ROW: files.plain(row)}
    content["curves"] = {name: curve for name, curve in content["curves"].items() if CURVES.match(name)}
    del content["schema"]
    named = [word for word in overrides if word.startswith((*TRAINING, LAYERS, "pair="))]
    path = Path(track, f"{slug('-'.join([run.result.method, *named, str(run.result.seed)]))}.json")
    return path, Result(**json.loads(LOCAL.sub("<folder>", json.dumps(content))))


def _command(command: str | None, overrides: Sequence[str]) -> str:
    """The command for one job of a multirun: its options without -m, and the overrides of the job."""
    words = shlex.split(command or "python launch.py")
    options = [word for word in words if word not in ("-m", "--multirun") and ("=" not in word or word[0] == "-")]
    return shlex.join([*options, *overrides])


def track_of(overrides: Iterable[str]) -> str | None:
    """The track that overrides choose; None without one."""
    return next((word.removeprefix(TRACK) for word in overrides if word.startswith(TRACK)), None)


def _overrides(folder: Path) -> list[str]:
    path = folder / OVERRIDES
    return yaml.safe_load(path.read_text()) or [] if path.is_file() else []


def plan(jobs: Sequence[Sequence[str]], sweep: Path, ignored: Iterable[str] = ()) -> str:
    """How many of the `jobs` of a track, given by their overrides, are missing in `sweep`, and how long they take.

    A job takes the median of the completed ones, or of the track's rows. `ignored` keys of overrides change no number.
    """

    def job(overrides: Iterable[str]) -> frozenset[str]:
        return frozenset(word for word in overrides if word.partition("=")[0] not in ignored)

    track, wanted, done, seconds = track_of(jobs[0]), set(map(job, jobs)), set(), []
    for folder in (path.parent for path in sweep.glob(f"*/{OVERRIDES}")):
        with suppress(DataError):
            if (result := Result.read(folder)).status == "completed":
                done.add(job(_overrides(folder)))
                seconds.append(sum(result.seconds.values()))
    if not seconds and (FOLDER / track).is_dir():
        seconds = [sum(run.result.seconds.values()) for run in collect([*(FOLDER / track).glob("*.json")]).runs]
    missing = len(wanted - done)
    line = f"track {track}: {len(wanted) - missing} of {len(wanted)} jobs are complete"
    if not missing:
        return line
    hours = (
        f"about {missing * statistics.median(seconds) / 3600:.2g} h one after another" if seconds else "time unknown"
    )
    return f"{line}, {missing} to run: {hours}"
