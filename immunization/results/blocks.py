"""Blocks of RESULTS.md and of docs/results: what is written into a page from run folders.

A block is between the lines `<!-- results FOLDER: WORDS -->` and `<!-- /results -->`; FOLDER lies in the folder of
all runs. After the number of runs come what WORDS choose: `summary`, `tables` with `by=MEASURE` for one more objective,
and `figures` or kinds of them (`figure2`). All else on a page is written by hand. A block whose runs are not there is
left as it is.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from immunization.errors import DataError
from immunization.results.collect import Run, collect
from immunization.results.columns import MEASURES, OVERVIEW
from immunization.results.settings import Setting, place, settings
from immunization.results.sweep_figures import KINDS, draw
from immunization.results.tables import Table, alignment, comparison, counts, pair_counts
from immunization.runs import files
from immunization.runs.filenames import ENVIRONMENT

WORDS = ("runs", "summary", "tables", "by=MEASURE", "figures", *KINDS)
BLOCK = re.compile(r"^(<!-- results ([\w-]+):([^\n]*) -->\n).*?^(<!-- /results -->)$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """RESULTS.md, and the pages of docs/results that have blocks."""
    return [
        path
        for path in (Path("RESULTS.md"), *sorted(Path("docs/results").glob("*.md")))
        if BLOCK.search(path.read_text(encoding="utf-8"))
    ]


def fill(page: Path, runs: Path, figures: Path) -> dict[str, bool]:
    """Write the blocks of a page, with pictures in the folder `figures`.

    Returns for each FOLDER whether its runs are there. Raises DataError for words that choose nothing.
    """
    if not page.is_file():
        raise DataError(f"{page} is not a file; name a page, or run the command in the root of the repository")
    text = page.read_text(encoding="utf-8")
    there: dict[str, bool] = {}
    heading = text.partition("\n")[0].lstrip("# ")

    def filled(block: re.Match[str]) -> str:
        start, name, words, end = block.groups()
        if unknown := [word for word in words.split() if word not in WORDS and not word.startswith("by=")]:
            raise DataError(f"{page}: the block of {name} asks for {', '.join(unknown)}; there are {', '.join(WORDS)}")
        groups = _groups(runs / name)
        there[name] = there.get(name, True) and bool(groups)
        if not groups:
            return block[0]
        parts = _parts(groups, name, heading, words.split(), figures, page.resolve().parent)
        return "\n\n".join([start.rstrip("\n"), *(part.strip("\n") for part in parts), end])

    content = BLOCK.sub(filled, text)
    if content != text:
        files.write(page, content)
    return there


@cache
def _groups(folder: Path) -> list[list[Setting]]:
    """The settings with completed runs in or below a folder, in groups that can be compared."""
    try:
        groups = settings(collect([folder]))
    except DataError:  # there is no run
        return []
    return [group for group in groups if any(setting.runs for setting in group)]


def _parts(
    groups: Sequence[Sequence[Setting]], name: str, heading: str, words: Sequence[str], figures: Path, start: Path
) -> Iterator[str]:
    group = sorted((setting for some in groups for setting in some), key=place)  # in one table
    yield provenance(group)
    if "summary" in words:
        yield summary(group).pipes()
    if "tables" in words:
        objectives = [word.removeprefix("by=") for word in words if word.startswith("by=")]
        tables = [comparison(group, name, "Every measure")]
        tables += [comparison(group, name, f"Every measure, {by}", by) for by in objectives]
        more = (make(group, name, heading) for make in (pair_counts, counts, alignment))
        yield from (table.markdown() for table in [*tables, *filter(None, more)])
    figures.mkdir(parents=True, exist_ok=True)
    kinds = None if len(groups) == 1 else {"figure2"}  # settings that differ in more than the method share no curve
    for plot in draw(group, name, kinds=kinds if "figures" in words else {*words} & (kinds or {*words})):
        yield plot.markdown(os.path.relpath(plot.png(figures, pdf=False).resolve(), start))


def summary(group: Sequence[Setting]) -> Table:
    """Each setting in one short line."""
    return Table.of("summary", "", [*OVERVIEW, *MEASURES], group)


def provenance(group: Sequence[Setting]) -> str:
    """How many runs there are, and the commits whose code made them."""
    runs = [run for setting in group for run in setting.runs]
    failed = sum(len(setting.failed) for setting in group)
    commits = ", ".join(sorted({_commit(run) for run in runs}))
    return f"{len(runs):,} runs{f', {failed:,} failed' if failed else ''}; code {commits}."


def _commit(run: Run) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        git = json.loads((run.folder / ENVIRONMENT).read_text())["git"]
        return f"{git['commit'][:9]}{' with changes' * git['dirty']}"
    return "unknown"
