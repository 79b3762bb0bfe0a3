"""Runs on the terminal, within its width: one run as a sheet, many runs as the rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from immunization.results.formatting import MEASURES, NONE, number, roles_in
from immunization.runs.result import Result
from immunization.runs.verdict import attack_groups, attack_names

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def show(results: Result | Iterable[Result], console: Console | None = None) -> None:
    """Print one run as a sheet, or many as rows of a table, with reasons and flags as footnotes."""
    results = [results] if isinstance(results, Result) else list(results)
    view = Sheet(results[0]) if len(results) == 1 else Rows(results)
    (console or Console()).print(view, highlight=False)


def line(result: Result) -> str:
    """A completed run in one line, for the jobs of a sweep."""
    name = result.folder.name if result.folder else result.method
    notes = Footnotes()
    labels = {
        "rir": "RIR",
        "authors/rir": "RIR by authors' κ",
        "ratio_harmful": "(i)",
        "ratio_primary": "(ii)",
        "steps_ratio/harmful": "harmful steps",
    }
    values = [f"{label} {notes.cell(result, key)}" for key, label in labels.items() if key in result.metrics]
    return f"{name}: {', '.join([*values, f'{_seconds(result)} s'])}"


class Footnotes:
    """Numbered notes; the same text keeps its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str | None) -> str:
        """The superscript that points to `text`; nothing where there is no text."""
        if not text:
            return ""
        if text not in self.texts:
            self.texts.append(text)
        return str(self.texts.index(text) + 1).translate(SUPERSCRIPT)

    def cell(self, result: Result, name: str) -> str:
        """A metric as text; where it is null, a dash and the mark of its reason."""
        value = result.metrics.get(name)
        return NONE + self.mark(result.reasons.get(name)) if value is None else number(value)

    def share(self, result: Result) -> str:
        """How much of the ceiling was attained, in percent of its logarithm."""
        value = result.metrics.get("ceiling/attained")
        return self.cell(result, "ceiling/attained") if value is None else f"{100 * value:.0f} %"

    def verdict(self, result: Result) -> str:
        """Definition 3.1: yes, or no with the conditions that do not hold."""
        holds = {letter: result.metrics.get(f"definition/{letter}") for letter in "abc"}
        if result.metrics.get("definition/immunized") is None:
            return self.cell(result, "definition/immunized")
        failed = [letter for letter, value in holds.items() if not value]
        return f"no ({', '.join(failed)})" if failed else "yes"

    def flag(self, result: Result, flag: str) -> str:
        """The mark of a flag, whose name stands in the note."""
        return self.mark(f"{flag}: {result.reasons.get(flag, 'no reason given')}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _list({self.mark(text): text for text in self.texts})


class Sheet:
    """One run, key by key: condition numbers side by side by split and convention, then what they mean in practice."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        result, notes = self.result, Footnotes()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(max_width=32)
        for _ in range(3):
            grid.add_column(justify="right")

        ratios = {
            "(i)  harmful κ / baseline": "ratio_harmful",
            "(ii) primary κ / baseline": "ratio_primary",
            "RIR = (i) / (ii)": "rir",
        }
        if any(name in result.metrics for name in ratios.values()):
            _head(grid, "", "training", "held out", "authors' κ")
            for label, name in ratios.items():
                cells = (notes.cell(result, prefix + name) for prefix in ("", "test/", "authors/"))
                grid.add_row(label, *cells, style="bold" if name == "rir" else None)
        if "ceiling/rir" in result.metrics:
            grid.add_row("ceiling RIR*, log share", notes.cell(result, "ceiling/rir"), notes.share(result))

        pairs = {"κ, harmful task": "kappa_harmful", "κ, primary task": "kappa_primary"}
        pairs |= {f"primary {text}, held out": f"primary/{name}" for name, text in MEASURES.items()}
        pairs["primary accuracy, own head"] = "primary/head_accuracy"
        pairs = {label: name for label, name in pairs.items() if f"{name}_baseline" in result.metrics}
        if pairs:
            _head(grid, "", "baseline", "immunized")
            for label, name in pairs.items():
                grid.add_row(label, notes.cell(result, f"{name}_baseline"), notes.cell(result, name))

        roles = roles_in(result.metrics, "steps_ratio")
        for some in (roles[i : i + 3] for i in range(0, len(roles), 3)):
            _head(grid, "", *some)
            for label, name in {"steps of a probe / baseline": "steps_ratio", "mean deviation (RFD)": "rfd"}.items():
                grid.add_row(label, *(notes.cell(result, f"{name}/{role}") for role in some))

        for group in attack_groups(result):
            if attacks := attack_names(result, group):
                task = group.partition("_")[2] or "harmful"
                _head(grid, f"attacks on the {task} task", "baseline", "immunized", "steps ratio")
                for name in attacks:
                    keys = (f"{group}/{name}/{key}" for key in ("final_baseline", "final", "steps_ratio"))
                    grid.add_row(name, *(notes.cell(result, key) for key in keys))

        yield Text.assemble((result.method, "bold"), f" on {result.dataset}, {result.model}, seed {result.seed}")
        yield Padding(grid, (0, 0, 1, 2))
        for sentence in result.verdict:
            yield Padding(Text(sentence), (0, 0, 1, 2))
        yield Padding(_facts(result, notes), (0, 0, 0, 2))
        yield Padding(notes, (1 if notes.texts else 0, 0, 0, 2))


class Rows:
    """Many runs, one a row; columns that do not fit the width go to a further table below, rows keep their number."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        notes = Footnotes()
        first, *columns = self._columns(notes)
        room = options.max_width
        while columns:
            chunk, width = [first], _width(first)
            while columns and (len(chunk) == 1 or width + _width(columns[0]) <= room):
                width += _width(columns[0])
                chunk.append(columns.pop(0))
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
            for position, (header, _) in enumerate(chunk):
                table.add_column(header, justify="left" if position == 0 else "right", vertical="bottom", no_wrap=True)
            for row in zip(*(cells for _, cells in chunk), strict=True):
                table.add_row(*map(Text, row))
            yield Padding(table, (0, 0, 1, 0))
        yield notes
        yield _list({str(i): _short(run.folder) for i, run in enumerate(self.results, 1) if run.folder})

    def _columns(self, notes: Footnotes) -> list[tuple[str, list[str]]]:
        """Header and cells; columns in which nothing was measured are left out."""
        results = self.results

        def metric(header: str, name: str) -> tuple[str, list[str]] | None:
            if not any(name in result.metrics for result in results):
                return None
            return header, [notes.cell(result, name) for result in results]

        columns = [
            ("run", [f"{i} {label}" for i, label in enumerate(_labels(results, notes), 1)]),
            metric("(i)", "ratio_harmful"),
            metric("(ii)", "ratio_primary"),
            metric("RIR", "rir"),
            metric("RIR\nheld out", "test/rir"),
            metric("RIR\nauthors' κ", "authors/rir"),
            ("ceiling\nlog share", [notes.share(result) for result in results]),
            ("Def. 3.1", [notes.verdict(result) for result in results]),
        ]
        for name, text in MEASURES.items():
            if after := metric("", f"primary/{name}"):
                before = (notes.cell(result, f"primary/{name}_baseline") for result in results)
                changes = [" → ".join(pair) for pair in zip(before, after[1], strict=True)]
                columns.append((f"primary {text}\nbefore → after", changes))
        roles = roles_in((name for result in results for name in result.metrics), "steps_ratio")
        columns += [metric(f"steps ratio\n{role}", f"steps_ratio/{role}") for role in roles]
        columns.append(("seconds", [_seconds(result) for result in results]))
        columns.append(("flags", ["".join(notes.flag(result, flag) for flag in result.flags) for result in results]))
        return [column for column in columns if column and any(cell.strip(NONE) for cell in column[1])]


def _list(items: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for key, text in items.items():
        grid.add_row(Text(key, "dim"), Text(text, "dim", overflow="fold"))
    return grid


def _head(grid: Table, *cells: str) -> None:
    if grid.rows:
        grid.add_row()
    grid.add_row(*(Text(cell, "dim") for cell in cells))


def _facts(result: Result, notes: Footnotes) -> Table:
    """What is text rather than numbers: verdict, flags, error, seconds, folder."""
    facts = Table.grid(padding=(0, 2))
    if result.status != "completed":
        facts.add_row("status", Text(f"{result.status}: {result.error}", "bold red"))
    elif not result.metrics:
        facts.add_row("note", Text("nothing was measured: choose evaluation=[rir,...] or attack=[...]"))
    if "definition/immunized" in result.metrics:
        facts.add_row("Definition 3.1", notes.verdict(result))
    if result.flags:
        facts.add_row("flags", Text(", ".join(flag + notes.flag(result, flag) for flag in result.flags), "yellow"))
    facts.add_row("seconds", ", ".join(f"{name} {value:.3g}" for name, value in result.seconds.items()) or NONE)
    if result.folder is not None:
        facts.add_row("run folder", Text(_short(result.folder), overflow="fold"))
    return facts


def _labels(results: Sequence[Result], notes: Footnotes) -> list[str]:
    """The method, whatever else tells the runs apart, and a failure."""
    keys = [key for key in ("dataset", "model", "seed") if len({getattr(result, key) for result in results}) > 1]
    labels = []
    for result in results:
        parts = [result.method, *(f"seed {result.seed}" if key == "seed" else getattr(result, key) for key in keys)]
        if result.status != "completed":
            parts.append(result.status + notes.mark(result.error))
        labels.append(" ".join(parts))
    return labels


def _seconds(result: Result) -> str:
    return number(sum(result.seconds.values())) if result.seconds else NONE


def _width(column: tuple[str, list[str]]) -> int:
    header, cells = column
    return max(map(cell_len, [*header.split("\n"), *cells])) + 2


def _short(folder: Path) -> str:
    """The folder relative to the working directory where it lies inside."""
    folder = folder.resolve()
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
