"""The end of a multirun: earlier runs are protected, results summed up, and a failed job fails the command."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.config import TRACK
from immunization.errors import UserError
from immunization.multirun.composing import SharedComposition
from immunization.multirun.engines import outlive
from immunization.runs.filenames import REFUSED
from immunization.training.signals import end_at_once, imported
from immunization.usage import explained

if TYPE_CHECKING:
    from immunization.multirun.ahead import Ahead
    from immunization.results.collect import Collection


class SweepSummary(Callback):
    """A Hydra callback: the table over all jobs of a multirun, of their run folders, and exit code 1 if one failed.

    `begun` is the key of the folder that this process fills, a run's or a sweep's, and its configuration; `jobs` holds
    the overrides of the jobs of this command: others in the folder are in the table, but not in the exit code. `ahead`
    gives what this process may train ahead, where it runs all jobs itself.
    """

    begun: ClassVar[tuple[str, DictConfig] | None] = None
    jobs: ClassVar[list[Sequence[str]]] = []
    ahead: ClassVar[Callable[[], "Ahead | None"]] = staticmethod(lambda: None)

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Remember which folder is filled."""
        SweepSummary.begun, SweepSummary.ahead = ("hydra.run.dir", config), staticmethod(lambda: None)

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Refuse to overwrite the runs of an earlier sweep; prepare for many jobs, and for jobs in other processes."""
        imported()  # as far as this process runs no job itself
        setattr(Sweeper, "validate_batch_is_legal", _validate)  # noqa: B010
        outlive()
        # processes that launchers start have to find this package
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        SweepSummary.begun, SweepSummary.jobs = ("hydra.sweep.dir", config), []
        SweepSummary.ahead = staticmethod(lambda: None)
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

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Let go of a job's configuration: a launcher keeps what jobs return until the last one has run."""
        job_return.cfg = job_return.hydra_cfg = None

    @classmethod
    def many(cls) -> bool:
        """Whether this process runs the jobs of a sweep."""
        return cls.begun is not None and cls.begun[0] == "hydra.sweep.dir"

    @classmethod
    def interrupted(cls) -> str:
        """After Ctrl-C: print what a multirun has done so far, and return the line that says how to go on.

        Once more ends the process at once.
        """
        end_at_once()
        key, config = cls.begun or ("hydra.run.dir", None)
        folder = None if config is None else Path(OmegaConf.select(config, key))
        if folder is None or not folder.is_dir():
            return "interrupted before the run began"
        if cls.many() and config is not None:
            with suppress(UserError):  # no job has begun
                _summary(config)
            _forget_refusals(folder)
        return f"interrupted: the same command with {key}={folder} resume=true goes on"

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Print and save the summary; Hydra turns exceptions of callbacks into warnings, exits it lets pass."""
        folder = Path(config.hydra.sweep.dir)
        try:
            collection = _summary(config)
            failed = any(problem.kind != "repeated" and _own(problem.folder, config) for problem in collection.problems)
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


def _own(folder: Path, config: DictConfig) -> bool:
    """Whether a job of this command left what is in a run folder; those that ended before they said so count, too."""
    from immunization.results import rows

    ignored, overrides = config.hydra.job.config.override_dirname.exclude_keys, rows.overrides_of(folder)
    jobs = {rows.job(job, ignored) for job in SweepSummary.jobs}
    return not (jobs and overrides) or (folder / REFUSED).exists() or rows.job(overrides, ignored) in jobs


def _forget_refusals(folder: Path) -> None:
    """Let what jobs refused to write over be runs again."""
    for refused in folder.rglob(REFUSED):
        refused.unlink()


def _ahead(*arguments: Any) -> "Ahead":
    from immunization.multirun.ahead import Ahead  # which imports torch

    return Ahead(*arguments)


def _track(config: DictConfig, batch: list[Sequence[str]]) -> None:
    """Put the jobs of a track of the leaderboard in the order of their methods, and say what is missing of it."""
    if any(word.startswith(TRACK) for word in batch[0]):
        from immunization.results import rows

        methods = list(dict.fromkeys(word for job in batch for word in job if word.startswith("method=")))
        batch.sort(key=lambda job: [methods.index(word) for word in job if word in methods])
        ignored = config.hydra.job.config.override_dirname.exclude_keys
        print(rows.plan(batch, Path(config.hydra.sweep.dir), ignored), flush=True)


def _validate(sweeper: Sweeper, batch: list[Sequence[str]]) -> None:
    """In place of Hydra's, which composes every job before the first one starts, in this process: 0.2 s each.

    Hydra takes sweepers only from hydra_plugins, and its own one, from which such a sweeper would inherit, is private.
    Here only jobs with a key, or an option of a group, that none before them had are composed: in the values of other
    keys composing finds no mistakes. A job that `batch` holds twice is taken out of it.
    """
    jobs = list(dict.fromkeys(map(tuple, batch)))
    if repeated := len(batch) - len(jobs):
        print(f"{repeated} of {len(batch)} jobs repeat another one and are left out", flush=True)
        batch[:] = jobs
    SweepSummary.jobs += map(list, batch)
    config, context = sweeper.config, sweeper.hydra_context
    assert config is not None  # a sweeper that was set up has both
    assert context is not None
    _track(config, batch)
    loader = context.config_loader
    if config.hydra.launcher._target_ == "hydra._internal.core_plugins.basic_launcher.BasicLauncher":
        SweepSummary.ahead = cache(partial(_ahead, loader, config, batch))
    if not isinstance(loader.load_sweep_config, SharedComposition):
        setattr(loader, "load_sweep_config", SharedComposition(loader))  # noqa: B010  # launchers ask the same loader
    is_group = cache(lambda key: bool(loader.get_group_options(key)))
    seen: set[str] = set()
    for overrides in batch:
        keys = {override.partition("=")[0]: override for override in overrides}
        news = {override if is_group(key) else key for key, override in keys.items()} - seen
        if news:
            seen |= news
            loader.load_sweep_config(config, list(overrides))
