"""What a multirun does beside its jobs: it protects earlier runs, sums up at the end, and fails if a job failed."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.config import TRACK
from immunization.errors import UserError
from immunization.runs.filenames import REFUSED
from immunization.training.signals import imported
from immunization.usage import explained

if TYPE_CHECKING:
    from immunization.results.collect import Collection


class SweepSummary(Callback):
    """A Hydra callback: the table over all jobs of a multirun, of their run folders, and exit code 1 if one failed.

    `begun` is the key of the folder that this process fills, a run's or a sweep's, and its configuration.
    """

    begun: ClassVar[tuple[str, DictConfig] | None] = None

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Remember which folder is filled."""
        SweepSummary.begun = "hydra.run.dir", config

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Refuse to overwrite the runs of an earlier sweep; prepare for many jobs, and for jobs in other processes."""
        imported()  # as far as this process runs no job itself
        # processes that launchers start have to find this package
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        SweepSummary.begun = "hydra.sweep.dir", config
        try:
            folder = Path(config.hydra.sweep.dir)
        except OmegaConfBaseException as error:
            sys.exit(f"error: {explained(error)}")
        if not config.resume and next(folder.glob("*/config.yaml"), None):
            sys.exit(
                f"error: {folder} already holds runs; resume=true goes on with that sweep, another hydra.sweep.dir=... "
                "starts a new one"
            )
        _forget_refusals(folder)  # of a multirun that was killed
        jobs = _jobs(config)
        if jobs and any(word.startswith(TRACK) for word in jobs[0]):
            from immunization.results import rows

            print(rows.plan(jobs, folder, config.hydra.job.config.override_dirname.exclude_keys), flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Let go of a job's configuration: a launcher keeps what jobs return until the last one has run."""
        job_return.cfg = job_return.hydra_cfg = None

    @classmethod
    def interrupted(cls) -> str:
        """After Ctrl-C: print what a multirun has done so far, and return the line that says how to go on."""
        key, config = cls.begun or ("hydra.run.dir", None)
        folder = None if config is None else Path(OmegaConf.select(config, key))
        if folder is None or not folder.is_dir():
            return "interrupted before the run began"
        if key == "hydra.sweep.dir":
            with suppress(UserError):  # no job has begun
                _summary(config)
            _forget_refusals(folder)
        return f"interrupted: the same command with {key}={folder} resume=true goes on"

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Print and save the summary; Hydra turns exceptions of callbacks into warnings, exits it lets pass."""
        folder = Path(config.hydra.sweep.dir)
        try:
            collection = _summary(config)
            own = _own(config)
            failed = any(problem.kind != "repeated" and own(problem.folder) for problem in collection.problems)
            _forget_refusals(folder)
        except Exception:
            traceback.print_exc()
            sys.exit(f"error: the jobs have run, but there is no summary; python -m immunization.results {folder}")
        asked = any(word.startswith("objective=") for word in config.hydra.overrides.task)
        unknown = asked and all(run.result.metrics.get(config.objective) is None for run in collection.runs)
        if unknown or failed:
            sys.exit(1)


def _summary(config: DictConfig) -> "Collection":
    """Print and save the table over all jobs; what a job refused to write over is none of them."""
    from immunization.results.collect import collect
    from immunization.results.page import summarize

    folder = Path(config.hydra.sweep.dir)
    collection = collect([folder])
    summarize(collection, folder, config.objective)
    return collection


def _jobs(config: DictConfig) -> list[list[str]]:
    """The overrides of the jobs of this command; none where another sweeper than Hydra's own chooses them."""
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    try:
        overrides = OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
        return BasicSweeper.split_arguments(overrides, None)[0]
    except HydraException:
        return []


def _own(config: DictConfig) -> Callable[[Path], bool]:
    """Whether a job of this command left what is in a run folder; those that ended before they said so count, too.

    Others in the folder of the sweep are in the table, but not in the exit code.
    """
    from immunization.results import rows

    ignored = config.hydra.job.config.override_dirname.exclude_keys
    jobs = {rows.job(job, ignored) for job in _jobs(config)}

    def own(folder: Path) -> bool:
        overrides = rows.overrides_of(folder)
        return not (jobs and overrides) or (folder / REFUSED).exists() or rows.job(overrides, ignored) in jobs

    return own


def _forget_refusals(folder: Path) -> None:
    """Let what jobs refused to write over be runs again."""
    for refused in folder.rglob(REFUSED):
        refused.unlink()
