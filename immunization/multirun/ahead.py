"""Jobs of a multirun that are trained ahead of their turn, side by side with the first of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.compute import distributed, randomness
from immunization.config import check_trust, slug
from immunization.errors import UserError
from immunization.experiment import Experiment, assemble, resolve
from immunization.runs.folder import log
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker
from immunization.training import side_by_side
from immunization.training.assembly import Parts
from immunization.training.session import Monitor, TrainingSession

MOST, BYTES, SEARCHED = 64, 2**30, 256
"""Jobs that are trained together at most, bytes of their training inputs, and jobs among which they are looked for."""
OWN = ("dataset", "method", "name", "objective", "pair", "seed", "tags")
"""Keys of a configuration in which they may differ, as far as their data have one shape."""


@dataclass
class Prepared:
    """A job that was trained and is still to be measured; `random` is the state of its random numbers."""

    experiment: Experiment
    parts: Parts
    session: TrainingSession
    together: int = 1
    random: dict[str, Any] = field(default_factory=randomness.states)

    def deliver(self, result: Result, trackers: Sequence[Tracker]) -> None:
        """Give what was logged during the training to the job's own result and trackers."""
        log.info("trained side by side with %d other jobs of this multirun", self.together - 1)
        assert self.session.monitor is not None
        self.session.monitor.deliver(result, trackers)


class Ahead:
    """What one process knows of its coming jobs, for a launcher that runs one after the other.

    Each job still has its own folder, log, tracker and measures when its turn comes, and the bits that it has alone.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
        self.loader, self.master = loader, master
        self.waiting = [tuple(job) for job in jobs]
        self.prepared: dict[tuple[str, ...], Prepared] = {}

    def take(self, overrides: Sequence[str]) -> Prepared | None:
        """The job whose turn it is, once trained together with those that wait; None: it has to be trained alone.

        Random numbers go on where the job left them.
        """
        if (job := tuple(overrides)) not in self.waiting:
            return None
        if job not in self.prepared:
            with randomness.isolated_rng():
                self._fit(job)
        self.waiting.remove(job)
        if found := self.prepared.pop(job, None):
            randomness.restore(found.random)
        return found

    def _fit(self, first: tuple[str, ...]) -> None:
        """Train a job, and up to `MOST` that wait and differ from it in numbers alone."""
        if not (like := self._prepare(first)):
            return
        jobs, kind = {first: like}, side_by_side.kind_of(like.session)
        inputs = sum(task.train.x.nbytes for task in like.parts.trained_on.shown.values())
        most = min(MOST, BYTES // inputs) if kind is not None else 0
        for job in self.waiting[:SEARCHED]:
            other = None if job in jobs or len(jobs) >= most else self._prepare(job, like.experiment)
            if other and side_by_side.kind_of(other.session) == kind:
                jobs[job] = other
        if len(jobs) > 1:
            print(f"{len(jobs)} jobs that differ in numbers alone are trained side by side", flush=True)
            ended = side_by_side.fit([own.session for own in jobs.values()])
            jobs = {job: replace(own, together=len(jobs)) for job, own in jobs.items() if own.session in ended}
            self.prepared |= jobs

    def _prepare(self, job: tuple[str, ...], like: Experiment | None = None) -> Prepared | None:
        """A job before its training; None for one that differs in more, was begun before, or is wrong."""
        try:
            config = self.loader.load_sweep_config(self.master, list(job))
            named = f"*_{slug(config.hydra.job.override_dirname)}"
            if self.master.resume and next(Path(self.master.hydra.sweep.dir).glob(named), None):
                return None
            OmegaConf.set_struct(config, False)
            del config["hydra"]
            check_trust(config, job)
            experiment = resolve(config, job)
            alone = not experiment.immunize or experiment.checkpoint.get("every") or distributed.size() > 1
            if alone or (like and _shared(experiment) != _shared(like)):
                return None
            parts = assemble(experiment)
        except (UserError, OmegaConfBaseException):  # it says so itself when its turn comes
            return None
        monitor = Monitor(parts.model, parts.trained_on, None)
        session = TrainingSession(
            parts, experiment.optimizer, experiment.scheduler, experiment.seed, monitor, log_every=experiment.log_every
        )
        return Prepared(experiment, parts, session)


def _shared(experiment: Experiment) -> dict[str, Any]:
    """The settings that jobs side by side have in common."""
    return {key: value for key, value in experiment.settings.items() if key not in OWN}
