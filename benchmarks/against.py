"""Another checkout against this one: `python benchmarks/against.py OTHER [--repeats 5] [--quick]`.

The commands that people wait for, run in turn by the Python of this process, one thread each: a sweep of 75 default
jobs (5 lambda_P x 5 lambda_H x 3 seeds), the default run without W&B and figures, `import torch`, and the default run
until its table stands on the screen. Prints the median processor seconds of both (the last row: wall seconds), their
ratio, and the largest peak of memory. Also compares every metric of the sweep that both have: the largest relative
difference, and where it is.

    git worktree add ../other <commit>
    python benchmarks/against.py ../other
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
GRID = {
    False: ["method.lambda_P=0.3,1,3,10,30", "method.lambda_H=0.3,1,3,10,30", "seed=0,1,2"],
    True: ["method.lambda_P=1,3", "method.lambda_H=1,3", "seed=0"],
}
"""The sweep, and with `--quick` a small one."""


def run(folder: Path, arguments: list[str], until: str = "") -> tuple[float, float]:
    """Processor seconds and peak MB of a command; with `until`, wall seconds until it is printed."""
    command = [sys.executable, "-c", "import torch"] if not arguments else [sys.executable, "launch.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # or every call compiles the project anew, which a user's does once
    before, began, seen = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), math.nan
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:
        for line in process.stdout:
            if until and until in line and math.isnan(seen):
                seen = time.perf_counter() - began
    assert process.returncode == 0, f"{' '.join(command)} in {folder} ended with {process.returncode}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (seen if until else spent), after.ru_maxrss / 1024  # the largest child so far


def differences(mine: Path, other: Path) -> Iterator[tuple[float, str]]:
    """Relative differences of the metrics that two sweeps have in common."""
    for path in mine.glob("*/result.json"):
        metrics, others = (
            json.loads((root / path.parent.name / path.name).read_text())["metrics"] for root in (mine, other)
        )
        for name, value in metrics.items():
            if isinstance(value, float) and isinstance(before := others.get(name), float):
                yield abs(value - before) / (max(abs(value), abs(before)) or 1.0), f"{name} of {path.parent.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    quiet = ["tracker=none", "figures=false"]
    with tempfile.TemporaryDirectory() as made:
        rows = {
            "sweep": lambda at: ["-m", "tracker=none", *GRID[asked.quick], f"hydra.sweep.dir={at}"],
            "default run, no W&B, no figures": lambda at: [*quiet, f"hydra.run.dir={at}"],
            "import torch": lambda at: [],
            "default run until the table, wall": lambda at: [f"hydra.run.dir={at}"],
        }
        print("| | this | other | ratio | MB |\n|---|---:|---:|---:|---:|", flush=True)
        for number, (name, arguments) in enumerate(rows.items()):
            spent: dict[Path, list[float]] = {HERE: [], asked.other: []}
            for repeat in range(asked.repeats):
                for place, folder in enumerate(spent):
                    at = Path(made, f"{number}-{repeat}-{place}")
                    seconds, peak = run(folder, arguments(at), "RIR" * name.endswith("wall"))
                    spent[folder].append(seconds)
            mine, other = (statistics.median(of) for of in spent.values())
            print(f"| {name} | {mine:.2f} | {other:.2f} | {mine / other:.2f} | {peak:.0f} |", flush=True)
        worst = max(differences(Path(made, "0-0-0"), Path(made, "0-0-1")), default=(0.0, "none"))
    print(f"\nlargest relative difference of a metric: {worst[0]:.2g} ({worst[1]})")


if __name__ == "__main__":
    main()
