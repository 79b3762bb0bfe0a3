"""What a bound on the condition number of a folded map costs in harmful steps, and what it saves in low precision.

    python benchmarks/max_condition.py experiment=resnet18_cars_small,vit_cars_small data_root=<folder> --bounds=64,null

runs every experiment once for each bound and prints a table for each (docs/results/precision.md), with `--figure` a
picture. Runs stand in `--folder`, where the next command takes those that are done; other options need another folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from immunization import run
from immunization.results.plot import LINES, MARKERS, PALETTE, fit_log, inked, legend_below, panel_axes
from immunization.runs.result import Result

FORMATS = ("float32", "bfloat16", "int8", "int4")
COLUMNS = (
    "rir",
    "test/rir",
    "steps_ratio/harmful",
    "steps_ratio/primary",
    *(f"deployment/{measure}_{form}" for measure in ("accuracy", "steps") for form in FORMATS),
)
LOSSES = {"bfloat16": 1, "int8": 3}
"""Points of accuracy that a default may lose in a format."""

Rows = Mapping[str, Result]
"""Bound, as it is written -> its run."""


def measure(experiment: str, overrides: Sequence[str], bounds: Sequence[str], folder: Path) -> Rows:
    """Run all bounds; the table is printed line by line."""
    print(f"\n{experiment}\n\n| bound | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    rows = {}
    for bound in bounds:
        options = [f"experiment={experiment}", *overrides, f"method.max_condition={bound}", "tracker=none"]
        with redirect_stdout(sys.stderr):
            result = rows[bound] = run([*options, "resume=true"], folder / experiment / bound, quiet=True)
        if len(rows) == 1:
            print(line("before", {name: result.metrics.get(f"{name}_baseline") for name in COLUMNS}))
        print(line(bound, result.metrics, result.flags), flush=True)
    return rows


def line(name: str, metrics: Mapping[str, float | None], flags: Collection[str] = ()) -> str:
    """A line of the table; > stands before a number of steps that was not reached."""
    marks = {"steps_ratio/harmful": ">" * ("capped_harmful" in flags)}
    values = (
        "" if metrics.get(column) is None else f"{marks.get(column, '')}{metrics[column]:.4g}" for column in COLUMNS
    )
    return f"| {name} | " + " | ".join(values) + " |"


def draw(tables: Mapping[str, Rows], path: Path) -> None:
    """Harmful steps in each format above, points of accuracy lost below; a column for each experiment."""
    with inked():
        figure, axes = panel_axes(2 * len(tables), 3.6, 2.3, legend_rows=2, columns=len(tables))
        for i, (experiment, rows) in enumerate(tables.items()):
            steps, lost = axes[i], axes[i + len(tables)]
            drawn = []
            for j, form in enumerate(FORMATS):
                ratios = [result.metrics[f"deployment/steps_{form}"] for result in rows.values()]
                steps.plot(range(len(rows)), ratios, color=PALETTE[j + 1], linestyle=LINES[j], marker=MARKERS[j])
                drawn += ratios
            steps.set(title=experiment, ylabel="harmful steps ratio")
            fit_log(steps.yaxis, drawn)
            for j, form in enumerate(FORMATS):
                name, color = f"deployment/accuracy_{form}", PALETTE[j + 1]
                points = [100 * (r.metrics[f"{name}_baseline"] - r.metrics[name]) for r in rows.values()]
                lost.plot(range(len(rows)), points, color=color, linestyle=LINES[j], marker=MARKERS[j], label=form)
                if form in LOSSES:
                    lost.axhline(LOSSES[form], color=color, linestyle=":", linewidth=1)
            lost.set(ylabel="points of accuracy lost")
            lost.set_yscale("symlog", linthresh=5)
            lost.set_yticks([-3, 0, 1, 3, 10, 30, 100], ["-3", "0", "1", "3", "10", "30", "100"])
            for ax in (steps, lost):
                names = ["none" if bound == "null" else bound for bound in rows]
                ax.set_xticks(range(len(rows)), names)
                ax.set_xlabel("method.max_condition")
        legend_below(figure, axes[-1], columns=2 * len(tables))
        figure.savefig(path, dpi=110, facecolor="white")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="experiment=<names, by comma>, and overrides for all of them")
    parser.add_argument("--bounds", default="16,32,64,128,null", help="values of method.max_condition")
    parser.add_argument("--folder", type=Path, default=Path("outputs/max_condition"))
    parser.add_argument("--figure", type=Path, help="file of the picture, .png or .svg")
    args = parser.parse_intermixed_args(arguments)
    experiments = [one.removeprefix("experiment=") for one in args.overrides if one.startswith("experiment=")]
    others = [one for one in args.overrides if not one.startswith("experiment=")]
    names = ",".join(experiments).split(",")
    tables = {name: measure(name, others, args.bounds.split(","), args.folder) for name in names}
    if args.figure:
        draw(tables, args.figure)


if __name__ == "__main__":
    main()
