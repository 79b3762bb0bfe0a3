"""The leaderboard as tables, a figure, files and the part of a page: what rows cost, and what attackers pay."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from immunization.errors import DataError
from immunization.results.collect import Collection
from immunization.results.formatting import NONE, number
from immunization.results.leaderboard_figure import Point, resistance
from immunization.results.leaderboard_rows import Row, median
from immunization.results.page import Section, number_settings, show_left_out
from immunization.results.plot import looks
from immunization.results.settings import Setting
from immunization.results.tables import Cell, Table
from immunization.runs import strict_json
from immunization.runs.filenames import ENVIRONMENT, ROWS
from immunization.runs.verdict import BAR, successes

SCREEN = ("method", "runs", "primary, before → after", "cheapest attack", "cost / baseline's", "RIR", "Def. 3.1")
"""Columns on a terminal."""
MARKS = "<!-- leaderboard -->", "<!-- /leaderboard -->"
"""What stands between them in a page is replaced."""
APART = ": other attacks, not comparable"
HELD, UNTRAINED = "held", "not attacked by training"
"""No attack learns the task: one fine-tuned all that was trained, or none did."""
NOTES = {
    "primary, before → after": "Primary: held out, the model's own head where it has one, else a retrained head; "
    "accuracy is a mean ± standard deviation over seeds, of the mean over pairs. R² and loss, which one run can carry "
    "off, and ratios are medians over runs.",
    "primary probe": "Probes: steps of gradient descent over those with the baseline; 1 or less is no loss of primary "
    "and benign tasks.",
    "cost / baseline's": "Cost: operations of the cheapest attack that learns the harmful task over those of the "
    "cheapest with the baseline; of several harmful tasks the least. Held: in most runs none does within its budget, "
    "which is no proof; not attacked by training: the same, but no attack fine-tuned the whole net.",
    "searched, before → after": "Searched: the best, held out, that attackers reach who search for their settings.",
    "SGRC": "SGRC: share of the held-out accuracy that immunization takes from one who fine-tunes the whole net, after "
    "the fewest and the most epochs asked for.",
    "unseen cost / baseline's": "Unseen: harmful data that no method was shown.",
}
"""What a column means, by its name."""


def sections(tracks: Iterable[Sequence[Row]]) -> list[Section]:
    """One for each track: the table, one more for what stands apart, and the figure."""
    made = []
    for title, rows in _titled(tracks):
        name = f"leaderboard_{_file(title)}"
        together, apart = ([row for row in rows if bool(row.apart) is bool(side)] for side in (0, 1))
        unequal = (
            ["The rows have different numbers of runs."] if len({len(row.results) for row in together}) > 1 else []
        )
        tables = [table(together, name, title, unequal)]
        if apart:
            reasons = [f"{row.setting.label}: {row.apart}." for row in apart]
            tables.append(table(apart, f"{name}_apart", f"{title}{APART}", reasons))
        look = looks([row.setting for row in rows])
        points = [
            Point(row.setting.label, max(price, 0.0), cost, look[row.setting], HELD if row.fine_tuned() else UNTRAINED)
            for row in together
            if (price := row.price) is not None and (cost := row.cost()) is not None
        ]
        made.append(
            Section([row.setting for row in rows], tables, [resistance(points, name, title)] if points else [], [])
        )
    return made


def table(rows: Sequence[Row], name: str, title: str, notes: Sequence[str]) -> Table:
    """The leaderboard of some rows; columns that none has anything in are left out."""
    every = [cells(row) for row in rows]
    header = [key for key in every[0] if key in SCREEN or any(row[key].text != NONE for row in every)]
    notes = [*notes, *(text for column, text in NOTES.items() if column in header)]
    return Table(name, title, header, [[row[key] for key in header] for row in every], notes)


def cells(row: Row) -> dict[str, Cell]:
    """One row, by the names of its columns."""
    setting, broken = row.setting, [successes(result) for result in row.results if BAR in result.metrics]
    best = [name for found in broken for name in list(found)[:1]]
    others = {"failed": setting.failed, "interrupted": setting.interrupted}
    runs = ", ".join([f"{len(setting.runs)}", *(f"{len(some)} {kind}" for kind, some in others.items() if some)])
    seeds = len({result.seed for result in row.results})
    flags = {flag: None for result in row.results for flag in result.flags}
    definition = setting.summary("definition/immunized")
    return {
        "method": Cell(setting.label),
        "runs": Cell(runs, len(setting.runs)),
        "seeds": Cell(str(seeds), seeds),
        "primary, before → after": _primary(row),
        "primary probe": Cell.of(setting.median("steps_ratio/primary")),
        "benign probe": Cell.of(setting.median("steps_ratio/benign")),
        "learned in": Cell(f"{sum(map(bool, broken))} of {len(broken)}", sum(map(bool, broken)))
        if broken
        else Cell(NONE),
        "cheapest attack": Cell(statistics.mode(best) if best else NONE),
        "cost / baseline's": _cost(row.cost(), row.fine_tuned()),
        "searched, before → after": _searched(row),
        "searched cost / baseline's": _cost(row.cost(only=row.searched) if row.searched else None, row.fine_tuned()),
        "SGRC": _sgrc(row),
        "unseen cost / baseline's": _cost(row.cost("unseen"), row.fine_tuned("unseen")),
        "unseen probe": Cell.of(setting.median("steps_ratio/unseen")),
        "harmful probe": _worst(setting, "worst/steps_ratio", "steps_ratio/harmful"),
        "RIR": _worst(setting, "worst/rir", "rir"),
        "Def. 3.1": Cell(f"{100 * definition.mean:.0f} %", definition.mean) if definition.n else Cell(NONE),
        "flags": Cell(_failures(setting) or ", ".join(flags) or NONE),
    }


def write_rows(tracks: Iterable[Sequence[Row]], folder: Path) -> list[Path]:
    """One JSON file a row in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for title, rows in _titled(tracks):
        for i, row in enumerate(rows, 1):
            written.append(folder / f"{_file(title)}_{i:02d}_{row.setting.method}.json")
            strict_json.write(written[-1], record(row))
    return written


def record(row: Row) -> dict[str, Any]:
    """Everything that is needed to check the row, or to make it again."""
    run, results = row.setting.first, row.results
    environment = run.result.folder / ENVIRONMENT
    return {
        "method": row.setting.label,
        "apart": row.apart or None,
        "cells": {key: cell.text for key, cell in cells(row).items()},
        "config": run.config,
        "command": run.command,
        "attacks": row.attacks,
        "attackers_found": {
            result.folder.name: {k: found for k, found in result.about.items() if k.startswith("attackers")}
            for result in results
        },
        "code": json.loads(environment.read_text()) if environment.is_file() else None,
        "data": run.result.about,
        "rows_sha256": {result.folder.name: _digest(result.folder / ROWS) for result in results},
        "runs": [{"seed": r.seed, "metrics": r.metrics, "flags": r.flags} for r in results],
        "failed": {one.result.folder.name: one.result.error for one in row.setting.failed},
    }


def show(collection: Collection, parts: Sequence[Section], console: Console) -> None:
    """Print the tables with some of their columns, and what was left out."""
    shown = dict.fromkeys(name for part in parts for made in part.tables for name in made.header if name in SCREEN)
    for part in parts:
        names = number_settings(part.group, console)
        for made in part.tables:
            console.print()
            console.print(made.only(SCREEN).renamed(names))
    legend = (NOTES[name] for name in shown if name in NOTES)
    console.print("", *legend, sep="\n", markup=False, highlight=False)
    show_left_out(collection, console)


def between_marks(path: Path, parts: Sequence[Section], pictures: Mapping[str, str], command: str) -> str:
    """The page at `path` with the tables, without flags, between its marks; raises DataError where it has none.

    What stands there of other tracks stays: to make one again, the runs of the others need not be there.
    """
    before, _, rest = path.read_text().partition(MARKS[0]) if path.is_file() else ("", "", "")
    old, found, after = rest.partition(MARKS[1])
    if not found:
        raise DataError(f"{path} has no place for the leaderboard: put {MARKS[0]} and {MARKS[1]} where it shall stand")
    blocks = _blocks(old) | {part.tables[0].title: _block(part, pictures) for part in parts}
    text = "\n\n".join(blocks[title] for title in sorted(blocks))
    legend = "\n".join(f"- {note}" for column, note in NOTES.items() if f"| {column} |" in text)
    lead = f"Written by `{command}`, which leaves other tracks as they are; do not edit by hand."
    return f"{before}{MARKS[0]}\n{lead}\n\n{text}\n\n{legend}\n{MARKS[1]}{after}"


def _block(part: Section, pictures: Mapping[str, str]) -> str:
    """One track of a page: its tables, each with its own notes, and its figure."""
    lines = []
    for made in part.tables:
        shown = made.only([name for name in made.header if name != "flags"])
        lines += [f"### {made.title}", shown.pipes(), *(note for note in made.notes if note not in NOTES.values())]
    lines += [plot.markdown(pictures[plot.name]) for plot in part.plots if plot.name in pictures]
    return "\n\n".join(line.strip() for line in lines)


def _blocks(page: str) -> dict[str, str]:
    """The tracks that stand in a page, by title; what the legend at its end says is made anew."""
    found: dict[str, str] = {}
    for block in re.split("^### ", re.sub(r"(^- .*\n*)+\Z", "", page, flags=re.MULTILINE), flags=re.MULTILINE)[1:]:
        title = block.partition("\n")[0].removesuffix(APART)
        found[title] = "\n\n".join([*([found[title]] if title in found else []), f"### {block.strip()}"])
    return found


def _titled(tracks: Iterable[Sequence[Row]]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Tracks by data and model, with a number from the second of the same names on (other classes, other images)."""
    seen: Counter[str] = Counter()
    for rows in tracks:
        run = rows[0].setting.first.result
        title = f"{run.dataset}, {run.model}"
        seen[title] += 1
        yield title + (f", {seen[title]}" if seen[title] > 1 else ""), rows


def _file(title: str) -> str:
    return title.replace(", ", "_")


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _primary(row: Row) -> Cell:
    if row.primary is None:
        return Cell(NONE)
    before, after = row.primary
    std = row.setting.summary(row.measure).std if row.measure.endswith("accuracy") else math.nan
    spread = "" if math.isnan(std) else f" ± {std:.3f}"
    return Cell(f"{before:.3f} → {after:.3f}{spread}", after)


def _worst(setting: Setting, *names: str) -> Cell:
    """The first measure that there is: over several harmful tasks, else of the only one."""
    return Cell.of(next((value for name in names if (value := setting.median(name)) is not None), None))


def _cost(ratio: float | None, fine_tuned: bool) -> Cell:
    if ratio is None:
        return Cell(NONE)
    return Cell(number(ratio), ratio) if math.isfinite(ratio) else Cell(HELD if fine_tuned else UNTRAINED, 1e300)


def _searched(row: Row) -> Cell:
    """The best that searched attackers reach, medians over runs."""

    def best(suffix: str) -> float | None:
        finals = (
            [result.metrics.get(f"attack/{name}/final{suffix}") for name in row.searched] for result in row.results
        )
        return median(max((final for final in some if final is not None), default=None) for some in finals)

    before, after = best("_baseline"), best("")
    return Cell(NONE) if before is None or after is None else Cell(f"{before:.3f} → {after:.3f}", after)


def _sgrc(row: Row) -> Cell:
    """SGRC at the fewest and at the most epochs, medians over runs."""
    names = {name for result in row.results for name in result.metrics if name.startswith("attack/sgrc/sgrc_")}
    known = [
        value
        for name in sorted(names, key=lambda name: int(name.rpartition("_")[2]))
        if (value := row.setting.median(name)) is not None
    ]
    return Cell(" / ".join(f"{value:.3f}" for value in (known[0], known[-1])), known[-1]) if known else Cell(NONE)


def _failures(setting: Setting) -> str:
    return "; ".join(dict.fromkeys(f"failed: {run.result.error}" for run in setting.failed))
