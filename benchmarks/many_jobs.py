"""One multirun of thousands of tiny jobs: time and files a job, memory over the sweep, whether the aggregate is right.

python benchmarks/many_jobs.py 5000 --folder /tmp/many_jobs
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ("tracker=none", "method=identity", "evaluation=[rir]", "dataset.max_samples=20", "threads=1")


def resident(pid: int) -> float:
    """MB of memory a process holds; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "launch.py"), "-m", *OPTIONS, f"seed=range({options.jobs})"]
    began, memory = time.monotonic(), {}
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with options.folder.with_suffix(".log").open("w") as log:
        sweep = subprocess.Popen([*command, f"hydra.sweep.dir={options.folder}"], stdout=log, stderr=log)
        while sweep.poll() is None:
            time.sleep(1)
            done = sum(1 for _ in options.folder.glob("*/")) if options.folder.exists() else 0
            memory[done] = resident(sweep.pid) or memory.get(done, 0.0)
    seconds = time.monotonic() - began

    with (options.folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    reported = {int(row["seed"]): float(row["kappa_harmful"]) for row in rows}
    results = [json.loads(path.read_text()) for path in options.folder.glob("*/result.json")]
    truth = {result["seed"]: result["metrics"]["kappa_harmful"] for result in results}
    files = [path.stat().st_size for path in next(options.folder.glob("0_*")).iterdir()]
    warm = {done: value for done, value in memory.items() if options.jobs // 20 <= done}
    during = {done: value for done, value in warm.items() if done < options.jobs}
    summary = {
        "jobs": options.jobs,
        "exit code": sweep.returncode,
        "seconds a job": round(seconds / options.jobs, 4),
        "MB after 5 % of the jobs": round(warm[min(warm)], 1),
        "MB after the last job": round(during[max(during)], 1),
        "MB at most, aggregate included": round(max(memory.values()), 1),
        "median MB, second half": round(statistics.median(v for d, v in memory.items() if d >= options.jobs / 2), 1),
        "files a job": len(files),
        "kB a job": round(sum(files) / 1000, 1),
        "aggregate is right": reported.keys() == truth.keys() == set(range(options.jobs))
        and all(abs(reported[seed] - truth[seed]) <= 1e-9 * truth[seed] for seed in truth),
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
