"""report.html: tables, figures and everything left out, in one file that needs no network."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from rich.console import Console

from immunization.results.attack_figure import attack_costs
from immunization.results.attack_table import Audit
from immunization.results.attack_table import audit as audit_of
from immunization.results.collect import Collection, Problem, Run, collect
from immunization.results.columns import Place, placed
from immunization.results.formatting import Cell, number, template
from immunization.results.plot import Plot
from immunization.results.settings import Setting, best, by_authors, in_convention, settings, title
from immunization.results.sweep_figures import draw
from immunization.results.tables import Table, alignment, comparison, counts, meanings
from immunization.runs import files, strict_json

REPORT = "report.html"
MOST = 500
"""Rows of the lists of runs and problems in the report; the CSV has all."""


@dataclass
class Section:
    """The runs of one group with tables, of which the first is the comparison, figures, and audits with theirs."""

    group: list[Setting]
    tables: list[Table]
    plots: list[Plot]
    audits: list[tuple[Audit, Plot | None]]

    @property
    def every_table(self) -> list[Table]:
        return self.tables + [made.table for made, _ in self.audits]

    @property
    def every_plot(self) -> list[Plot]:
        return [plot for _, plot in self.audits if plot] + self.plots

    @property
    def runs(self) -> list[Run]:
        return [run for setting in self.group for run in setting.runs]


def sections(collection: Collection, objective: str, figures: bool = True) -> list[Section]:
    """One section for each preparation of the data and model."""
    groups = settings(collection)
    made = []
    for i, group in enumerate(groups, 1):
        heading = title(group, groups)
        name = f"{i}_{re.sub(r'[^a-z0-9]+', '_', heading.lower()).strip('_')[:60]}"
        more = (counts(group, f"{name}_counts", heading), alignment(group, f"{name}_alignment", heading))
        tables = [comparison(group, name, heading, objective), *filter(None, more)]
        audits = []
        for j, setting in enumerate(group, 1):
            if found := audit_of(setting, f"{name}_attacks_{j}", heading):
                audits.append((found, attack_costs(setting, f"{name}_attacks_{j}_costs")))
        made.append(Section(group, tables, draw(group, name, objective) if figures else [], audits))
    return made


def summarize(collection: Collection, folder: Path, objective: str, console: Console | None = None) -> None:
    """Print the table over a sweep, and write results.csv and report.html into its folder."""
    parts = sections(collection, objective)
    files.write(folder / "results.csv", collection.frame().to_csv(index=False))
    write(folder / REPORT, collection, parts, f"Sweep {folder.name}")
    show(collection, parts, objective, console)
    (console or Console()).print(f"report: {folder / REPORT}", highlight=False, soft_wrap=True)


def audit(folder: Path) -> None:
    """Write the report of a single run, for its attacks, into its folder."""
    collection = collect([folder])
    write(folder / REPORT, collection, sections(collection, "rir", figures=False), f"Audit {folder.name}")


def show(collection: Collection, parts: Sequence[Section], objective: str, console: Console | None = None) -> None:
    """Print the tables, the best setting of each, and what was left out."""
    console, legend = console or Console(), {}
    for part in parts:
        metric = in_convention(part.group, objective)
        authors, (first, *others) = by_authors(part.group), part.tables
        names = number_settings(part.group, console)
        for table in (first.only(Place.TERMINAL), *others):
            console.print()
            console.print(table.renamed(names))
        legend |= dict.fromkeys([*meanings(authors), *(note for table in others for note in table.notes)])
        for made, _ in part.audits:
            console.print()
            console.print(made.table.only(Place.ATTACKS_TERMINAL))
            console.print(*made.sentences[:1], markup=False, highlight=False)
            legend |= dict.fromkeys(made.NOTES)
        if len(part.group) > 1 and (winner := best(part.group, metric)):
            mean = number(winner.summary(metric).mean)
            among = "of settings that immunize and keep the primary task"
            console.print(f"★ largest mean {metric} {among}: {winner.label} ({mean})", markup=False, highlight=False)
    console.print("", *legend, sep="\n", markup=False, highlight=False)
    show_left_out(collection, console)


def number_settings(group: Sequence[Setting], console: Console) -> dict[str, str]:
    """Short names by label: method and number, with a line for each that says its keys; none where methods will do."""
    if all(setting.label == setting.method for setting in group):
        return {}
    console.print()
    for i, setting in enumerate(group, 1):
        console.print(f"{i} {setting.label}", markup=False, highlight=False)
    return {setting.label: f"{i} {setting.method}" for i, setting in enumerate(group, 1)}


def show_left_out(collection: Collection, console: Console) -> None:
    """Print how many runs there are, and which are left out of every average and why."""
    console.print()
    console.print(collection.counts(), highlight=False)
    for (kind, message), same in Counter((p.kind, p.message) for p in collection.problems).most_common(20):
        folder = next(p.folder for p in collection.problems if (p.kind, p.message) == (kind, message))
        text = f"{same} {kind}: {message}\n  {'first ' if same > 1 else ''}{folder}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def write(path: Path, collection: Collection, parts: Sequence[Section], heading: str) -> None:
    """Write the report to `path`."""
    content = template(REPORT, code=_code).render(
        title=heading,
        lead=_lead(parts),
        flags_page=flags_page(path),
        counts=collection.counts(),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=[(part, provenance(part.runs)) for part in parts],
        left_out=len(collection.problems),
        problems=_problems(collection.problems),
        completed=len(collection.runs),
        runs=_runs(collection.runs),
        most=MOST,
    )
    files.write(path, content)


def _lead(parts: Sequence[Section]) -> str | None:
    """The summary of the verdict where the page is of one audit; it then stands above everything."""
    if len(parts) == 1 and len(parts[0].group) == 1 and parts[0].audits:
        return next(iter(parts[0].audits[0][0].sentences), None)
    return None


def flags_page(path: Path) -> str | None:
    """From a report to docs/flags.md, where it lies in a copy of the repository; else None: it says no local paths."""
    root = Path(__file__).resolve().parents[2]
    page, folder = root / "docs" / "flags.md", path.resolve().parent
    return os.path.relpath(page, folder) if page.is_file() and folder.is_relative_to(root) else None


def kept(page: Path, made: Mapping[str, Any], earlier: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The parts of a page by title, as a JSON file beside it keeps them: those of before, and `made` in their place.

    `earlier` reads them from a page that has no such file.
    """
    path = page.with_suffix(".json")
    parts = (json.loads(path.read_text()) if path.is_file() else earlier()) | made
    strict_json.write(path, parts)
    return parts


def provenance(runs: Sequence[Run]) -> str:
    """Which runs, and by which commands."""
    commands = [f"`{command}`" for command in dict.fromkeys(run.command for run in runs if run.command)]
    made = f", made by {_first(commands)}" if commands else ""
    folders = _first(sorted({str(run.result.folder.parent) for run in runs}))
    return f"{len(runs)} run{'s' * (len(runs) != 1)} in {folders}{made}."


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _problems(problems: Sequence[Problem]) -> Table:
    rows = [[Cell(problem.kind), Cell(str(problem.folder)), Cell(problem.message)] for problem in problems[:MOST]]
    return Table("problems", "", ["what", "folder", "why"], rows)


def _runs(runs: Sequence[Run]) -> Table:
    metrics = [column.measure for column in placed(Place.RUNS)]
    rows = []
    for run in runs[:MOST]:
        result = run.result
        cells = [Cell(result.folder.name), Cell(result.method), Cell(str(result.seed), result.seed)]
        cells += [Cell.of(result.metrics.get(name)) for name in metrics]
        rows.append([*cells, Cell(", ".join(result.flags))])
    return Table("runs", "", ["run folder", "method", "seed", *metrics, "flags"], rows)


def _code(text: str) -> Markup:
    """Escaped, with `...` as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # Markup would escape the tags too


def markdown(parts: Iterable[Section], pictures: dict[str, str], command: str) -> str:
    """The tables as one document, with the command that made each; `pictures` maps figures to their paths."""
    lines = ["# Results", "", f"Written by `{command}`; do not edit by hand.", ""]
    for part in parts:
        lines += [*(table.markdown() for table in part.every_table), f"Source: {_public(provenance(part.runs))}", ""]
        lines += [plot.markdown(pictures[plot.name]) for plot in part.every_plot if plot.name in pictures]
    return "\n".join(lines)


def _public(text: str) -> str:
    """Without the paths of files on this machine."""
    return re.sub(r"(?<=[= ])[/~][^\s`,]*", "<folder>", text)
