"""The end of a run: its sheet or line on the terminal, pictures, an audit's page, and the end of its trackers."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from immunization.results import run_figures
from immunization.results.columns import listed, own_measures
from immunization.results.formatting import NONE, PRIMARY
from immunization.results.settings import (
    CEILING,
    HARMFUL_STEPS,
    IMMUNIZED,
    RATIO_HARMFUL,
    RATIO_PRIMARY,
    RIR,
    STEPS,
    authors,
)
from immunization.runs.interpretation import attack_names, attacked, interval_of, shown
from immunization.runs.numbers import number
from immunization.runs.records import Query, query_of
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker
from immunization.runs.verdict import EASIER
from immunization.terminal import waiting

log = logging.getLogger(__name__)

LINE = {
    RIR: "RIR",
    authors(RIR): "RIR by authors' κ",
    RATIO_HARMFUL: "(i)",
    RATIO_PRIMARY: "(ii)",
    HARMFUL_STEPS: "harmful steps",
}
RATIOS = {
    RATIO_HARMFUL: "(i)  harmful κ / baseline",
    RATIO_PRIMARY: "(ii) primary κ / baseline",
    RIR: "RIR = (i) / (ii)",
}
"""On training and on held-out inputs, and by the authors' κ."""
ATTAINED = Query("ceiling/attained")
CHANGES = {
    Query("kappa", "harmful"): "κ, harmful task",
    Query("kappa", "primary"): "κ, primary task",
    **{Query(name, "primary"): f"primary {text}, held out" for name, text in PRIMARY.items()},
    Query("head_accuracy", "primary"): "primary accuracy, own head",
}
"""With the baseline and immunized."""
TASKS = {STEPS: "steps of a probe / baseline", STEPS._replace(measure="rfd"): "mean deviation (RFD)"}
"""Of every task."""
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def present(
    result: Result, trackers: Sequence[Tracker], quiet: bool, figures: bool | None = None, objective: str = "rir"
) -> None:
    """Print, draw and write what `result` holds, and close the trackers; nothing that fails here fails the run.

    `quiet` prints one line instead of the table, and draws pictures only with `figures=True`.
    """
    with _harmless("the table cannot be printed"):  # first: the rest takes seconds
        if quiet:
            print(line(result, objective), flush=True)
        else:
            show(result, objective)
            sys.stdout.flush()
    pictures: list[Path] = []
    folder = result.folder or Path()
    with _harmless("the pictures cannot be drawn"), waiting("drawing the pictures"):
        if figures or (figures is None and not quiet):
            pictures = run_figures.draw(result, folder)
    if attacked(result):
        with _harmless("the report cannot be written"):
            from immunization.results import page  # loads pandas and jinja2, which other runs can do without

            page.audit(folder)
    for tracker in trackers:
        with waiting("handing over to the tracker"):
            tracker.finish(result, pictures)
        tracker.close(failed=False)


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    """Turn an exception into a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s (%s: %s); the result is complete", what, type(error).__name__, error)


def show(result: Result, objective: str = "rir", console: Console | None = None) -> None:
    """Print a run as a sheet, with what it is to maximize, and reasons and flags as footnotes."""
    (console or Console(markup=False)).print(Group(*_Sheet(result).parts(query_of(objective))), highlight=False)


def line(result: Result, objective: str = "rir") -> str:
    """A completed run in one line, for the jobs of a sweep."""
    sheet = _Sheet(result)
    labels = {query_of(objective): objective} | LINE | listed()
    values = [f"{label} {sheet.cell(of)}" for of, label in labels.items() if sheet.has(of)]
    seconds = number(sum(result.seconds.values())) if result.seconds else NONE
    name = result.folder.name if result.folder else result.method
    return f"{name}: {', '.join([*values, f'{seconds} s'])}"


class _Sheet:
    """One run, key by key: condition numbers side by side by split and convention, then what they mean in practice."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.notes: dict[str, str] = {}  # with their numbers; the same text keeps its number
        self.grid = Table.grid(padding=(0, 2))
        self.grid.add_column(max_width=32, overflow="fold")
        for _ in range(3):
            self.grid.add_column(justify="right")

    def has(self, of: Query) -> bool:
        return of.name in self.result.records.by_name

    def mark(self, text: str | None) -> str:
        """The superscript that points to `text`; empty without text."""
        return self.notes.setdefault(text, str(len(self.notes) + 1).translate(SUPERSCRIPT)) if text else ""

    def cell(self, of: Query) -> str:
        """A number as text; where it is missing, a dash and the mark of its reason."""
        record, part = self.result.records.by_name.get(of.name, (None, ""))
        if record is None or getattr(record, part) is None:
            return NONE + self.mark(self.result.reasons.get(of.name))
        return shown(self.result, record, part)

    def head(self, *cells: str) -> None:
        if self.grid.rows:
            self.grid.add_row()
        self.grid.add_row(*(Text(cell, "dim") for cell in cells))

    def row(self, label: str, *queries: Query, style: str | None = None) -> None:
        self.grid.add_row(label, *map(self.cell, queries), style=style)

    def row_with_intervals(self, label: str, *queries: Query) -> None:
        """A row, and below it the 95 % intervals of its values, where there are some."""
        self.row(label, *queries)
        records = (self.result.records.get(*of) for of in queries)
        texts = [interval_of(self.result, record) if record else "" for record in records]
        if any(texts):
            self.grid.add_row("  95 % interval", *texts, style="dim")

    def parts(self, objective: Query) -> Iterator[RenderableType]:
        """All that is printed, from top to bottom."""
        result = self.result
        self._measures(objective)
        self._attacks()
        yield Text.assemble((result.method, "bold"), f" on {result.dataset}, {result.model}, seed {result.seed}")
        first, rest = result.verdict[:1], result.verdict[1:]  # the first, which claims least, comes before every figure
        for sentence in first:
            yield Padding(Text(sentence, "bold red" if EASIER in result.flags else "bold"), (0, 0, 1, 2))
        yield Padding(self.grid, (0, 0, 1, 2))
        for sentence in rest:
            yield Padding(Text(sentence), (0, 0, 1, 2))
        yield Padding(self._facts(), (0, 0, 0, 2))
        footnotes = Table.grid(padding=(0, 1))
        for text, mark in self.notes.items():
            footnotes.add_row(Text(mark, "dim"), Text(text, "dim", overflow="fold"))
        yield Padding(footnotes, (1 if self.notes else 0, 0, 0, 2))

    def _measures(self, objective: Query) -> None:
        records = self.result.records
        if any(map(self.has, RATIOS)):
            self.head("", "training", "held out", "authors' κ")
            for of, label in RATIOS.items():
                self.row(label, of, of._replace(split="test"), authors(of), style="bold" if of == RIR else None)
        if self.has(CEILING):
            share = records.value(ATTAINED.measure)
            cells = [self.cell(CEILING), self.cell(ATTAINED) if share is None else f"{100 * share:.0f} %"]
            self.grid.add_row("ceiling RIR*, log share", *cells)

        changes = {of: (of._replace(stage="baseline"), of) for of in CHANGES}
        if changes := {of: both for of, both in changes.items() if self.has(both[0])}:
            self.head("", "baseline", "immunized")
            for of, both in changes.items():
                self.row_with_intervals(CHANGES[of], *both)

        roles = records.tasks("steps_ratio")
        for some in (roles[i : i + 3] for i in range(0, len(roles), 3)):
            self.head("", *some)
            for of, label in TASKS.items():
                self.row_with_intervals(label, *(of._replace(task=role) for role in some))

        if layers := records.family("selectivity/", "/lost"):
            self.head("to forget harmful images", "others lost", "switched off")
            for layer in layers:
                self.row(layer, *(Query(f"selectivity/{layer}/{what}") for what in ("lost", "switched")))

        asked = {objective: objective.name} if self.has(objective) and objective not in RATIOS else {}
        further = {of: heading for of, heading in listed().items() if self.has(of)}
        own = {of: of.name for of in own_measures([self.result]) if of not in asked}
        self._list("objective", asked)
        self._list("further measures", further)
        self._list("measures of your own", own)

    def _list(self, head: str, rows: Mapping[Query, str]) -> None:
        if rows:
            self.head(head)
        for of, label in rows.items():
            self.row(label, of)

    def _attacks(self) -> None:
        for task in attacked(self.result):
            if names := attack_names(self.result, task):
                self.head(f"attacks on the {task} task", "baseline", "immunized", "steps ratio")
            for name in names:
                final = Query("final", task, attack=name)
                self.row(name, final._replace(stage="baseline"), final, final._replace(measure="steps_ratio"))

    def _facts(self) -> Table:
        """What is text rather than numbers: verdict, flags, error, seconds, folder."""
        result, records = self.result, self.result.records
        facts = Table.grid(padding=(0, 2))
        if result.status != "completed":
            facts.add_row("status", Text(f"{result.status}: {result.error}", "bold red"))
        elif not records:
            facts.add_row("note", Text("nothing was measured: choose evaluation=[rir,...] or attack=[...]"))
        if definition := records.get(*IMMUNIZED):
            failed = ", ".join(letter for letter in "abc" if not records.value(f"definition/{letter}"))
            holds = f"no ({failed})" if failed else "yes"
            facts.add_row("Definition 3.1", self.cell(IMMUNIZED) if definition.value is None else holds)
        if result.flags:
            reasons = {flag: f"{flag}: {result.reasons.get(flag, 'no reason given')}" for flag in result.flags}
            facts.add_row("flags", Text(", ".join(flag + self.mark(why) for flag, why in reasons.items()), "yellow"))
        facts.add_row("seconds", ", ".join(f"{name} {value:.3g}" for name, value in result.seconds.items()) or NONE)
        if result.folder is not None:
            folder, here = result.folder.resolve(), Path.cwd()
            inside = folder.relative_to(here) if folder.is_relative_to(here) else folder
            facts.add_row("run folder", Text(str(inside), overflow="fold"))
        return facts
