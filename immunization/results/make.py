"""`make results`, or `python -m immunization.results.make`: run everything in RESULTS.md, and write it.

Completed jobs are kept, so it can be stopped and started again at any time.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from immunization.errors import ConfigError, UserError
from immunization.results.document import Places, write
from immunization.results.parts import Multirun, read

POLL, QUIET = 1.0, 60.0
"""Seconds between two looks at the run folders, and between two lines without a terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Say what is to be done, do it, and write the pages; returns 1 where a job failed. Raises UserError."""
    options = _parser().parse_args(arguments)
    folder = options.output or Path("outputs/results_quick" if options.quick else "outputs/results")
    known = read(folder, options.quick)
    if unknown := set(options.sections) - {section.name for section in known}:
        names = ", ".join(section.name for section in known)
        raise ConfigError(f"there is no section {', '.join(sorted(unknown))}; there are {names}")
    chosen = [section for section in known if section.name in options.sections or not options.sections]
    multiruns = [run for section in chosen if not section.lacking for run in section.multiruns]
    for run in multiruns:
        run.check()
    left = {run: run.missing() for run in multiruns}
    print(f"run folders: {folder}{os.sep}; completed jobs are not run again")
    for section in chosen:
        what = f"left out, {section.lacking}"
        if not section.lacking:
            missing = sum(len(left[run]) for run in section.multiruns)
            jobs = sum(len(run.jobs) for run in section.multiruns)
            what = f"{jobs:,} jobs, {f'{missing:,} to run' if missing else 'all completed'}"
        print(f"{section.name}: {what}", flush=True)
    if options.dry_run:
        return 0
    failed = [run for run in multiruns if left[run] and not complete(run, left[run])]
    command, own = "make results", Path() if not (options.quick or options.output) else folder
    places = Places(own / "RESULTS.md", own / "docs/results", own / "docs/images/results")
    if options.quick:
        command += " QUICK=1"
    if not (found := [section for section in known if section.groups]):
        raise UserError("no job is completed, so there is nothing to write")
    write(found, places, command, [section.title for section in known])
    print(f"written: {places.page}, {places.details}{os.sep}, {places.figures}{os.sep}")
    for run in failed:
        print(f"{len(run.missing())} of {len(run.jobs)} jobs are not completed: see {run.folder}.log", file=sys.stderr)
    return int(bool(failed))


def complete(run: Multirun, left: Sequence[int]) -> bool:
    """Run the remaining jobs of a multirun, with a progress bar; False if a job failed."""
    joblib = importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher")
    command = [sys.executable, "-m", "immunization", *run.arguments, *(["launcher=joblib"] if joblib else [])]
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    name, jobs, every = "/".join(run.folder.parts[-2:]), len(run.jobs), 0.1 if sys.stderr.isatty() else QUIET
    with (
        Path(f"{run.folder}.log").open("a") as log,
        tqdm(total=jobs, initial=jobs - len(left), desc=name, unit="job", mininterval=every) as bar,
    ):
        # a group of its own: with it end the processes of its launcher
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = False
            while not ended:
                with suppress(subprocess.TimeoutExpired):
                    ended = process.wait(POLL) is not None
                left = run.missing(left)
                bar.update(jobs - len(left) - bar.n)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # jobs write a checkpoint
                process.wait()
    return not left


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immunization.results.make", description=__doc__)
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help="some sections of results/parts.yaml (all)")
    add(
        "--quick",
        action="store_true",
        help="a small version that takes minutes, in outputs/results_quick with its own pages",
    )
    add("--output", type=Path, help="folder of the runs and of the pages")
    add("--dry-run", action="store_true", help="only list what would run")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
