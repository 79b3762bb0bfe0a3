"""The leaderboard as tables, a figure, files and part of a page: what a method costs, and what attackers pay."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from immunization.errors import DataError
from immunization.results.attack_figures import Point, resistance
from immunization.results.collect import ATTACK, Collection
from immunization.results.columns import Place, placed
from immunization.results.page import Section, kept
from immunization.results.plot import looks
from immunization.results.settings import Setting, grouped, named
from immunization.results.tables import Table
from immunization.runs import files
from immunization.runs.filenames import ENVIRONMENT, ROWS
from immunization.runs.verdict import version

MARKS = "<!-- leaderboard -->", "<!-- /leaderboard -->"
"""Lines of a page; the text between them is replaced."""
APART = ": other attacks, not comparable"


def tracks(collection: Collection) -> list[list[Setting]]:
    """Rows that share data and model, in the order of methods; `apart` says why a row is not comparable."""
    made = []
    for group in grouped(collection, lambda run: run.track):
        rows = named(group, ("dataset.", ATTACK))
        every = [row.attacks for row in rows]
        strongest = max(every, key=lambda attacks: (strength(attacks), every.count(attacks)))
        for row in rows:
            row.apart = weaker(row.attacks, strongest)
        made.append(rows)
    return made


def strength(attacks: Mapping[str, Any]) -> tuple[int, float, float]:
    """Number of attacks, trials of their searches, and budgets; compared in this order."""
    sums = [sum(v for k, v in attacks.items() if k.endswith(end) and v) for end in (".search", ".steps")]
    return (len({key.split(".")[1] for key in attacks}), *sums)


def weaker(attacks: Mapping[str, Any], strongest: Mapping[str, Any]) -> str:
    """How attacks differ from the strongest, in words; empty if they do not."""
    names, all_names = ({key.split(".")[1] for key in keys} for keys in (attacks, strongest))
    words = [f"without {', '.join(sorted(all_names - names))}"] if all_names - names else []
    for key in sorted({*attacks, *strongest}):
        if key.split(".")[1] in names and attacks.get(key) != strongest.get(key):
            words.append(f"{key}={attacks.get(key)} where others have {strongest.get(key)}")
    return "; ".join(words)


def sections(tracks: Iterable[Sequence[Setting]]) -> list[Section]:
    """One section per track: the table, a second one for rows that are not comparable, and the figure."""
    made = []
    for title, rows in _titled(tracks):
        name, look = f"leaderboard_{title.replace(', ', '_')}", looks(rows)
        together, apart = ([row for row in rows if bool(row.apart) is side] for side in (False, True))
        tables = [Table.of(name, title, placed(Place.BOARD), together)]
        if len({len(row.runs) for row in together}) > 1:
            tables[0].notes.insert(0, "Rows have different numbers of runs.")
        if suites := {suite for row in together for result in row.results if (suite := version(result))}:
            tables[0].notes.insert(0, f"Attackers: {', '.join(sorted(suites))}.")
        if apart:
            tables.append(Table.of(f"{name}_apart", f"{title}{APART}", placed(Place.BOARD), apart))
            tables[1].notes[:0] = [f"{row.label}: {row.apart}." for row in apart]
        points = []
        for row in together:
            if (price := row.price) is not None and (cost := row.cost()) is not None:
                held = f" ({row.unbroken()})" if math.isinf(cost) else ""
                points.append(Point(row.label + held, max(price, 0.0), cost, look[row]))
        legend = [column.note for table in tables for column in table.only(Place.TERMINAL).columns if column.note]
        made.append(Section(rows, tables, [resistance(points, name, title)] if points else [], legend))
    return made


def write_rows(tracks: Iterable[Sequence[Setting]], folder: Path) -> list[Path]:
    """Write one JSON file per row into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for title, rows in _titled(tracks):
        for i, row in enumerate(rows, 1):
            written.append(folder / f"{title.replace(', ', '_')}_{i:02d}_{row.method}.json")
            files.write_json(written[-1], record(row))
    return written


def record(row: Setting) -> dict[str, Any]:
    """Everything needed to check the row or to reproduce it."""
    run, results = row.first, row.results
    environment = run.result.folder / ENVIRONMENT
    return {
        "method": row.label,
        "apart": row.apart or None,
        "cells": {column.heading: column.cell(row, column.measure).text for column in placed(Place.BOARD)},
        "config": run.config,
        "command": run.command,
        "attacks": row.attacks,
        "attackers_found": {
            result.folder.name: {k: found for k, found in result.about.items() if k.startswith("attackers")}
            for result in results
        },
        "code": json.loads(environment.read_text()) if environment.is_file() else None,
        "data": run.result.about,
        "rows_sha256": {result.folder.name: files.sha256(result.folder / ROWS) for result in results},
        "runs": [{"seed": r.seed, "metrics": r.metrics, "flags": r.flags} for r in results],
        "failed": {one.result.folder.name: one.result.error for one in row.failed},
    }


def between_marks(path: Path, parts: Sequence[Section], pictures: Mapping[str, str], command: str) -> str:
    """The page at `path` with the tables, without flags, between its marks; raises DataError if it has no marks.

    Other tracks stay as they were `kept`, so their runs need not be present.
    """
    found = re.split(f"^(?:{'|'.join(MARKS)})$", path.read_text() if path.is_file() else "", flags=re.MULTILINE)
    if len(found) != 3:
        raise DataError(f"{path} has no place for the leaderboard: put {MARKS[0]} and {MARKS[1]} on lines of their own")
    before, old, after = found
    tracks = kept(path, {part.tables[0].title: _block(part, pictures) for part in parts}, lambda: _earlier(old))
    text = "\n\n".join(tracks[title]["text"] for title in sorted(tracks))
    columns = {name for track in tracks.values() for name in track["columns"]}
    notes = (column.note for column in placed(Place.BOARD) if column.heading in columns)
    legend = "\n".join(f"- {note}" for note in notes if note)
    lead = f"Written by `{command}`. Do not edit by hand."
    return f"{before}{MARKS[0]}\n{lead}\n\n{text}\n\n{legend}\n{MARKS[1]}{after}"


def _block(part: Section, pictures: Mapping[str, str]) -> dict[str, Any]:
    """One track of a page: tables with their own notes, figure, and the names of the columns."""
    lines, columns = [], []
    for made in part.tables:
        shown = made.only(Place.BOARD_PAGE)
        columns += shown.header
        lines += [f"### {made.title}", shown.pipes()]
        lines += [note for note in made.notes if note not in {column.note for column in made.columns}]
    lines += [plot.markdown(pictures[plot.name]) for plot in part.plots if plot.name in pictures]
    return {"text": "\n\n".join(line.strip() for line in lines), "columns": columns}


def _earlier(page: str) -> dict[str, Any]:
    """The tracks of a page without a JSON file beside it, by title; the legend is not read."""
    found: dict[str, Any] = {}
    for block in re.split("^### ", re.sub(r"(^- .*\n*)+\Z", "", page, flags=re.MULTILINE), flags=re.MULTILINE)[1:]:
        track = found.setdefault(block.partition("\n")[0].removesuffix(APART), {"text": ""})
        track["text"] = f"{track['text']}\n\n### {block}".strip()
        track["columns"] = [c.heading for c in placed(Place.BOARD) if f"| {c.heading} |" in track["text"]]
    return found


def _titled(tracks: Iterable[Sequence[Setting]]) -> Iterator[tuple[str, Sequence[Setting]]]:
    """Tracks by title, data and model; tracks of the same title are numbered from the second on."""
    seen: Counter[str] = Counter()
    for rows in tracks:
        run = rows[0].first.result
        title = f"{run.dataset}, {run.model}"
        seen[title] += 1
        yield title + (f", {seen[title]}" if seen[title] > 1 else ""), rows
