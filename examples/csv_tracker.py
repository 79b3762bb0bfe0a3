"""A tracker that writes every number of a run to a file for spreadsheets."""

import csv
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from immunization import Result, Tracker

log = logging.getLogger("immunization")  # its messages are in run.log of the run folder


class CSVTracker(Tracker):
    """Lines `step,name,value` in `file` of the run folder. Final measures have no step.

    A resumed run appends its lines. Steps after its checkpoint are in the file twice: the later lines count.
    """

    def __init__(self, file: str = "metrics.csv") -> None:
        self.file = file

    def start(self, folder: Path, config: dict[str, Any], name: str, group: str, tags: list[str]) -> None:
        self.path = folder / self.file
        if self.run_id is None:
            self.run_id = name
            self._write([("step", "name", "value")], "w")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write((step, *metric) for metric in metrics.items())

    def finish(self, result: Result, figures: list[Path]) -> None:
        self._write(("", *metric) for metric in result.metrics.items())

    def _write(self, lines: Iterable[tuple], mode: str = "a") -> None:
        try:
            with self.path.open(mode, newline="") as file:
                csv.writer(file).writerows(lines)
        except OSError as error:
            log.warning("%s: %s; the run goes on", self.path, error.strerror)
