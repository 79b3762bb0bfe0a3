"""One training, with its progress bar, its log lines and its checkpoints."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from immunization.compute import distributed, machine, randomness
from immunization.errors import DataError
from immunization.models.base import kept_of, load_into
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.folder import RunFolder
from immunization.terminal import progress_bar
from immunization.training.batches import batches_of
from immunization.training.checkpoint import Checkpointer
from immunization.training.loop import Progress, train
from immunization.training.monitor import Monitor
from immunization.training.optimization import optimizer_of
from immunization.training.signals import Stop

if TYPE_CHECKING:
    from immunization.experiment import Experiment, Parts

log = logging.getLogger(__name__)

LOG_LINES = 40  # lines of metrics.jsonl a run writes by default


class TrainingSession:
    """One training, with a progress bar, log lines and checkpoints; it goes on from `state`, that of a checkpoint."""

    def __init__(
        self, experiment: Experiment, parts: Parts, run: RunFolder, stop: Stop, state: dict[str, Any] | None
    ) -> None:
        self.experiment, self.debug = experiment, experiment.debug
        self.method, self.model, self.pair = parts.method, parts.model, parts.trained_on
        options = experiment.checkpoint if run.recorder else {"seconds": None}
        self.keeper = Checkpointer(run.path, experiment.settings, stop, **options)
        self.monitor = Monitor(self.model, self.pair, run.result, run.trackers)
        self.recorder, self.state = run.recorder, state
        self.progress, self.started, self.steps = Progress(), time.perf_counter(), 0
        self.earlier = state["seconds"] if state else 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time since the session was made, and before it was interrupted."""
        return self.earlier + time.perf_counter() - self.started

    def where(self) -> str:
        """The step that is being taken, in words."""
        return f"{self.method.name}: " + (f"step {self.progress.step:,} of {self.steps:,}" if self.steps else "solving")

    def fit(self) -> None:
        """Train in place. Raises Diverged, DataError where `state` does not fit, Preempted on SIGTERM."""
        method, model = self.method, self.model
        method.setup(model, self.pair)
        generator = torch.Generator().manual_seed(self.experiment.seed)
        size = method.batch_size
        if size and self.debug.rows:
            size = min(size, *(len(task.train) for task in self.pair.shown.values()))
        self.batches = batches_of(model, self.pair, size, generator, method.shots)
        self.monitor.period = self.batches.steps_per_epoch if self.model.trains_layers else 1
        if self.state is None:
            self.monitor(0, {})
        if steps := method.epochs * self.batches.steps_per_epoch:
            if self.debug.steps:
                steps, method.epochs = self.debug.steps, math.ceil(self.debug.steps / self.batches.steps_per_epoch)
            self.steps = steps
            self.optimizer = optimizer_of(self.experiment.optimizer, model.groups())
            make = self.experiment.scheduler
            self.scheduler = make and make(self.optimizer, steps)
            distributed.attach(model.extractor, self.optimizer)
            if self.state:
                self.load_state_dict(self.state)
                log.info("going on after step %d", self.progress.step)
            self._train(steps)
            self.keeper.finish(self.progress.step, self.state_dict)
        method.finish(model)

    def _train(self, steps: int) -> None:
        period, method = self.monitor.period, self.method
        large = not self.model.trains_layers and self.pair.dim > machine.SMALL  # a log line costs more than a step
        every = self.experiment.log_every or max(1, steps // (LOG_LINES // 2 if large else LOG_LINES))

        def logged(step: int) -> bool:
            return step % every == 0 or step == steps or (step % period == 0 and period > 1)

        with progress_bar(total=steps, initial=self.progress.step, desc=method.name, unit="step") as bar:

            def on_step(step: int, terms: dict[str, Tensor]) -> None:
                bar.update()
                if logged(step):
                    values = self.monitor(step, terms)
                    shown = {name: f"{values[name]:.3g}" for name in ("loss", "rir", "lr") if name in values}
                    bar.set_postfix(shown, refresh=False)
                self.keeper(step, self.state_dict)

            remedy = "lower it, or use dtype=float32, fewer trained layers (model.trainable), or device=cpu"
            room = machine.gpu_memory(f"method.batch_size={method.batch_size}", remedy)
            with room, self.keeper.stop.after_steps(), self.debug.watching(self.monitor.result.folder):
                parts = method, self.model, self.batches, self.optimizer
                train(*parts, on_step, self.progress, self.scheduler, self.debug.steps, logged)

    def _stateful(self) -> dict[str, Any]:
        parts = {"method": self.method, "optimizer": self.optimizer, "batches": self.batches, "monitor": self.monitor}
        return parts if self.scheduler is None else parts | {"scheduler": self.scheduler}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is made of: model, optimizer, place in the data, random states, what was logged."""
        return {name: part.state_dict() for name, part in self._stateful().items()} | {
            "model": kept_of(self.model),
            "progress": vars(self.progress),
            "random": randomness.states(),
            "recorder": self.recorder and self.recorder.state_dict(),
            "tracker": next((tracker.run_id for tracker in self.monitor.trackers if tracker.run_id), None),
            "seconds": self.seconds,
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
                f"{self.monitor.result.folder / CHECKPOINT} does not fit this run ({error}): the data, the weights or "
                "the program have changed; another hydra.run.dir=... starts afresh"
            ) from error
