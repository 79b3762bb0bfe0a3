"""`python -m immunization.results PATH...`: tables, pictures and one report of any number of run folders.

`python -m immunization.results rows PATH...` writes runs of the leaderboard's tracks as rows, one file each;
`python -m immunization.results leaderboard` makes tables, pictures and a page of them.
`python -m immunization.results pages` fills in RESULTS.md and docs/results from the runs of `make results`.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from immunization.errors import ConfigError, UserError
from immunization.results import blocks, leaderboard, page, rows
from immunization.results.collect import Collection, collect
from immunization.results.page import Section
from immunization.results.tables import numbers
from immunization.runs import files

WRITTEN = ".immunization_results.sha256"
"""The files this command wrote into its folder, in the format of `sha256sum`."""
OBJECTIVE = "rir"
"""What the best setting has most of, unless the call says otherwise."""


def main(arguments: list[str] | None = None) -> None:
    """Collect, print and write; raises UserError for a path that does not exist or holds no run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["rows"]:
        return _rows(arguments[1:])
    if arguments[:1] == ["pages"]:
        return _pages(arguments[1:])
    board = arguments[:1] == ["leaderboard"]
    options = _parser(board).parse_args(arguments[board:])
    collection = collect(leaderboard.rows_below(options.paths) if board else options.paths)
    if not board:
        _check_objective(collection, options.objective)
    kind = leaderboard if board else page
    parts = kind.sections(collection) if board else kind.sections(collection, options.objective, not options.no_figures)
    folder = options.output
    figures = options.figures or folder / "figures"
    for place in (folder, figures):
        place.mkdir(parents=True, exist_ok=True)

    texts = {"results.csv": collection.csv()}
    for table in (table for part in parts for table in part.every_table):
        formats = {"md": table.markdown, "tex": table.latex, "csv": table.csv}
        texts |= {f"{table.name}.{suffix}": form() for suffix, form in formats.items()}
    for name, text in texts.items():
        files.write(folder / name, text)
    suffixes = (".png",) if options.figures else (".png", ".pdf")
    pictures = {plot.name: plot.png(figures, pdf=not options.figures) for part in parts for plot in part.every_plot}
    report = folder / kind.REPORT
    kind.write(report, collection, parts, options.title)
    written = [report, *(folder / name for name in texts)]
    written += [path.with_suffix(suffix) for path in pictures.values() for suffix in suffixes]
    _tidy(folder, written)
    if options.markdown:
        base = options.markdown.resolve().parent
        relative = {name: os.path.relpath(path.resolve(), base) for name, path in pictures.items()}
        command = shlex.join(["python", "-m", "immunization.results", *arguments])
        content = partial(leaderboard.between_marks, options.markdown) if board else page.markdown
        files.write(options.markdown, content(parts, relative, command))
    page.show(collection, parts)
    print(f"report: {report}")
    if options.wandb:
        _log(options, collection, parts, list(pictures.values()), report)


def _check_objective(collection: Collection, objective: str) -> None:
    if objective != OBJECTIVE and all(objective not in run.result.metrics for run in collection.runs):
        raise ConfigError(f"--objective: no run has the measure {objective}")


def _rows(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m immunization.results rows", description=rows.__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of runs or multiruns of tracks")
    parser.add_argument("--into", type=Path, default=rows.FOLDER, help="folder of all rows (%(default)s)")
    options = parser.parse_args(arguments)
    print(*rows.write(options.paths, options.into), sep="\n")


def _pages(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m immunization.results pages", description=blocks.__doc__)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="Markdown (RESULTS.md, docs/results/*.md)")
    parser.add_argument("--runs", type=Path, default=Path("outputs/results"), help="folder of all runs (%(default)s)")
    parser.add_argument(
        "--figures", type=Path, default=Path("docs/images/results"), help="folder for PNG pictures (%(default)s)"
    )
    options = parser.parse_args(arguments)
    for path in options.pages or blocks.pages():
        for folder, there in blocks.fill(path, options.runs, options.figures).items():
            print(f"{path}: {folder} {'is written' if there else 'stays as it is, for want of completed runs'}")


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


def _log(options: argparse.Namespace, collection: Collection, parts: list[Section], *made: list[Path] | Path) -> None:
    """A summary run on W&B with every table, all runs with their measures, every picture and the report."""
    from immunization.runs.tracker import Guarded
    from immunization.runs.wandb_tracker import Wandb

    tracker = Guarded(Wandb(os.environ.get("WANDB_PROJECT", "immunization"), os.environ.get("WANDB_ENTITY")))
    paths = {"paths": [str(path) for path in options.paths]}
    tracker.start(options.output, paths, name=options.title, group="results", tags=["summary"])
    tables = {table.name: numbers(table) for part in parts for table in part.every_table}
    runs = collection.frame()
    tables["runs"] = list(runs), [[None if cell != cell else cell for cell in row] for row in runs.to_numpy(object)]
    tracker.report(tables, *made)
    tracker.close(failed=False)


def _parser(board: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immunization.results", description=__doc__)
    add = parser.add_argument
    what = f"rows of the leaderboard ({rows.FOLDER})" if board else "folders of runs or sweeps, result.json files"
    add("paths", nargs="*" if board else "+", type=Path, metavar="PATH", default=[rows.FOLDER], help=what)
    add(
        "--output",
        type=Path,
        default=Path("outputs/results"),
        help="output folder; files of an earlier call are removed (%(default)s)",
    )
    if not board:
        what = "measure that chooses the best setting, larger is better (%(default)s)"
        add("--objective", default=OBJECTIVE, help=what)
        add("--no-figures", action="store_true", help="no pictures, a few seconds faster")
    add("--title", default="Leaderboard" if board else "Results", help="heading of the report (%(default)s)")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write all tables to FILE; for the leaderboard, between the marks in FILE",
    )
    add("--figures", type=Path, metavar="FOLDER", help="folder for PNG pictures (<output>/figures)")
    add("--wandb", action="store_true", help="also log tables and pictures to a summary run on W&B")
    return parser


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
