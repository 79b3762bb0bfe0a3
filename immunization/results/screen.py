"""One run on the terminal, within its width, and in one line."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from immunization.results.columns import MEASURES, own_measures
from immunization.results.formatting import MEASURES as PRIMARY
from immunization.results.formatting import NONE, number, roles_in
from immunization.runs.interpretation import attack_names, attacked, interval_of, shown
from immunization.runs.records import of_role
from immunization.runs.result import Result
from immunization.runs.verdict import EASIER

LINE = {
    "rir": "RIR",
    "authors/rir": "RIR by authors' κ",
    "ratio_harmful": "(i)",
    "ratio_primary": "(ii)",
    "steps_ratio/harmful": "harmful steps",
}
RATIOS = {
    "ratio_harmful": "(i)  harmful κ / baseline",
    "ratio_primary": "(ii) primary κ / baseline",
    "rir": "RIR = (i) / (ii)",
}
"""On training and on held-out inputs, and by the authors' κ."""
CHANGES = {
    "kappa_harmful": "κ, harmful task",
    "kappa_primary": "κ, primary task",
    **{f"primary/{name}": f"primary {text}, held out" for name, text in PRIMARY.items()},
    "primary/head_accuracy": "primary accuracy, own head",
}
"""With the baseline and immunized."""
TASKS = {"steps_ratio": "steps of a probe / baseline", "rfd": "mean deviation (RFD)"}
"""Of every task."""
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def show(result: Result, objective: str = "rir", console: Console | None = None) -> None:
    """Print a run as a sheet, with what it is to maximize, and reasons and flags as footnotes."""
    (console or Console(markup=False)).print(Group(*_sheet(result, objective)), highlight=False)


def line(result: Result, objective: str = "rir") -> str:
    """A completed run in one line, for the jobs of a sweep."""
    name = result.folder.name if result.folder else result.method
    notes = Footnotes()
    labels = {objective: objective} | LINE | {column.measure: column.heading for column in MEASURES}
    values = [f"{label} {notes.cell(result, key)}" for key, label in labels.items() if key in result.metrics]
    seconds = number(sum(result.seconds.values())) if result.seconds else NONE
    return f"{name}: {', '.join([*values, f'{seconds} s'])}"


class Footnotes(dict[str, str]):
    """Notes with their numbers; the same text keeps its number."""

    def mark(self, text: str | None) -> str:
        """The superscript that points to `text`; empty without text."""
        return self.setdefault(text, str(len(self) + 1).translate(SUPERSCRIPT)) if text else ""

    def cell(self, result: Result, name: str) -> str:
        """A metric as text; where it is null, a dash and the mark of its reason."""
        value = result.metrics.get(name)
        return NONE + self.mark(result.reasons.get(name)) if value is None else shown(result, name)


def _sheet(result: Result, objective: str) -> Iterator[RenderableType]:
    """One run, key by key: condition numbers side by side by split and convention, then what they mean in practice."""
    notes = Footnotes()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(max_width=32, overflow="fold")
    for _ in range(3):
        grid.add_column(justify="right")

    if not RATIOS.keys().isdisjoint(result.metrics):
        _head(grid, "", "training", "held out", "authors' κ")
        for name, label in RATIOS.items():
            cells = (notes.cell(result, prefix + name) for prefix in ("", "test/", "authors/"))
            grid.add_row(label, *cells, style="bold" if name == "rir" else None)
    if "ceiling/rir" in result.metrics:
        share, cells = result.metrics.get("ceiling/attained"), [notes.cell(result, "ceiling/rir")]
        cells += [notes.cell(result, "ceiling/attained") if share is None else f"{100 * share:.0f} %"]
        grid.add_row("ceiling RIR*, log share", *cells)

    if pairs := {name: text for name, text in CHANGES.items() if f"{name}_baseline" in result.metrics}:
        _head(grid, "", "baseline", "immunized")
        for name, text in pairs.items():
            names = (f"{name}_baseline", name)
            grid.add_row(text, *(notes.cell(result, name) for name in names))
            _add_interval(grid, result, names)

    roles = roles_in(result.metrics, "steps_ratio")
    for some in (roles[i : i + 3] for i in range(0, len(roles), 3)):
        _head(grid, "", *some)
        for measure, text in TASKS.items():
            names = [f"{measure}/{role}" for role in some]
            grid.add_row(text, *(notes.cell(result, name) for name in names))
            _add_interval(grid, result, names)

    if layers := [name.rpartition("/")[0] for name in result.metrics if fnmatchcase(name, "selectivity/*/lost")]:
        _head(grid, "to forget harmful images", "others lost", "switched off")
        for layer in layers:
            cells = (notes.cell(result, f"{layer}/{name}") for name in ("lost", "switched"))
            grid.add_row(layer.removeprefix("selectivity/"), *cells)

    asked = [objective] if objective in {*result.metrics} - {*RATIOS} else []
    listed = {c.measure: c.heading for c in MEASURES if c.measure in result.metrics}
    own = [name for name in own_measures([result]) if name not in asked]
    for head, names in {"objective": asked, "further measures": listed, "measures of your own": own}.items():
        if names:
            _head(grid, head)
        for name in names:
            grid.add_row(listed[name] if names is listed else name, notes.cell(result, name))

    for task in attacked(result):
        if attacks := attack_names(result, task):
            group = of_role("attack", task)
            _head(grid, f"attacks on the {task} task", "baseline", "immunized", "steps ratio")
            for name in attacks:
                keys = (f"{group}/{name}/{key}" for key in ("final_baseline", "final", "steps_ratio"))
                grid.add_row(name, *(notes.cell(result, key) for key in keys))

    yield Text.assemble((result.method, "bold"), f" on {result.dataset}, {result.model}, seed {result.seed}")
    first, rest = result.verdict[:1], result.verdict[1:]  # the first, which claims least, comes before every figure
    for sentence in first:
        yield Padding(Text(sentence, "bold red" if EASIER in result.flags else "bold"), (0, 0, 1, 2))
    yield Padding(grid, (0, 0, 1, 2))
    for sentence in rest:
        yield Padding(Text(sentence), (0, 0, 1, 2))
    yield Padding(_facts(result, notes), (0, 0, 0, 2))
    footnotes = Table.grid(padding=(0, 1))
    for text, mark in notes.items():
        footnotes.add_row(Text(mark, "dim"), Text(text, "dim", overflow="fold"))
    yield Padding(footnotes, (1 if notes else 0, 0, 0, 2))


def _add_interval(grid: Table, result: Result, names: Iterable[str]) -> None:
    """Below a row, the 95 % intervals of its metrics, where there are some."""
    texts = [interval_of(result, name) for name in names]
    if any(texts):
        grid.add_row("  95 % interval", *texts, style="dim")


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
        failed = ", ".join(letter for letter in "abc" if not result.metrics.get(f"definition/{letter}"))
        known = result.metrics["definition/immunized"] is not None
        holds = (f"no ({failed})" if failed else "yes") if known else notes.cell(result, "definition/immunized")
        facts.add_row("Definition 3.1", holds)
    if result.flags:
        reasons = {flag: f"{flag}: {result.reasons.get(flag, 'no reason given')}" for flag in result.flags}
        facts.add_row("flags", Text(", ".join(flag + notes.mark(why) for flag, why in reasons.items()), "yellow"))
    facts.add_row("seconds", ", ".join(f"{name} {value:.3g}" for name, value in result.seconds.items()) or NONE)
    if result.folder is not None:
        folder, here = result.folder.resolve(), Path.cwd()
        inside = folder.relative_to(here) if folder.is_relative_to(here) else folder
        facts.add_row("run folder", Text(str(inside), overflow="fold"))
    return facts
