"""What people see of a completed run: figures, the page of an audit, trackers and the screen."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from immunization.results import run_figures
from immunization.results.screen import line, show
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker

log = logging.getLogger(__name__)


def present(config: DictConfig, result: Result, trackers: Sequence[Tracker], quiet: bool) -> None:
    """Figures, trackers and the screen: the result stands, and nothing that fails here makes it a failed one."""
    pictures: list[Path] = []
    with _without_harm("the figures cannot be drawn"):
        if config.figures or (config.figures is None and not quiet):
            pictures = run_figures.draw(result, result.folder)
    if any(name.startswith("attack/") for name in result.metrics):
        with _without_harm("the report cannot be written"):
            from immunization.results import page  # pandas and more, not for runs without attacks

            page.audit(result.folder)
    for tracker in trackers:
        with _without_harm("a tracker failed at the end"):
            tracker.finish(result, pictures)
        tracker.close(failed=False)
    with _without_harm("the table cannot be printed"):
        if quiet:
            print(line(result), flush=True)
        else:
            show(result)


@contextmanager
def _without_harm(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning("%s (%s: %s); the result is complete", what, type(error).__name__, error)
