"""The leaderboard, made from its rows: a table and a picture per track, a part of a Markdown page, and its own page."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from immunization.config import slug
from immunization.errors import DataError
from immunization.results.attack_figures import worth_removed
from immunization.results.collect import ATTACK
from immunization.results.collect import Collection as Runs
from immunization.results.columns import REMOVED, board_columns, breaker
from immunization.results.formatting import Cell, markdown, template
from immunization.results.page import Section
from immunization.results.seed_statistics import ROUNDING
from immunization.results.settings import Setting, grouped, named, title
from immunization.results.tables import Table
from immunization.roles import kind_of
from immunization.runs import files
from immunization.runs.filenames import ENVIRONMENT
from immunization.runs.interpretation import newer, version
from immunization.runs.records import Query
from immunization.runs.result import Result

REPORT = "leaderboard.html"
MARKS = "<!-- leaderboard -->", "<!-- /leaderboard -->"
"""Lines of a page; the text between them is replaced."""
WORTH = REMOVED, REMOVED._replace(images=20), REMOVED._replace(images=5)
"""What rows may be sorted by: with all images of each class, or so many."""
LOSS = 0.02
"""Of the primary measure and of the accuracies on other classes, which a row may lose and still has a rank."""
SEEDS = 3
"""That a rank needs."""
SHOWN = 3
"""Runs of a row whose attackers and commands the page shows."""
BELOW = "No rank: accuracy on the own task or on other classes fell by more than two points, or was not measured"


def rows_below(paths: Iterable[Path]) -> list[Path]:
    """The files of rows at or below `paths`; raises DataError where there is none, or a run in their place."""
    files_of_rows = [row for path in paths for row in ([path] if path.is_file() else sorted(path.rglob("*.json")))]
    made = "python -m immunization.results rows PATH... makes them from runs"
    if not files_of_rows:
        raise DataError(f"no row in or below {', '.join(map(str, paths))}: {made}")
    if run := next((row.parent for row in files_of_rows if row.name in (Result.file, ENVIRONMENT)), None):
        raise DataError(f"{run} is a run and not a row of the leaderboard: {made} of its tracks")
    return files_of_rows


def tracks(collection: Runs) -> list[list[Setting]]:
    """Rows that share track, suite, data and model, sorted and ranked; `apart` says why one is not comparable."""
    made = []
    for group in grouped(collection, lambda run: run.board):
        rows = named(group, ("dataset.", ATTACK))
        every = [row.attacks for row in rows]
        strongest = max(every, key=lambda attacks: (strength(attacks), every.count(attacks)))
        for row in rows:
            row.apart = weaker(row.attacks, strongest)
        made.append(ranked(rows))
    return made


def measure(rows: Collection[Setting]) -> Query:
    """The measure of worth that most rows have, of equals the one with the most images."""
    return max(WORTH, key=lambda of: sum(row.removed(of) is not None for row in rows))


def ranked(rows: Sequence[Setting]) -> list[Setting]:
    """Sorted by worth removed, those that lose little first.

    These have a rank if they remove something, by their intervals, and enough seeds completed.
    """
    worth = measure(rows)
    shares = {row: row.removed(worth) or (-math.inf,) * 3 for row in rows}
    rows = sorted(rows, key=lambda row: (not keeps(row), -shares[row][0]))
    placed: list[float] = []
    for row in rows:
        share, low, _ = shares[row]
        if keeps(row) and not row.apart and low > ROUNDING:
            seeds = len({result.seed for result in row.results})
            enough = seeds >= SEEDS and not row.failed
            placed += [share] * enough
            place = 1 + sum(other > share + ROUNDING for other in placed)  # equal ones share it
            row.rank = str(place) if enough else f"{len(row.failed)} failed" if row.failed else _seeds(seeds)
    return rows


def _seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


def keeps(row: Setting) -> bool:
    """Whether a row loses at most `LOSS` (`Setting.lost`)."""
    return row.lost is not None and row.lost <= LOSS + ROUNDING


def stakes(rows: Iterable[Setting]) -> list[str]:
    """What theta_0 is worth to an attacker in a track, by the first row that says so, `identity` before others.

    A method that trains other layers has attackers of these layers, too, who may do better.
    """
    rows = sorted(rows, key=lambda row: row.method != "identity")
    for records in (result.records for row in rows for result in row.results):
        worth = [records.get("worth/theta_0", "harmful", images=images) for images in (5, 10, 20, None)]
        shown = [
            f"{r.value:.2f} ({r.low:.2f} to {r.high:.2f}) with {r.images or 'all'}"
            for r in worth
            if r and None not in (r.value, r.low, r.high)
        ]
        if shown:
            return [f"The worth of theta_0 (95 % interval) is {', '.join(shown)} images of each class."]
    return []


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


def sections(collection: Runs) -> list[Section]:
    """A table and a picture per track, suite and data; rows that are not comparable follow with theirs."""
    made, groups = [], tracks(collection)
    for group in sorted(groups, key=lambda rows: rows[0].first.track):
        worth, track = measure(group), group[0].first.track
        heading = title(group, [other for other in groups if other[0].first.track == track])
        heading = f"{track}: {heading}" if track else heading
        moved = (r for row in group for result in row.results for r in result.records.where(measure="transfer/after"))
        columns = board_columns(dict.fromkeys(r.task for r in moved if r.task and kind_of(r.task) == "benign"))
        plot = worth_removed(group, WORTH, _named(heading), heading, 100 * LOSS)
        plots = [plot] if plot else []
        for words, apart in (("", False), (": not comparable", True)):
            if not (rows := [row for row in group if bool(row.apart) is apart]):
                continue
            table = Table.of(_named(heading + words), heading + words, columns, rows)
            notes = [f"{row.label}: {row.apart}." for row in rows if apart] + stakes(rows)
            if suites := {suite for row in rows for result in row.results if (suite := version(result))}:
                notes.append(f"Attackers: {', '.join(sorted(suites))}.")
                notes += [
                    f"{old} is an earlier suite: its rows cannot be compared with those of {now}."
                    for old in sorted(suites)
                    if (now := newer(old))
                ]
            if any(row.removed(worth) for row in rows):
                notes.append(f"Sorted by worth removed with {worth.images or 'all'} images of each class.")
            if len({len(row.runs) for row in rows}) > 1:
                notes.append("Rows have different numbers of runs.")
            table.notes[:0] = notes
            legend = [column.note for column in table.only("terminal").columns if column.note]
            made.append(Section(rows, [table], plots, legend))
            plots = []
    return made


def _named(heading: str) -> str:
    return slug("_".join(["leaderboard", *re.findall(r"[\w.-]+", heading)]))


def between_marks(path: Path, parts: Sequence[Section], pictures: Mapping[str, str], command: str) -> str:
    """The page at `path` with the tables, without flags, between its marks; raises DataError if it has no marks."""
    pieces = re.split(
        f"^(?:{'|'.join(MARKS)})$", path.read_text(encoding="utf-8") if path.is_file() else "", flags=re.MULTILINE
    )
    if len(pieces) != 3:
        raise DataError(f"{path} has no place for the leaderboard: put {MARKS[0]} and {MARKS[1]} on lines of their own")
    lines = [f"Written by `{command}`. Do not edit by hand."]
    notes: dict[str, None] = {}
    for part in parts:
        (table,) = part.tables
        shown, kept = table.only("page"), sum(map(keeps, part.group))
        if kept < len(shown.rows):
            shown.rows.insert(kept, [Cell(f"*{BELOW}:*"), *(Cell("") for _ in shown.header[1:])])
        notes |= dict.fromkeys(column.note for column in shown.columns if column.note)
        lines += [f"### {markdown(table.title)}", shown.pipes(), *map(markdown, _own_notes(table))]
        lines += [plot.markdown(pictures[plot.name]).strip() for plot in part.plots if plot.name in pictures]
    text = "\n\n".join([*lines, "\n".join(f"- {note}" for note in notes)])
    return f"{pieces[0]}{MARKS[0]}\n{text}\n{MARKS[1]}{pieces[2]}"


def _own_notes(table: Table) -> list[str]:
    """The notes on a table, without those on its columns."""
    return [note for note in table.notes if note not in {column.note for column in table.columns}]


def write(path: Path, collection: Runs, parts: Sequence[Section], heading: str) -> None:
    """Write the page for a browser: sortable, and with a choice of tracks and rows."""
    shown: list[tuple[Section, str, str, list[str]]] = []
    legend: dict[str, None] = {}
    for part in parts:
        table = part.tables[0].only("browser")
        place = table.header.index("broken by")
        for i, row in enumerate(table.rows, 1):
            row[place].link = f"#{table.name}-{i}"
        grid = _parted(table.html(), sum(map(keeps, part.group)), len(table.header))
        shown.append((part, table.name, grid, _own_notes(part.tables[0])))
        legend |= dict.fromkeys(column.note for column in table.columns if column.note)
    page = template(REPORT, code=str, breaker=breaker)
    files.write(path, page.render(title=heading, parts=shown, legend=legend, most=SHOWN))


def _parted(table: str, kept: int, width: int) -> str:
    """A <table> of `width` columns with a line that says `BELOW` before row `kept`, if there is such a row."""
    rows = table.split("<tr>")[2:]
    if kept >= len(rows):
        return table
    head, tail = table.rsplit("<tr>", len(rows) - kept)[0], "<tr>".join(["", *rows[kept:]])
    return f'{head}</tbody><tbody class="line"><tr><td colspan="{width}">{BELOW}</td></tr></tbody><tbody>{tail}'
