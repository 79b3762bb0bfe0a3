"""The interface of an immunization method and the one training loop all of them share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from immunization.checks import AtLeastOne, AtLeastTwo, Count, NonNegative, checked
from immunization.compute import distributed
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, Diverged
from immunization.models.base import Batch, Model
from immunization.theory import spectrum

DIVERGENCE = 1e12
"""A loss above this multiple of the first one counts as diverged."""

CHECKS = 10
"""Scores taken within `patience` epochs."""

MIN_GAIN = 1e-3
"""Smallest gain of a score that counts as one."""


class Method:
    """One immunization method: `setup` once, then `step` on every pair of batches.

    `step` returns a dict with `loss`, the scalar to descend, and every term worth logging; one dict feeds the progress
    bar, metrics.jsonl and W&B. A method without iterations leaves `epochs` at 0 and does its work in `setup`.

    With `patience`, training stops after that many epochs without a better `score` and `finish` goes back to the best
    parameters. With `max_accuracy_drop` it stops once the model's own primary head loses more than that on the
    validation split, and goes back to the best `score` before. `flags` (name -> reason) holds what a reader has to know
    beside the scores; `undetermined` says why condition numbers are no result of this method on these data, where
    they are none. `folds`: with a deep net, theta is a linear map behind its features, which stay as they are.
    """

    folds = False
    alone = False
    """Whether a step takes gradients or features of its own, and so needs all rows of a batch in one process."""

    @checked("method")
    def __init__(
        self,
        epochs: Count = 0,
        batch_size: AtLeastTwo | None = None,
        patience: AtLeastOne | None = None,
        max_accuracy_drop: NonNegative | None = None,
    ) -> None:
        self.epochs, self.batch_size, self.patience = epochs, batch_size, patience
        self.max_accuracy_drop = max_accuracy_drop
        self.flags: dict[str, str] = {}
        self.undetermined = ""

    @property
    def name(self) -> str:
        """The class name as its YAML is called: ConditionNumber -> condition_number."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()

    def setup(self, model: Model, pair: TaskPair) -> None:
        """Prepare for one run; called before the optimizer is built."""
        self.pair = pair
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, {})
        if self.max_accuracy_drop is not None:
            if not len(pair.primary.val):
                raise ConfigError("method.max_accuracy_drop needs a validation split: set dataset.val_fraction above 0")
            self.accuracy = self._accuracy(model)
            self.best = -math.inf, 0, _copy(model)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    def epoch_end(self, model: Model, epoch: int) -> bool:
        """Called after every epoch; True stops the training."""
        if self.max_accuracy_drop is not None:
            drop = self.accuracy - self._accuracy(model)
            if drop > self.max_accuracy_drop:
                self.flags["stopped_early"] = (
                    f"after {epoch + 1} epochs the primary accuracy on the validation split was {drop:.4f} below "
                    f"theta_0's, more than method.max_accuracy_drop={self.max_accuracy_drop}; the best before is kept"
                )
                return True
        elif self.patience is None or (epoch + 1) % max(1, self.patience // CHECKS):
            return False
        score = self.score(model)
        if score > self.best[0] + MIN_GAIN:
            self.best = score, epoch, _copy(model)
        return self.patience is not None and epoch - self.best[1] >= self.patience

    def _accuracy(self, model: Model) -> float:
        task = self.pair.primary
        return task.measure(model.logits(task.val.x), task.val.y).item()

    def score(self, model: Model) -> float:
        """What early stopping maximizes: log RIR, up to a constant, on the training inputs."""
        kappa_p, kappa_h = (
            spectrum.condition_number_of(torch.linalg.svdvals(model.factor(task)), task.rank)
            for task in (self.pair.primary, self.pair.harmful)
        )
        return math.log(kappa_h) - math.log(kappa_p)

    def state_dict(self) -> dict[str, Any]:
        """What training changes in the method: nested dicts, lists and tuples of tensors and plain values.

        A run that goes on from a checkpoint calls `setup`, then `load_state_dict`; a method with more to remember than
        this extends both.
        """
        return {"best": self.best, "flags": self.flags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; by default every entry is an attribute."""
        vars(self).update(state)

    def finish(self, model: Model) -> None:
        """Called once after the last step, before the evaluation."""
        if self.best[2]:
            model.load_state_dict(self.best[2])


def _copy(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class _Pass:
    """Passes over the training rows of one task; it knows how many batches of the current one it gave."""

    def __init__(self, task: Task, batch_size: int | None, generator: torch.Generator) -> None:
        self.task, self.batch_size, self.generator = task, batch_size, generator
        self.start: Tensor | None = None
        self.taken = 0

    def rest(self) -> Iterator[Batch]:
        """What is left of the pass, all of it at first."""
        task, x, y = self.task, self.task.train.x, self.task.train.y
        if self.batch_size is None:
            if task.width:
                raise ConfigError("method.batch_size must be set: a net is trained on batches, not on all rows at once")
            if not self.taken:
                self.taken = 1
                yield Batch(x, y, task.rank, task.triangle.to(x))
        else:
            self.start = self.generator.get_state()
            order = torch.randperm(len(x), generator=self.generator)
            for rows in order[: len(x) - len(x) % self.batch_size].split(self.batch_size)[self.taken :]:
                self.taken += 1
                # stored activations stay where they are
                inputs = x[distributed.share(rows).to(x.device)].to(y.device)
                yield Batch(inputs, y[rows.to(y.device)], min(len(rows), task.rank))
        self.start, self.taken = None, 0

    def forever(self) -> Iterator[Batch]:
        while True:
            yield from self.rest()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state() if self.start is None else self.start, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


class PairedBatches:
    """Batches of both tasks side by side; one epoch is one pass over D_H, D_P goes on where it was and cycles.

    Full batches carry the task's compressed root. Mini-batches are shuffled by `generator`; the incomplete last one
    of a pass is left out, since the rank of its Hessian would differ.
    """

    def __init__(self, pair: TaskPair, batch_size: int | None, generator: torch.Generator) -> None:
        for key, task in (("primary", pair.primary), ("harmful", pair.harmful)):
            if batch_size is not None and batch_size > len(task.train):
                raise ConfigError(
                    f"method.batch_size={batch_size} is above the {len(task.train)} training rows of the {key} task; "
                    "lower it, or set it to null for full batches"
                )
        # a generator for each task, in the same state: tasks of as many rows are shuffled alike, as in the release
        alike = torch.Generator().set_state(generator.get_state())
        self.passes = {
            "primary": _Pass(pair.primary, batch_size, alike),
            "harmful": _Pass(pair.harmful, batch_size, generator),
        }
        self.primary = self.passes["primary"].forever()
        self.steps_per_epoch = 1 if batch_size is None else len(pair.harmful.train) // batch_size

    def epoch(self) -> Iterator[tuple[Batch, Batch]]:
        """The pairs of batches of one epoch, or what is left of it after `load_state_dict`."""
        for harmful in self.passes["harmful"].rest():
            yield next(self.primary), harmful

    def state_dict(self) -> dict[str, Any]:
        """Where both passes stand."""
        return {role: one.state_dict() for role, one in self.passes.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; before the first batch only."""
        for role, one in self.passes.items():
            one.load_state_dict(state[role])


@dataclass
class Progress:
    """Where a training stands: epochs ended, steps taken, and the loss above which it has diverged."""

    epoch: int = 0
    step: int = 0
    limit: float = math.inf


def train(
    method: Method,
    model: Model,
    batches: PairedBatches,
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[int, dict[str, Tensor]], None] = lambda step, terms: None,
    progress: Progress | None = None,
    scheduler: LRScheduler | None = None,
) -> int:
    """Run `method` for its epochs and return the number of steps taken.

    `on_step(step, terms)` sees every step (counted from 1) after the update. `progress` is where to go on, and is kept
    up to date. `scheduler` steps after every step of `optimizer` (ReduceLROnPlateau is told the loss), and the learning
    rate of the step joins its terms as `lr`. Raises Diverged on a non-finite loss, or one above 1e12 times the first;
    the parameters are then those before the bad step.
    """
    at = Progress() if progress is None else progress
    while at.epoch < method.epochs:
        for primary, harmful in batches.epoch():
            try:
                terms = method.step(model, primary, harmful)
                value = terms["loss"].item()
            except torch.linalg.LinAlgError:  # a decomposition of non-finite features
                value = math.nan
            if at.step == 0:
                at.limit = DIVERGENCE * max(abs(value), 1.0)
            if not (math.isfinite(value) and value <= at.limit):
                raise Diverged(
                    f"{type(method).__name__} diverged at step {at.step + 1} (loss {value:.3g}); lower optimizer.lr "
                    "or the weights in method.*"
                )
            optimizer.zero_grad()
            terms["loss"].backward()
            optimizer.step()
            if scheduler is not None:
                rate = torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64)
                terms = {**terms, "lr": rate}
                scheduler.step(*[value] if isinstance(scheduler, ReduceLROnPlateau) else ())
            at.step += 1
            on_step(at.step, terms)
        ended = method.epoch_end(model, at.epoch)
        at.epoch = method.epochs if ended else at.epoch + 1
    return at.step
