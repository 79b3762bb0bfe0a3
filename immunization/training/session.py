"""One training, with its progress bar, its log lines and its checkpoints."""

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from immunization.compute import distributed, machine, randomness
from immunization.data.task import TaskPair
from immunization.errors import DataError, Diverged
from immunization.models import Model
from immunization.models.base import kept_of, load_into
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.records import Record, from_flat
from immunization.runs.result import Result
from immunization.runs.tracker import Recorder, Tracker
from immunization.terminal import progress_bar
from immunization.theory.spectrum import features_of
from immunization.training.assembly import Debug, Parts
from immunization.training.batches import batches_of
from immunization.training.checkpoint import Checkpointer
from immunization.training.loop import Progress, train
from immunization.training.optimization import optimizer_of

log = logging.getLogger(__name__)

LOG_LINES = 40  # lines of metrics.jsonl a run writes by default


class Monitor:
    """Sends the terms of a step and all condition numbers, of a net those of every `period` steps, to every tracker."""

    def __init__(self, model: Model, pair: TaskPair, result: Result | None, trackers: Sequence[Tracker] = ()) -> None:
        """Without a `result`, lines wait for the one that `deliver` names."""
        self.model, self.result, self.trackers = model, result, trackers
        self.waiting: list[tuple[int, list[Record], dict[str, float]]] = []
        self.tasks = pair.shown
        factors = {role: model.baseline_factor(role, task) for role, task in self.tasks.items()}
        self.ranks = {role: task.rank_of(factors[role]) for role, task in self.tasks.items()}
        self.baseline = self._kappas(factors, "baseline")
        self.labels = {role: zlib.crc32(task.train.y.cpu().numpy()) for role, task in self.tasks.items()}
        self.kappa, self.period = self.baseline, 1

    def _kappas(self, factors: Mapping[str, Tensor], state: str) -> dict[str, float]:
        kappas = {}
        for role, factor in factors.items():
            with features_of(f"{role} task, {state}"):
                kappas[role] = self.tasks[role].condition_number(factor, self.ranks[role])
        return kappas

    def state_dict(self) -> dict[str, Any]:
        assert self.result is not None  # checkpoints are those of a run
        return {"baseline": self.baseline, "labels": self.labels, "kappa": self.kappa, "metrics": self.result.metrics}

    def places(self) -> dict[str, Any]:
        """Where the log and a tracker's own run stand, for checkpoints."""
        recorder = next((tracker for tracker in self.trackers if isinstance(tracker, Recorder)), None)
        return {
            "recorder": recorder and recorder.state_dict(),
            "tracker": next((tracker.run_id for tracker in self.trackers if tracker.run_id), None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the data, as far as their spectra and labels show it, are not those of `state`."""
        before, now = state["baseline"], self.baseline
        if state["labels"] != self.labels or not all(math.isclose(before[r], now[r], rel_tol=1e-6) for r in now):
            raise ValueError("the inputs, features or labels are others than before")
        self.kappa = state["kappa"]
        assert self.result is not None
        self.result.records.add(*from_flat(state["metrics"], {}).values())

    def __call__(self, step: int, terms: Mapping[str, Tensor]) -> dict[str, float]:
        """Log one line and return its numbers; raises Diverged where theta overflows."""
        if step % self.period == 0 and (step or self.period == 1):
            factors = {role: self.model.factor(task) for role, task in self.tasks.items()}
            large = [role for role, factor in factors.items() if not torch.isfinite(factor.square().sum())]
            if large and not step:
                raise Diverged(
                    f"the features of the {large[0]} task are so large that their squares overflow before any step; "
                    "rescale the data"
                )
            if large:
                raise Diverged(f"theta overflows at step {step}; lower optimizer.lr or the weights in method.*")
            self.kappa = self._kappas(factors, f"model at step {step}")
        ratio = {role: kappa / self.baseline[role] for role, kappa in self.kappa.items()}
        lost = self.tasks["primary"].kappa_bound <= self.kappa["primary"] < math.inf  # RIR may be anything below
        rir = math.nan if lost else ratio["harmful"] / ratio["primary"]
        records = [Record(name, term.item()) for name, term in terms.items()]
        for measure, of in (("kappa", self.kappa), ("ratio", ratio), ("rir", {"harmful": rir})):
            records += [Record(measure, value, role, split="train") for role, value in of.items()]
        values = {record.of.name: record.value for record in records}
        self.waiting.append((step, records, values))
        if self.result is not None:
            self.deliver(self.result, self.trackers)
        return values

    def deliver(self, result: Result, trackers: Sequence[Tracker]) -> None:
        """Give the lines that wait, and those to come, to a result and to trackers."""
        self.result, self.trackers = result, trackers
        for step, records, values in self.waiting:
            result.records.add(*records)
            for tracker in trackers:
                tracker.log(step, values)
        self.waiting = []


class TrainingSession:
    """One training of `parts`, with a progress bar; it goes on from `state`, that of a checkpoint.

    `optimizer` is called with groups of parameters, `scheduler` with the optimizer and the number of its steps.
    `monitor` logs every `log_every` steps (None: some 40 lines in all), and `keeper` writes checkpoints.
    """

    def __init__(
        self,
        parts: Parts,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler | None] | None,
        seed: int,
        monitor: Monitor | None = None,
        keeper: Checkpointer | None = None,
        state: dict[str, Any] | None = None,
        log_every: int | None = None,
        debug: Debug | None = None,
    ) -> None:
        self.method, self.model, self.pair = parts.method, parts.model, parts.trained_on
        self.make, self.seed, self.log_every, self.debug = (optimizer, scheduler), seed, log_every, debug or Debug()
        self.monitor, self.keeper, self.state = monitor, keeper, state
        self.progress, self.started, self.steps = Progress(), time.perf_counter(), 0
        self.earlier = state["seconds"] if state else 0.0
        self.took: float | None = None
        # of a job side by side with others: what is logged before its turn, and where random numbers go on
        self.said: list[logging.LogRecord] = []
        self.random: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Wall-clock time since the session was made, and before it was interrupted; a share of it, side by side."""
        return self.earlier + time.perf_counter() - self.started if self.took is None else self.took

    def where(self) -> str:
        """The step that is being taken, in words."""
        if not (self.steps or self.progress.step):
            return f"{self.method.name}: solving"
        return f"{self.method.name}: step {self.progress.step:,}" + (f" of {self.steps:,}" if self.steps else "")

    def fit(self) -> None:
        """Train in place. Raises Diverged, DataError where `state` does not fit, Preempted on SIGTERM."""
        per_epoch = self.prepare()
        if self.method.epochs and per_epoch != 0:
            self._train(per_epoch)
        self.method.finish(self.model)

    def prepare(self) -> int | None:
        """Everything before the first step; the number of steps of an epoch, None where a loader cannot say it."""
        method, model = self.method, self.model
        method.setup(model, self.pair)
        generator = torch.Generator().manual_seed(self.seed)
        size = method.batch_size
        if size and self.debug.rows:
            size = min(size, *(len(task.train) for task in self.pair.shown.values()))
        self.batches = batches_of(model, self.pair, size, generator, method.shots)
        per_epoch = self.batches.steps_per_epoch
        if self.monitor:
            self.monitor.period = per_epoch if per_epoch and model.trains_layers else 1
            if self.state is None:
                self.monitor(0, {})
        if per_epoch:
            self.steps = self.debug.steps or method.epochs * per_epoch
        return per_epoch

    def _train(self, per_epoch: int | None) -> None:
        """Train for all epochs, of `per_epoch` steps each; None where a loader cannot say how many it has."""
        optimizer, scheduler = self.make
        if per_epoch is not None:
            self.method.epochs = math.ceil(self.steps / per_epoch)
        elif scheduler:
            raise DataError("the harmful loader has no length, which a scheduler needs; give it one, or scheduler=none")
        self.optimizer = optimizer_of(optimizer, self.model.groups())
        self.scheduler = scheduler and scheduler(self.optimizer, self.steps)
        distributed.attach(self.model.extractor, self.optimizer)
        if self.state:
            self.load_state_dict(self.state)
            log.info("going on after step %d", self.progress.step)
        remedy = "lower it, or use dtype=float32, fewer trained layers (model.trainable), or device=cpu"
        with ExitStack() as inside:
            options = {"initial": self.progress.step, "desc": self.method.name, "unit": "step"}
            self.bar = inside.enter_context(progress_bar(total=self.steps or None, **options))
            inside.enter_context(machine.gpu_memory(f"method.batch_size={self.method.batch_size}", remedy))
            if self.keeper:
                inside.enter_context(self.keeper.stop.after_steps())
            if self.monitor and self.monitor.result:
                inside.enter_context(self.debug.watching(self.monitor.result.folder))
            parts = self.method, self.model, self.batches, self.optimizer
            train(*parts, self._after_step, self.progress, self.scheduler, self.debug.steps, self.logged)
        if self.keeper:
            self.keeper.finish(self.progress.step, self.state_dict)

    def logged(self, step: int) -> bool:
        """Whether a step is one that the monitor logs."""
        if not self.monitor:
            return False
        large = not self.model.trains_layers and self.pair.dim > machine.SMALL  # a log line costs more than a step
        every = self.log_every or max(1, self.steps // (LOG_LINES // 2 if large else LOG_LINES))
        period = self.monitor.period
        return step % every == 0 or step == self.steps or (step % period == 0 and period > 1)

    def note(self, step: int, terms: Mapping[str, Tensor], place: int | None = None) -> dict[str, float]:
        """Log a step where it is one that is logged, and return its numbers; `terms` may be those of a stack's jobs."""
        if not self.monitor or not self.logged(step):
            return {}
        return self.monitor(step, {name: term if place is None else term[place] for name, term in terms.items()})

    def _after_step(self, step: int, terms: dict[str, Tensor]) -> None:
        self.bar.update()
        if values := self.note(step, terms):
            shown = {name: f"{values[name]:.3g}" for name in ("loss", "rir", "lr") if name in values}
            self.bar.set_postfix(shown, refresh=False)
        if self.keeper:
            self.keeper(step, self.state_dict)

    def _stateful(self) -> dict[str, Any]:
        parts = {"method": self.method, "optimizer": self.optimizer, "batches": self.batches}
        parts |= {"monitor": self.monitor, "scheduler": self.scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is made of: model, optimizer, place in the data, random states, what was logged."""
        return {name: part.state_dict() for name, part in self._stateful().items()} | {
            "model": kept_of(self.model),
            "progress": vars(self.progress),
            "random": randomness.states(),
            "seconds": self.seconds,
            **(self.monitor.places() if self.monitor else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError where `state` does not fit, as the data or the weights have changed."""
        try:
            for name, part in self._stateful().items():
                part.load_state_dict(state[name])
            load_into(self.model, state["model"])
            vars(self.progress).update(state["progress"])
            randomness.restore(state["random"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.keeper.path if self.keeper else CHECKPOINT} does not fit this run ({error}): the data, the "
                "weights or the program have changed; give another hydra.run.dir=... to start a new run"
            ) from error
