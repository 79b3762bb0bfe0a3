"""The rows of the leaderboard: one JSON file per run of a track, from which its tables, pictures and page are made."""

import json
import re
import shlex
import statistics
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from immunization.config import TRACK, slug
from immunization.errors import DataError
from immunization.results.collect import LAYERS, ROW, TRAINING, Run, collect, flatten, varying
from immunization.results.settings import RIR
from immunization.runs import files
from immunization.runs.filenames import ENVIRONMENT, OVERRIDES
from immunization.runs.numbers import spelled
from immunization.runs.records import PROBES, SPECTRA, STAGES, WORST, Record, Records
from immunization.runs.result import Result
from immunization.runs.resume import INPUTS, result_settings

FOLDER = Path("leaderboard/rows")
"""Rows of all tracks, in a folder each."""
HEADLINES = (
    *("definition/immunized", "steps_ratio", "other_classes/accuracy", "other_classes/accuracy_enlarged"),
    *("ceiling/worth", "worth/before", "worth/removed", "worth/theta_0", "transfer/before", "transfer/after"),
)
"""Measures that rows keep: of these, and of what `_headlines` adds, the leaderboard's tables and pictures are made."""
LOCAL = re.compile(r"""(?<![^\s"'=\[(,:])(?:file://)?~?/(?!/)[^\s"'`,;\])]+""")
"""A path of this machine."""


def write(paths: Iterable[Path], into: Path = FOLDER) -> list[Path]:
    """Write each run at or below `paths` as a row, `<into>/<track>/<method>-<seed>.json`; returns the files.

    Settings of the method that the command names, and the pair of classes, are part of the file's name. Interrupted
    runs are left out, and a failed one leaves a completed row as it is. Raises DataError for a run of no track, for two
    of one name, and for a row of other settings than the one it would replace.
    """
    collection = collect(paths)
    rows: dict[Path, Result] = {}
    failed = [problem.run for problem in collection.problems if problem.kind == "failed" and problem.run]
    for run in [*collection.runs, *failed]:
        path, row = _row(run)
        if rows.setdefault(into / path, row) is not row and run not in failed:
            raise DataError(f"{run.folder} and another run are both the row {path}; give one of them")
    written = [path for path, row in rows.items() if _replaces(path, row)]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows[path].write(path)
    return written


def _replaces(path: Path, row: Result) -> bool:
    """Whether the row is to be written where another may stand, which it cannot be told from by name."""
    try:
        old = Result.read(path)
    except DataError:  # there is none, or nothing that could be trusted
        return True
    if row.status != "completed" and old.status == "completed":
        return False
    both = [flatten(result_settings(result.about[ROW]["config"])) for result in (old, row)]
    places = {key for settings in both for key, value in settings.items() if str(value).startswith("<folder>")}
    if other := [key for key in varying(both) if key not in places | {"device"}]:
        keys = ", ".join(other) if len(other) < 4 else f"{', '.join(other[:2])} and {len(other) - 2} more"
        raise DataError(f"{path} is a row of other settings ({keys}); move it or remove it first")
    return True


def _row(run: Run) -> tuple[Path, Result]:
    """The path of a row below the folder of all, and its content, without paths of this machine."""
    folder, content = run.folder, run.result.as_dict()
    overrides, place = overrides_of(folder), folder / ENVIRONMENT
    if (track := track_of(overrides)) is None:
        raise DataError(f"{folder} is not a run of a track: none of its overrides is {TRACK}<track>")
    if track != slug(track):  # which is to be a folder, and the file is not always one's own
        raise DataError(f"{folder / OVERRIDES}: {track!r} is not the name of a track")
    try:
        environment = dict(json.loads(place.read_text())) if place.is_file() else {}
    except (ValueError, TypeError) as error:
        raise DataError(f"{place} cannot be read: {error}") from error
    row = {
        "track": track,
        "command": _command(run.command, overrides),
        "config": spelled(result_settings(run.config)),
        "environment": {key: value for key, value in environment.items() if key not in ("command", "platform", INPUTS)},
    }
    records = _headlines(run.result)
    told = {*Records(records).by_name, *content["flags"]}
    content |= {"records": [record.as_dict() for record in records], "metrics": {}, "curves": {}}
    content["reasons"] = {name: reason for name, reason in content["reasons"].items() if name in told}
    content["about"] |= {ROW: files.plain(row)}
    named = [word for word in overrides if word.startswith((*TRAINING, LAYERS, "pair="))]
    path = Path(track, f"{slug('-'.join([run.result.method, *named, str(run.result.seed)]))}.json")
    return path, Result.from_dict(_without_paths(content))


def _headlines(result: Result) -> list[Record]:
    """The records that the leaderboard shows, and those of one's own evaluations."""
    of_attacks = [*result.records.family("sgrc_").values()]

    def kept(record: Record) -> bool:
        measure, task = record.measure, record.task
        if record.of.name in result.own_measures:
            return True
        if record.attack:
            worst = record.attack == WORST and measure in ("bar", "fine_tuned", "flops_ratio_searched")
            return worst or record in of_attacks or (measure in ("final", "cost") and record.stage in STAGES)
        primary = task == "primary" and measure not in (*SPECTRA, *PROBES)
        return primary or task == WORST or measure in HEADLINES or record.of == RIR

    return [record for record in result.records.values() if kept(record)]


def _without_paths(value: object) -> Any:
    """JSON with `<folder>` for each path of this machine."""
    if isinstance(value, dict):
        return {_without_paths(key): _without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    return LOCAL.sub("<folder>", value) if isinstance(value, str) else value


def _command(command: str | None, overrides: Sequence[str]) -> str:
    """The command for one job of a multirun: its options without -m, and the overrides of the job."""
    words = shlex.split(command or "python launch.py")
    program = 1 if Path(words[0]).name == "immunize" else 3 if words[1:2] == ["-m"] else 2
    options = [word for word in words[program:] if word not in ("-m", "--multirun", *overrides)]
    options = [word for word in options if "=" not in word or word.startswith("--")]
    return shlex.join([*words[:program], *options, *overrides])


def track_of(overrides: Iterable[str]) -> str | None:
    """The track that overrides choose; None without one."""
    return next((word.removeprefix(TRACK) for word in overrides if word.startswith(TRACK)), None)


def overrides_of(folder: Path) -> list[str]:
    """The overrides of a run, as they were typed; none where its folder does not say."""
    path = folder / OVERRIDES
    words = (files.read_yaml(path) or []) if path.is_file() else []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def job(overrides: Iterable[str], ignored: Collection[str]) -> frozenset[str]:
    """What makes a job of a multirun: its overrides, but for `ignored` keys, which change no number."""
    return frozenset(word for word in overrides if word.partition("=")[0] not in ignored)


def plan(jobs: Sequence[Sequence[str]], sweep: Path, ignored: Collection[str] = ()) -> str:
    """How many of the `jobs` of a track, given by their overrides, are missing in `sweep`, and how long they take.

    A job takes the median of the completed ones, or of the track's rows. `ignored` keys of overrides change no number.
    """
    track, wanted = track_of(jobs[0]) or "", {job(one, ignored) for one in jobs}
    done: set[frozenset[str]] = set()
    seconds: list[float] = []
    for folder in (path.parent for path in sweep.glob(f"*/{OVERRIDES}")):
        with suppress(DataError):
            if (result := Result.read(folder)).status == "completed":
                done.add(job(overrides_of(folder), ignored))
                seconds.append(sum(result.seconds.values()))
    if not seconds and (known := [*(FOLDER / track).glob("*.json")]):
        seconds = [sum(run.result.seconds.values()) for run in collect(known).runs]
    missing = len(wanted - done)
    line = f"track {track}: {len(wanted) - missing} of {len(wanted)} jobs are complete"
    if not missing:
        return line
    hours = (
        f"about {missing * statistics.median(seconds) / 3600:.2g} h one after another" if seconds else "time unknown"
    )
    return f"{line}, {missing} to run: {hours}"
