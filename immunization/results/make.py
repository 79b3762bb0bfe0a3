"""`make results`, or `python -m immunization.results.make`: everything RESULTS.md is made of, and RESULTS.md itself.

Completed jobs are left as they are, so that it can be stopped and started again at any time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from immunization.compute.machine import cores
from immunization.errors import ConfigError, UserError
from immunization.results.document import Places, parts, write
from immunization.results.parts import Machine, Multirun, Section, read

POLL, SAY = 1.0, 60.0
"""Seconds between two looks at the run folders, and between two lines where there is no terminal."""


def main(arguments: list[str] | None = None) -> int:
    """Say what is to be done, do it, and write the pages; returns 1 where a job failed. Raises UserError."""
    options = _parser().parse_args(arguments)
    folder = options.output or Path("outputs/results_quick" if options.quick else "outputs/results")
    machine, known = read(folder, options.quick)
    if unknown := set(options.sections) - {section.name for section in known}:
        names = ", ".join(section.name for section in known)
        raise ConfigError(f"there is no section {', '.join(sorted(unknown))}; there are {names}")
    chosen = [section for section in known if section.name in options.sections or not options.sections]
    multiruns = [run for section in chosen if not section.lacking for run in section.multiruns]
    for run in multiruns:
        run.check()
    work = Work(machine, multiruns)
    announce(chosen, work, folder)
    if options.dry_run:
        return 0
    failed = [run for run in work.multiruns if work.left[run] and not work.do(run)]
    command, own = "make results", Path() if not (options.quick or options.output) else folder
    places = Places(own / "RESULTS.md", own / "docs/results", own / "docs/images/results")
    if options.quick:
        command += " QUICK=1"
    if not (found := parts(known)):
        raise UserError("no job is completed: there is nothing to write")
    write(found, places, command, [section.title for section in known])
    print(f"written: {places.page}, {places.details}{os.sep}, {places.figures}{os.sep}")
    for run in failed:
        print(f"{len(run.missing())} of {len(run.jobs)} jobs are not completed: see {run.folder}.log", file=sys.stderr)
    return int(bool(failed))


class Work:
    """The jobs that are left, and what they cost: by parts.yaml, then by the time that those before them took."""

    def __init__(self, machine: Machine, multiruns: Sequence[Multirun]) -> None:
        self.machine, self.multiruns = machine, list(multiruns)
        self.launcher = ["launcher=joblib"] if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") else []
        self.cores = cores() if self.launcher else 1
        self.left = {run: run.missing() for run in self.multiruns}
        self.slower = machine.factor() if any(self.left.values()) else 1.0
        self.all = self.cpu(self.multiruns)
        self.begun, self.done, self.said = time.monotonic(), 0.0, 0.0

    def cpu(self, multiruns: Sequence[Multirun]) -> float:
        """CPU seconds, on the machine of parts.yaml, of what is left of some multiruns."""
        return sum(run.cost(self.left[run], self.machine.overhead) for run in multiruns)

    def seconds(self, multiruns: Sequence[Multirun]) -> float:
        """Wall-clock seconds of what is left of some multiruns, on this machine."""
        if self.done:
            return self.cpu(multiruns) * (time.monotonic() - self.begun) / self.done
        left = [run for run in multiruns if self.left[run]]
        side_by_side = sum(self.cpu([run]) / min(self.cores, len(self.left[run])) for run in left)
        return self.slower * (side_by_side + self.machine.start * len(left))

    def do(self, run: Multirun) -> bool:
        """Run what is left of a multirun, and say how far it is; False where a job failed."""
        command = [sys.executable, "-m", "immunization", *run.arguments, *self.launcher]
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{run.folder}.log").open("a") as log:
            # a group of its own: with it end the processes of its launcher
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while process.poll() is None:
                    time.sleep(POLL)
                    self._look(run)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # jobs write a checkpoint
                    process.wait()
        self._look(run, last=True)
        complete = not self.left[run]
        self.left[run] = []
        return complete

    def _look(self, run: Multirun, last: bool = False) -> None:
        """Count what was completed since, and say it: at once on a terminal, else once a minute."""
        before, self.left[run] = self.cpu([run]), run.missing(self.left[run])
        self.done += before - self.cpu([run])
        terminal, now = sys.stdout.isatty(), time.monotonic()
        if not (terminal or last or now - self.said > SAY):
            return
        self.said = now
        jobs = f"{run.name}: {len(run.jobs) - len(self.left[run]):,} of {len(run.jobs):,} jobs"
        share = f"{self.done / self.all:.0%} of what was left" if self.all else ""
        line = f"{jobs}; {share}, {clock(self.seconds(self.multiruns))} to go"
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal and not last else "\n", flush=True)


def announce(sections: Sequence[Section], work: Work, folder: Path) -> None:
    """What will be run and how long that takes, and what is left out and why."""
    print(f"run folders: {folder}{os.sep}; what is completed there is not run again")
    for section in sections:
        if section.lacking:
            print(f"{section.name}: left out, {section.lacking}")
            continue
        jobs, left = (
            sum(map(len, lists)) for lists in zip(*((r.jobs, work.left[r]) for r in section.multiruns), strict=True)
        )
        rest = f"{left:,} to run, {clock(work.seconds(section.multiruns))}" if left else "all completed"
        print(f"{section.name}: {jobs:,} jobs, {rest}")
    if any(work.left.values()):
        machine = f"a product takes {work.slower:.2g} times what it took where the jobs were timed"
        print(f"in all {clock(work.seconds(work.multiruns))} on {work.cores} cores ({machine})", flush=True)


def clock(seconds: float) -> str:
    """`about 40 s`, `about 12 min`, `about 3 h 20 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"about {max(1, round(seconds))} s"
    return f"about {minutes} min" if minutes < 60 else f"about {minutes // 60} h {minutes % 60} min"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immunization.results.make", description=__doc__)
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help="some sections of results/parts.yaml (all)")
    add("--quick", action="store_true", help="a small form of minutes, in outputs/results_quick with its own pages")
    add("--output", type=Path, help="folder of the runs; the pages are then written there, too")
    add("--dry-run", action="store_true", help="say what would be run and how long it would take")
    return parser


def _stopped(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stopped)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
