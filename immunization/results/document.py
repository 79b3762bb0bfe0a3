"""RESULTS.md and the pages of docs/results/: one table over all data sets, and a page of details per section."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from immunization.results.columns import Place, placed
from immunization.results.formatting import NONE, Cell, template
from immunization.results.parts import Chapter
from immunization.results.tables import Table
from immunization.runs import files


@dataclass(frozen=True)
class Places:
    """The files to be written: the first page, the folder of the others, the folder of the figures."""

    page: Path
    details: Path
    figures: Path


def write(found: Sequence[Chapter], places: Places, command: str, titles: Sequence[str]) -> None:
    """Write the first page, a page for each part, and the figures.

    `titles` are those of all sections, in order. A JSON file beside the first page keeps sections without runs.
    """
    for folder in (places.page.parent, places.details, places.figures):
        folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for part in found:
        pictures = {plot.name: plot.png(places.figures, pdf=False) for plot in part.plots}
        page = places.details / f"{part.name}.md"
        files.write(page, _filled("details.jinja", page, part, pictures))
        text = _filled("section.jinja", places.page, part, pictures | {"page": page})
        table = overview([part])
        rows = [dict(zip(table.header, map(asdict, row), strict=True)) for row in table.rows]
        made[part.title] = {"rows": rows, "text": text}
    record = places.page.with_suffix(".json")
    sections = (json.loads(record.read_text()) if record.is_file() else {}) | made
    files.write_json(record, sections)
    chosen = [sections[title] for title in titles if title in sections]
    table = overview(())
    empty = asdict(Cell(NONE))
    rows = [row for part in chosen for row in part["rows"]]
    table.rows = [[Cell(**row.get(name, empty)) for name in table.header] for row in rows]
    texts = [part["text"] for part in chosen]
    page = template("results.jinja").render(command=command, overview=table, sections=texts)
    files.write(places.page, page)


def overview(found: Sequence[Chapter]) -> Table:
    """Methods by data set: RIR, Definition 3.1, harmful and primary steps, and the primary measure before and after."""
    columns = placed(Place.OVERVIEW)
    rows = []
    for part in found:
        for setting in part.group if part.front else ():
            first = Cell(part.title if setting is part.group[0] else "")
            rows.append([first, *(column.cell(setting, column.measure) for column in columns)])
    return Table("overview", "", ["data", *(column.heading for column in columns)], rows)


def _filled(name: str, page: Path, part: Chapter, paths: Mapping[str, Path]) -> str:
    """A template on a section, with paths as seen from `page`, which it stands in."""
    relative = {name: os.path.relpath(path, page.parent) for name, path in paths.items()}
    return template(name).render(part=part, paths=relative).rstrip() + "\n"
