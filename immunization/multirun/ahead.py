"""Jobs of a multirun that are trained ahead of their turn, side by side with the first of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from immunization.compute import machine, randomness
from immunization.config import check_trust, slug
from immunization.experiment import Experiment, assemble, resolve
from immunization.runs.folder import aside, log
from immunization.runs.result import Result
from immunization.runs.tracker import Tracker
from immunization.training import side_by_side
from immunization.training.assembly import Debug, Parts
from immunization.training.session import Monitor, TrainingSession

MOST, BYTES, SEARCHED = 13, 2**30, 256
"""Jobs that are trained together at most, bytes of their training inputs, and jobs among which they are looked for.

More jobs are hardly faster, as a step takes the time of its eigenproblems, and each keeps its iterates in memory.
"""
LINEAR = "immunization.models.Linear"
"""The `_target_` of models that may be trained side by side."""
Job = tuple[str, ...]
"""The overrides of a job, as they were typed."""
OWN = ("dataset", "method", "name", "objective", "pair", "seed", "tags")
"""Keys of a configuration in which they may differ, as far as their data have one shape."""


@dataclass
class Prepared:
    """A job before its training, or after it: its `session`, side by side with `others`, and still to be measured.

    `random` is the state of its random numbers, and `said` what it logged, until its turn.
    """

    experiment: Experiment
    parts: Parts
    session: TrainingSession | None = None
    others: int = 0
    random: dict[str, Any] = field(default_factory=randomness.states)
    said: list[logging.LogRecord] = field(default_factory=list)

    @cached_property
    def kind(self) -> object:
        """What jobs side by side agree in; None for one that is trained alone."""
        experiment = self.experiment
        scheduler = (experiment.settings["scheduler"] or {}).get("_target_", "")
        if experiment.debug != Debug() or experiment.checkpoint.get("every") or scheduler.endswith("ReduceLROnPlateau"):
            return None
        return side_by_side.kind_of(self.parts, experiment.optimizer)

    def begin(self) -> TrainingSession:
        """Its training, whose log waits for its turn."""
        parts, own = self.parts, self.experiment
        monitor = Monitor(parts.model, parts.trained_on, None)
        made = TrainingSession(parts, own.optimizer, own.scheduler, own.seed, monitor, log_every=own.log_every)
        self.session, made.said, made.random = made, self.said, self.random
        return made

    def deliver(self, result: Result, trackers: Sequence[Tracker]) -> None:
        """Give what was logged during the training to the job's own result and trackers."""
        assert self.session is not None  # it was trained
        assert self.session.monitor is not None
        for record in self.said:
            log.handle(record)
        log.info("trained side by side with %d other jobs of this multirun", self.others)
        self.session.monitor.deliver(result, trackers)
        result.seconds["immunize"] = self.session.seconds


class Ahead:
    """What one process knows of its coming jobs, for a launcher that runs one after the other.

    Each job still has its own folder, log, tracker and measures when its turn comes, and the bits that it has alone; of
    `imma`, the numbers up to rounding.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
        self.loader, self.master = loader, master
        self.waiting = [tuple(job) for job in jobs]
        self.prepared: dict[Job, Prepared] = {}
        self.spare: dict[Job, Prepared] = {}
        self.shared: dict[Job, str] = {}
        self.kinds: dict[Job, object] = {}
        self.data: dict[str, tuple[Any, dict[str, Any], list[logging.LogRecord]]] = {}
        self.alone: set[Job] = set()

    def take(self, overrides: Sequence[str]) -> Prepared | None:
        """The job whose turn it is, trained together with those that wait; None: it has to be trained alone.

        Random numbers go on where preparing the job left them.
        """
        if (job := tuple(overrides)) not in self.waiting:
            return None
        self.waiting.remove(job)
        if job not in self.prepared and job not in self.alone:
            with randomness.isolated_rng():
                self._fit(job)
        if found := self.prepared.pop(job, None):
            randomness.restore(found.random)
            machine.choose_threads(found.experiment.threads, found.parts.pair.dim)
        return found

    def _fit(self, first: Job) -> None:
        """Train a job, and up to `MOST` that wait and differ from it in numbers alone."""
        like = self.spare.pop(first, None) or self._prepare(first)
        if like is None:
            return
        jobs = {first: like}
        most = min(MOST, BYTES // sum(task.train.x.nbytes for task in like.parts.pair.tasks.values()))
        for job in self.waiting[:SEARCHED]:
            if job in self.prepared or job in self.alone or len(jobs) >= most:
                continue
            if self.shared.get(job, self.shared[first]) != self.shared[first]:
                continue
            if self.kinds.get(_but(job, like), like.kind) != like.kind:  # as of a job with the same data
                continue
            if other := self.spare.pop(job, None) or self._prepare(job, first):
                (jobs if other.kind == like.kind else self.spare)[job] = other
        self.spare = dict(list(self.spare.items())[:most])
        if len(jobs) == 1:
            return
        print(f"{len(jobs)} jobs that differ in numbers alone are trained side by side", flush=True)
        machine.choose_threads(like.experiment.threads, like.parts.pair.dim)
        ended: list[TrainingSession] = []
        try:
            ended = side_by_side.fit([own.begin() for own in jobs.values()])
        except Exception as error:  # of memory, or of somebody's own method: alone, each job meets its own
            told = "training jobs side by side failed (%s: %s); each of them is trained alone"
            log.warning(told, type(error).__name__, error)
        done = {
            job: replace(own, others=len(jobs) - 1, random=own.session.random or own.random)
            for job, own in jobs.items()
            if own.session in ended
        }
        self.prepared |= done
        self.alone |= jobs.keys() - done.keys()

    def _prepare(self, job: Job, like: Job | None = None) -> Prepared | None:
        """A job before its training; None for one that is wrong or that is trained alone.

        Beside another one, `like`, also for one that was begun before, or that differs in more than `OWN`.
        """
        try:
            config = self.loader.load_sweep_config(self.master, list(job))
            named = f"*_{slug(config.hydra.job.override_dirname)}"
            begun = like and self.master.resume and next(Path(self.master.hydra.sweep.dir).glob(named), None)
            linear = config.model.get("_target_") == LINEAR and config.method.get("batch_size", 0) is None
            if begun or not linear or config.immunize is not True:
                self.alone.add(job)
                return None  # before its data are read
            OmegaConf.set_struct(config, False)
            del config["hydra"]
            check_trust(config, job)
            with aside() as said:
                experiment = resolve(config, job)
            self.shared[job] = repr({key: value for key, value in experiment.settings.items() if key not in OWN})
            if like and self.shared[job] != self.shared[like]:
                return None
            with aside(said):
                made = Prepared(experiment, assemble(self._sharing(experiment)), said=said)
            if made.kind is not None:
                self.kinds[_but(job, made)] = made.kind
                return made
        except Exception:  # the job says so itself when its turn comes
            pass
        self.alone.add(job)
        return None

    def _sharing(self, experiment: Experiment) -> Experiment:
        """The experiment with data that are read once, and measured before immunization once, for all jobs with them.

        What was logged is logged again, and random numbers go on as after the reading.
        """
        key, read = repr((experiment.settings["dataset"], experiment.seed)), experiment.dataset

        def once() -> Any:
            if key not in self.data:
                with aside() as said:
                    data = read()
                size = sum(split.x.nbytes for task in data.tasks.values() for split in task.splits.values())
                if (len(self.data) + 1) * size > BYTES / 4:
                    self.data.clear()
                self.data[key] = data, randomness.states(), said
            data, after, said = self.data[key]
            randomness.restore(after)
            for record in said:
                log.handle(record)
            return data

        return replace(experiment, dataset=once)


def _but(job: Job, made: Prepared) -> Job:
    """The overrides of a job but for those in which jobs of its kind may differ."""
    varied = tuple(f"method.{name}=" for name in made.parts.method.side_by_side or ())
    return tuple(word for word in job if not word.startswith(varied))
