"""RESULTS.md and the pages of docs/results/: one table first, then the details beside the paper's figures, short."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from immunization.results.collect import collect
from immunization.results.columns import AUTHORS, Place, placed, published
from immunization.results.formatting import NONE, Cell, template
from immunization.results.page import kept
from immunization.results.parts import Section
from immunization.results.plot import Plot
from immunization.results.seed_statistics import ENOUGH
from immunization.results.settings import Setting, by_authors, in_convention, place, settings
from immunization.results.sweep_figures import draw
from immunization.results.tables import Table, alignment, comparison, counts
from immunization.runs import files

ABOVE = (1, 2, 10, 100)
"""Pairs are counted whose RIR is above these."""


@dataclass(frozen=True)
class Places:
    """The files to be written: the first page, the folder of the others, the folder of the figures."""

    page: Path
    details: Path
    figures: Path


@dataclass
class Part:
    """A section with its runs: the settings of all of its multiruns stand in one table."""

    section: Section
    groups: list[list[Setting]]

    @cached_property
    def group(self) -> list[Setting]:
        """All settings, in the order of METHODS."""
        return sorted((setting for group in self.groups for setting in group), key=place)

    @cached_property
    def tables(self) -> list[Table]:
        """The comparison, once more by each further objective, and what else there is to count."""
        name, title = self.section.name, self.section.title
        further = [comparison(self.group, name, f"Every measure, {by}", by) for by in self.section.objectives]
        more = (self.pairs, counts(self.group, name, title), alignment(self.group, name, title))
        return [comparison(self.group, name, "Every measure"), *further, *filter(None, more)]

    @cached_property
    def plots(self) -> list[Plot]:
        """Every figure; those with a panel a method where settings differ in more than the method."""
        return draw(self.group, self.section.name, kinds=None if len(self.groups) == 1 else ("figure2",))

    @cached_property
    def pairs(self) -> Table | None:
        return pair_counts(self.group, self.section.name, self.section.title)

    def jobs(self) -> str:
        """How many runs are behind it, and whether some are missing."""
        there = sum(len(setting.runs) + len(setting.failed) for setting in self.group)
        asked = sum(len(run.jobs) for run in self.section.multiruns)
        return f"{there:,} runs." if there == asked else f"{there:,} of {asked:,} runs, the others are still to come."


def parts(sections: Sequence[Section]) -> list[Part]:
    """The sections that have completed runs."""
    found = []
    for section in sections:
        if paths := [run.folder for run in section.multiruns if next(run.folder.glob("*/result.json"), None)]:
            groups = [group for group in settings(collect(paths)) if any(setting.runs for setting in group)]
            found += [Part(section, groups)] if groups else []
    return found


def write(found: Sequence[Part], places: Places, command: str, titles: Sequence[str]) -> None:
    """Write the first page, a page for each part, and the figures.

    `titles` are those of all sections, in order. What is `kept` of the others stays as it is: to make one section
    again, the runs of the others need not be there.
    """
    for folder in (places.page.parent, places.details, places.figures):
        folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for part in found:
        pictures = {plot.name: plot.png(places.figures, pdf=False) for plot in part.plots}
        page = places.details / f"{part.section.name}.md"
        files.write(page, _details(part, pictures, page))
        table = overview([part])
        rows = [dict(zip(table.header, map(asdict, row), strict=True)) for row in table.rows]
        made[part.section.title] = {"rows": rows, "text": _short(part, pictures, places)}
    sections = kept(places.page, made, lambda: _earlier(places.page))
    chosen = [sections[title] for title in titles if title in sections]
    table = overview(())
    empty = asdict(Cell(NONE))
    rows = [row for part in chosen for row in part["rows"]]
    table.rows = [[Cell(**row.get(name, empty)) for name in table.header] for row in rows]
    text = template("results.jinja").render(
        command=command, overview=table, enough=ENOUGH, sections=[part["text"] for part in chosen]
    )
    files.write(places.page, text)


def _earlier(page: Path) -> dict[str, Any]:
    """The sections of a page beside which nothing is kept, by title."""
    first, *blocks = page.read_text().split("\n## ") if page.is_file() else [""]
    sections = {block.partition("\n")[0]: {"rows": [], "text": f"## {block}"} for block in blocks}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first.splitlines() if line.startswith("|")]
    title = ""
    for line in lines[2:]:
        title = line[0] or title  # further rows of a section leave it empty
        cells = [Cell(text, 0.0 if i > 1 and text != NONE else None) for i, text in enumerate(line)]
        if title in sections:
            sections[title]["rows"].append(dict(zip(lines[0], map(asdict, cells), strict=True)))
    return sections


def overview(found: Sequence[Part]) -> Table:
    """Methods by data set: RIR, Definition 3.1, harmful and primary steps, and the primary measure before and after."""
    columns = placed(Place.OVERVIEW)
    rows = []
    for part in found:
        for setting in part.group if part.section.front else ():
            first = Cell(part.section.title if setting is part.group[0] else "")
            rows.append([first, *(column.cell(setting, column.measure) for column in columns)])
    return Table("overview", "", ["data", *(column.heading for column in columns)], rows)


def pair_counts(group: Sequence[Setting], name: str, heading: str) -> Table | None:
    """Fig. 2 in numbers: of how many pairs of classes RIR is above a bound, beside the paper's count."""
    metric, paper = in_convention(group, "rir"), published(group[0].first)
    pairs = [setting.pairs(metric) for setting in group]
    if max(map(len, pairs)) < 3:
        return None
    rows = []
    for setting, values in zip(group, pairs, strict=True):
        theirs = paper.get(setting.method, {}).get("figure2")
        above = [sum(value > bound for value in values.values()) for bound in ABOVE]
        shown = Cell("{:.0f} of {:.0f}".format(*theirs), theirs[0], words=True) if theirs else Cell(NONE)
        rows.append([Cell(setting.label), *(Cell(str(n), n) for n in (len(values), *above)), shown])
    header = ["method", "pairs", *(f"RIR > {bound}" for bound in ABOVE), "paper, Fig. 2"]
    by = AUTHORS if by_authors(group) else ", rank-aware κ"
    notes = [f"Pairs by the median RIR over seeds{by}. The paper counts RIR much greater than 1, and names no bound."]
    return Table(name, f"{heading}: pairs, as Fig. 2 counts them", header, rows, notes)


def _short(part: Part, pictures: dict[str, Path], places: Places) -> str:
    """A section of the first page."""
    page = os.path.relpath(places.details / f"{part.section.name}.md", places.page.parent)
    lines = [f"## {part.section.title}", "", f"{part.section.about} {part.jobs()} [Everything else]({page}).", ""]
    for table, by in zip(part.tables, ("", *part.section.objectives), strict=False):
        lines += ["Against theta_0 (Eq. 17) instead of the inputs:\n"] if by.endswith("_theta0") else []
        lines += [table.only(Place.SHORT | Place.PAPER if by_authors(part.group) else Place.SHORT).pipes(), ""]
    if part.pairs and "figure2" in part.section.figures:
        lines += [part.pairs.pipes(), ""]
    chosen = [plot for plot in part.plots if plot.name.rpartition("_")[2] in part.section.figures]
    return "\n".join(lines + _figures(chosen, pictures, places.page))


def _details(part: Part, pictures: dict[str, Path], page: Path) -> str:
    """A page of its own: the commands, every table and every figure."""
    lines = [f"# {part.section.title}", "", f"{part.section.about} {part.jobs()}", "", "```sh"]
    lines += [*(run.command for run in part.section.multiruns), "```", ""]
    lines += [table.markdown() for table in part.tables]
    return "\n".join(lines + _figures(part.plots, pictures, page))


def _figures(plots: Sequence[Plot], pictures: dict[str, Path], page: Path) -> list[str]:
    return [plot.markdown(os.path.relpath(pictures[plot.name], page.parent)) for plot in plots]
