"""What follows a completed run: the table on the screen, then figures, an audit's page, the end of its trackers."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from immunization.results import run_figures
from immunization.results.screen import line
from immunization.results.screen import show as show_run
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker
from immunization.terminal import waiting

log = logging.getLogger(__name__)


def present(
    result: Result, trackers: Sequence[Tracker], quiet: bool, figures: bool | None = None, objective: str = "rir"
) -> None:
    """Print, draw and write what `result` holds, and close the trackers; nothing that fails here fails the run.

    `quiet` prints one line instead of the table, and draws figures only with `figures=True`.
    """
    with _harmless("the table cannot be printed"):  # first: the rest takes seconds
        if quiet:
            print(line(result, objective), flush=True)
        else:
            show_run(result, objective)
            sys.stdout.flush()
    pictures: list[Path] = []
    with _harmless("the figures cannot be drawn"), waiting("drawing the figures"):
        if figures or (figures is None and not quiet):
            pictures = run_figures.draw(result, result.folder)
    if any(name.startswith("attack/") for name in result.metrics):
        with _harmless("the report cannot be written"):
            from immunization.results import page  # loads pandas and jinja2, which other runs can do without

            page.audit(result.folder)
    for tracker in trackers:
        with waiting("handing over to the tracker"):
            tracker.finish(result, pictures)
        tracker.close(failed=False)


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    """Turn an exception into a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s (%s: %s); the result is complete", what, type(error).__name__, error)
