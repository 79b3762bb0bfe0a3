"""Jobs of a multirun that are trained ahead of their turn, side by side with the first of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from immunization.compute import randomness
from immunization.config import check_trust, slug
from immunization.errors import UserError
from immunization.experiment import Experiment, assemble, resolve
from immunization.runs.folder import log
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker
from immunization.training import side_by_side
from immunization.training.assembly import Debug, Parts
from immunization.training.session import Monitor, TrainingSession

MOST, BYTES, SEARCHED = 32, 2**30, 256
"""Jobs that are trained together at most, bytes of their training inputs, and jobs among which they are looked for."""
LINEAR = "immunization.models.Linear"
"""The `_target_` of models that may be trained side by side."""
Job = tuple[str, ...]
"""The overrides of a job, as they were typed."""
OWN = ("dataset", "method", "name", "objective", "pair", "seed", "tags")
"""Keys of a configuration in which they may differ, as far as their data have one shape."""


@dataclass
class Prepared:
    """A job that is still to be measured, and its `session` where it was trained side by side with `others`.

    `random` is the state of its random numbers before the training.
    """

    experiment: Experiment
    parts: Parts
    session: TrainingSession | None = None
    others: int = 0
    random: dict[str, Any] = field(default_factory=randomness.states)

    @property
    def kind(self) -> object:
        """What jobs side by side agree in; None for one that is trained alone."""
        experiment = self.experiment
        if experiment.debug != Debug() or experiment.checkpoint.get("every") or not experiment.immunize:
            return None
        shared = {key: value for key, value in experiment.settings.items() if key not in OWN}
        kind = side_by_side.kind_of(self.parts, experiment.optimizer)
        return kind and (*kind, repr(shared))

    def begin(self) -> TrainingSession:
        """Its training, whose log waits for its turn."""
        parts, own = self.parts, self.experiment
        monitor = Monitor(parts.model, parts.trained_on, None)
        made = TrainingSession(parts, own.optimizer, own.scheduler, own.seed, monitor, log_every=own.log_every)
        self.session = made
        return made

    def deliver(self, result: Result, trackers: Sequence[Tracker]) -> bool:
        """Give what was logged during the training to the job's own result and trackers; False: it was not trained."""
        if self.session is None or self.session.monitor is None:
            return False
        log.info("trained side by side with %d other jobs of this multirun", self.others)
        self.session.monitor.deliver(result, trackers)
        result.seconds["immunize"] = self.session.seconds
        return True


class Ahead:
    """What one process knows of its coming jobs, for a launcher that runs one after the other.

    Each job still has its own folder, log, tracker and measures when its turn comes, and the bits that it has alone.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
        self.loader, self.master = loader, master
        self.waiting = [tuple(job) for job in jobs]
        self.prepared: dict[Job, Prepared] = {}
        self.spare: dict[Job, Prepared] = {}

    def take(self, overrides: Sequence[str]) -> Prepared | None:
        """The job whose turn it is, prepared, and trained where that goes together with jobs that wait; None: neither.

        Random numbers go on where preparing the job left them.
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

    def _fit(self, first: Job) -> None:
        """Train a job, and up to `MOST` that wait and differ from it in numbers alone."""
        if not (like := self.spare.pop(first, None) or self._prepare(first, anew=False)):
            return
        jobs, kind = {first: like}, like.kind
        if kind is not None:
            most = min(MOST, BYTES // sum(task.train.x.nbytes for task in like.parts.pair.tasks.values()))
            for job in self.waiting[:SEARCHED]:
                if job in jobs or job in self.prepared or len(jobs) >= most:
                    continue
                if other := self.spare.pop(job, None) or self._prepare(job):
                    (jobs if other.kind == kind else self.spare)[job] = other
            self.spare = dict(list(self.spare.items())[:most])
        if len(jobs) > 1:
            print(f"{len(jobs)} jobs that differ in numbers alone are trained side by side", flush=True)
            try:
                ended = side_by_side.fit([own.begin() for own in jobs.values()])
            except (RuntimeError, TypeError, ValueError) as error:  # memory, or a method of somebody's own
                log.warning("side by side it does not go (%s: %s); each is trained alone", type(error).__name__, error)
                ended = []
            jobs = {job: replace(own, others=len(jobs) - 1) for job, own in jobs.items() if own.session in ended}
        self.prepared |= jobs

    def _prepare(self, job: Job, anew: bool = True) -> Prepared | None:
        """A job before its training; None for one that is wrong or no linear model in full batches.

        With `anew` also for one that was begun before.
        """
        try:
            config = self.loader.load_sweep_config(self.master, list(job))
            named = f"*_{slug(config.hydra.job.override_dirname)}"
            if anew and self.master.resume and next(Path(self.master.hydra.sweep.dir).glob(named), None):
                return None
            if config.model.get("_target_") != LINEAR or config.method.get("batch_size", 0) is not None:
                return None  # before its data are read
            OmegaConf.set_struct(config, False)
            del config["hydra"]
            check_trust(config, job)
            experiment = resolve(config, job)
            return Prepared(experiment, assemble(experiment))
        except (UserError, OmegaConfBaseException):  # it says so itself when its turn comes
            return None
