"""What a training is made of: assembled from a configuration, run on one or several processes, and kept."""

from __future__ import annotations

import copy
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from immunization.compute import distributed, machine, randomness
from immunization.config import build, check
from immunization.data.task import TaskPair
from immunization.errors import ConfigError, DataError, UserError
from immunization.methods import Method, Unmodified, combined
from immunization.models import Model
from immunization.runs.filenames import CHECKPOINT
from immunization.runs.folder import settings_of, unfinished
from immunization.runs.result import Result
from immunization.runs.tracker import Recorder
from immunization.terminal import importing
from immunization.training import checkpoint
from immunization.training.checkpoint import Checkpointer
from immunization.training.debugging import Debug
from immunization.training.divergence import Progress
from immunization.training.loaders import batches_of
from immunization.training.loop import train
from immunization.training.monitor import Monitor
from immunization.training.optimization import optimizer_of, scheduler_of
from immunization.training.signals import Stop

log = logging.getLogger(__name__)

LOG_LINES = 40
"""Lines of metrics.jsonl a run writes by default."""


class Parts(NamedTuple):
    """What a run is made of: the tasks as they are measured (`pair`) and trained on; `start` holds theta_0."""

    method: Method
    model: Model
    pair: TaskPair
    trained_on: TaskPair
    start: dict[str, Tensor]
    device: torch.device


def assemble(config: DictConfig) -> Parts:
    """Data, method and model of a run, from its seed; sets the threads."""
    randomness.seed(config.seed)
    machine.choose_threads(config.threads, None)
    data = Debug.of(config).few(build(config, "dataset"))
    device = machine.device_of(config.device, data.dim)
    data = data.to(device, torch.float64)
    method: Method = build(config, "method") if config.immunize else Unmodified()
    with distributed.main_process_first():
        model: Model = build(config, "model", pair=data.to(device, getattr(torch, config.dtype)))
        model, pair = model.read_tasks(data, method.folds)
    machine.choose_threads(config.threads, None if model.trains_layers else pair.dim)
    if distributed.size() > 1 and (method.alone or not model.trains_layers):
        raise ConfigError(
            f"method={method.name} on {model.name} is not trained by several processes: nets whose layers are trained "
            "are, by methods that simulate no attacker; start it without torchrun"
        )
    method = combined(method, pair)
    trained_on = _shown(pair, model, config.harmful_samples, config.seed).to(device, model.dtype)
    if method.epochs:  # a process's first optimizer imports torch's compiler, seconds that are not the method's
        with importing("importing torch's optimizers"):
            torch.optim.SGD([torch.zeros(1)])
    kept = config.get("attack") or not model.trains_layers  # of rows it is small, and a baseline of its own
    start = copy.deepcopy(model.extractor.state_dict()) if kept else {}
    return Parts(method, model, pair, trained_on, start, device)


def _shown(pair: TaskPair, model: Model, samples: int | None, seed: int) -> TaskPair:
    """What a method is shown: `pair`, with `samples` training rows of each harmful class. Raises ConfigError."""
    if samples is None:
        return pair
    if model.loaders is not None:
        raise ConfigError(
            "harmful_samples needs activations that are kept: set dataset.augment=false, or raise dataset.cache_limit"
        )
    tasks = pair.harmful_tasks.items()
    return pair.with_tasks(
        {role: replace(task, train=task.train.take(task.few(samples, seed))) for role, task in tasks}
    )


class TrainingSession:
    """One training of `model` by `method`, with a progress bar on a terminal, log lines and checkpoints.

    `state`, that of a checkpoint, is where to go on. `recorder` is what a checkpoint remembers of metrics.jsonl; the
    other processes of a distributed training have none.
    """

    def __init__(
        self,
        config: DictConfig,
        parts: Parts,
        monitor: Monitor,
        keeper: Checkpointer,
        recorder: Recorder | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.method, self.model, self.pair = config, parts.method, parts.model, parts.trained_on
        self.debug = Debug.of(config)
        self.monitor, self.keeper, self.recorder, self.state = monitor, keeper, recorder, state
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
        generator = torch.Generator().manual_seed(self.config.seed)
        rows = self.debug.rows or method.batch_size
        self.batches = batches_of(model, self.pair, method.batch_size and min(method.batch_size, rows), generator)
        self.monitor.period = self.batches.steps_per_epoch if self.model.trains_layers else 1
        if self.state is None:
            self.monitor(0, {})
        if steps := method.epochs * self.batches.steps_per_epoch:
            if self.debug.steps:
                steps, method.epochs = self.debug.steps, math.ceil(self.debug.steps / self.batches.steps_per_epoch)
            self.steps = steps
            self.optimizer = optimizer_of(self.config, model.groups())
            self.scheduler = scheduler_of(self.config, self.optimizer, steps)
            distributed.attach(model.extractor, self.optimizer)
            if self.state:
                self.load_state_dict(self.state)
                log.info("going on after step %d", self.progress.step)
            self._train(steps)
            self.keeper.finish(self.progress.step, self.state_dict)
        method.finish(model)

    def _train(self, steps: int) -> None:
        period, method = self.monitor.period, self.method
        cheap = self.model.trains_layers or self.pair.dim <= machine.SMALL  # else a log line costs more than a step
        every = self.config.log_every or max(1, steps // (LOG_LINES if cheap else LOG_LINES // 2))

        def logged(step: int) -> bool:
            return step % every == 0 or step == steps or (step % period == 0 and period > 1)

        with tqdm(total=steps, initial=self.progress.step, desc=method.name, unit="step", disable=None) as bar:

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
            "model": checkpoint.kept_of(self.model),
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
            checkpoint.load_into(self.model, state["model"])
            vars(self.progress).update(state["progress"])
            randomness.restore(state["random"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.monitor.result.folder / CHECKPOINT} does not fit this run ({error}): the data, the weights or "
                "the program have changed; another hydra.run.dir=... starts afresh"
            ) from error


def follow(config: DictConfig, folder: Path) -> Result:
    """What the other processes of a distributed training do: their share of the features, and no file."""
    result, own = unfinished(config, folder), folder.resolve()
    try:
        result.folder = distributed.agree()
        if own != result.folder:
            with suppress(OSError):
                own.rmdir()  # Hydra made it, named by its own time
        if result.folder is None:
            return result
        state = checkpoint.read(result.folder, settings_of(config)) if config.resume else None
        check(config)
        parts = assemble(config)
        keeper = Checkpointer(result.folder, {}, Stop(), seconds=None)
        TrainingSession(config, parts, Monitor(parts.model, parts.trained_on, result), keeper, state=state).fit()
        result.status = "completed"
    except (UserError, RuntimeError) as error:  # the first process meets the same error, or has died: it reports it
        raise SystemExit(1) from error
    return result
