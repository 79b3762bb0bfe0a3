"""`python -m immunization.results PATH...`: tables, figures and one report of any number of run folders.

`python -m immunization.results leaderboard PATH...`: one row per method instead, with its price and what attackers pay.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from immunization.errors import UserError
from immunization.results import leaderboard
from immunization.results.collect import Collection, collect
from immunization.results.page import REPORT, Section, markdown, sections, show, write
from immunization.results.tables import numbers
from immunization.runs import files

WRITTEN = ".immunization_results.sha256"
"""The files this command wrote into its folder, in the format of `sha256sum`."""


def main(arguments: list[str] | None = None) -> None:
    """Collect, print and write; raises UserError for a path that does not exist or holds no run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    board = arguments[:1] == ["leaderboard"]
    options = _parser("Leaderboard" if board else "Results").parse_args(arguments[board:])
    collection = collect(options.paths)
    rows = leaderboard.tracks(collection) if board else []
    parts = leaderboard.sections(rows) if board else sections(collection, options.objective, not options.no_figures)
    folder = options.output
    figures = options.figures or folder / "figures"
    for place in (folder, figures):
        place.mkdir(parents=True, exist_ok=True)

    texts = {"results.csv": collection.frame().to_csv(index=False)}
    for table in (table for part in parts for table in part.every_table):
        formats = {"md": table.markdown, "tex": table.latex, "csv": table.csv}
        texts |= {f"{table.name}.{suffix}": form() for suffix, form in formats.items()}
    for name, text in texts.items():
        files.write(folder / name, text)
    suffixes = (".png",) if options.figures else (".png", ".pdf")
    pictures = {plot.name: plot.png(figures, pdf=not options.figures) for part in parts for plot in part.every_plot}
    write(folder / REPORT, collection, parts, options.title)
    written = [folder / name for name in (*texts, REPORT)]
    written += [path.with_suffix(suffix) for path in pictures.values() for suffix in suffixes]
    if board:
        written += leaderboard.write_rows(rows, folder / "rows")
    _tidy(folder, written)
    if options.markdown:
        base = options.markdown.resolve().parent
        relative = {name: os.path.relpath(path.resolve(), base) for name, path in pictures.items()}
        command = shlex.join(["python", "-m", "immunization.results", *arguments])
        page = partial(leaderboard.between_marks, options.markdown) if board else markdown
        files.write(options.markdown, page(parts, relative, command))
    show(collection, parts)
    print(f"report: {folder / REPORT}")
    if options.wandb:
        _log(options, collection, parts, list(pictures.values()))


def _tidy(folder: Path, written: Iterable[Path]) -> None:
    """Remove files of an earlier call that this one did not write, unless they were changed since."""
    root = folder.resolve()
    inside = {path.relative_to(root).as_posix(): path for path in map(Path.resolve, written) if root in path.parents}
    record = root / WRITTEN
    for line in record.read_text().splitlines() if record.is_file() else []:
        digest, _, name = line.partition("  ")
        old = (root / name).resolve()
        if name not in inside and root in old.parents and files.sha256(old) == digest:
            old.unlink()
            with suppress(OSError):  # other files are left in its folder
                old.parent.rmdir()
    files.write(record, "".join(f"{files.sha256(path)}  {name}\n" for name, path in inside.items()))


def _log(options: argparse.Namespace, collection: Collection, parts: list[Section], pictures: list[Path]) -> None:
    """A summary run on W&B with every table, all runs with their measures, every figure and the report."""
    from immunization.runs.wandb_tracker import Wandb

    tracker = Wandb(os.environ.get("WANDB_PROJECT", "immunization"), os.environ.get("WANDB_ENTITY"))
    paths = {"paths": [str(path) for path in options.paths]}
    tracker.start(options.output, paths, name=options.title, group="results", tags=["summary"])
    tables = {table.name: numbers(table) for part in parts for table in part.every_table}
    runs = collection.frame()
    tables["runs"] = list(runs), [[None if cell != cell else cell for cell in row] for row in runs.to_numpy(object)]
    tracker.report(tables, pictures, options.output / REPORT)
    tracker.close(failed=False)


def _parser(title: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immunization.results", description=__doc__)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="folders of runs or sweeps, result.json files")
    add(
        "--output",
        type=Path,
        default=Path("outputs/results"),
        help="output folder; files of an earlier call are removed (%(default)s)",
    )
    add(
        "--objective",
        default="rir",
        help="measure that chooses the best setting, larger is better; not for the leaderboard (%(default)s)",
    )
    add("--title", default=title, help="heading of the report (%(default)s)")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write all tables to FILE; for the leaderboard, between the marks in FILE",
    )
    add("--figures", type=Path, metavar="FOLDER", help="folder for PNG figures (<output>/figures)")
    add("--no-figures", action="store_true", help="no figures, a few seconds faster")
    add("--wandb", action="store_true", help="also log tables and figures to a summary run on W&B")
    return parser


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
