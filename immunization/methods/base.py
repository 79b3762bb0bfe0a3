"""The interface of an immunization method and the one training loop all of them share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from immunization import spectral
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, Diverged
from immunization.models.base import Batch, Model

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
    beside the scores. `folds`: with a deep net, theta is a linear map behind its features, which stay as they are.
    """

    folds = False

    def __init__(
        self,
        epochs: int = 0,
        batch_size: int | None = None,
        patience: int | None = None,
        max_accuracy_drop: float | None = None,
    ) -> None:
        if epochs < 0:
            raise ConfigError(f"method.epochs must be at least 0, not {epochs}")
        if batch_size is not None and batch_size < 2:
            raise ConfigError(f"method.batch_size must be at least 2, or null for full batches, not {batch_size}")
        if patience is not None and patience < 1:
            raise ConfigError(f"method.patience must be at least 1, or null for all epochs, not {patience}")
        if max_accuracy_drop is not None:
            nonnegative(max_accuracy_drop=max_accuracy_drop)
        self.epochs, self.batch_size, self.patience = epochs, batch_size, patience
        self.max_accuracy_drop = max_accuracy_drop
        self.flags: dict[str, str] = {}

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
            spectral.condition_number_of(torch.linalg.svdvals(model.factor(task)), task.rank)
            for task in (self.pair.primary, self.pair.harmful)
        )
        return math.log(kappa_h) - math.log(kappa_p)

    def finish(self, model: Model) -> None:
        """Called once after the last step, before the evaluation."""
        if self.best[2]:
            model.load_state_dict(self.best[2])


def _copy(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def nonnegative(**values: float) -> None:
    """Raise ConfigError for the first keyword whose value is negative or not finite."""
    for key, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ConfigError(f"method.{key} must be a finite number of at least 0, not {value!r}")


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
        self.pair, self.batch_size, self.generator = pair, batch_size, generator
        # a generator for each task, in the same state: tasks of as many rows are shuffled alike, as in the release
        alike = torch.Generator().set_state(generator.get_state())
        self.primary = self._cycle(pair.primary, alike)

    @property
    def steps_per_epoch(self) -> int:
        return 1 if self.batch_size is None else len(self.pair.harmful.train) // self.batch_size

    def epoch(self) -> Iterator[tuple[Batch, Batch]]:
        """The pairs of batches of one epoch."""
        for harmful in self._pass(self.pair.harmful, self.generator):
            yield next(self.primary), harmful

    def _cycle(self, task: Task, generator: torch.Generator) -> Iterator[Batch]:
        while True:
            yield from self._pass(task, generator)

    def _pass(self, task: Task, generator: torch.Generator) -> Iterator[Batch]:
        x, y = task.train.x, task.train.y
        if self.batch_size is None:
            if task.width:
                raise ConfigError("method.batch_size must be set: a net is trained on batches, not on all rows at once")
            yield Batch(x, y, task.rank, task.root.to(x))
            return
        order = torch.randperm(len(x), generator=generator)
        for rows in order[: len(x) - len(x) % self.batch_size].split(self.batch_size):
            inputs = x[rows.to(x.device)].to(y.device)  # stored activations stay where they are
            yield Batch(inputs, y[rows.to(y.device)], min(len(rows), task.rank))


def train(
    method: Method,
    model: Model,
    batches: PairedBatches,
    optimizer: torch.optim.Optimizer,
    on_step: Callable[[int, dict[str, Tensor]], None] = lambda step, terms: None,
) -> int:
    """Run `method` for its epochs and return the number of steps taken.

    `on_step(step, terms)` sees every step (counted from 1) after the update. Raises Diverged on a non-finite loss, or
    one above 1e12 times the first; the parameters are then those before the bad step.
    """
    step, limit = 0, math.inf
    for epoch in range(method.epochs):
        for primary, harmful in batches.epoch():
            try:
                terms = method.step(model, primary, harmful)
                value = terms["loss"].item()
            except torch.linalg.LinAlgError:  # a decomposition of non-finite features
                value = math.nan
            if step == 0:
                limit = DIVERGENCE * max(abs(value), 1.0)
            if not (math.isfinite(value) and value <= limit):
                raise Diverged(
                    f"{type(method).__name__} diverged at step {step + 1} (loss {value:.3g}); lower optimizer.lr "
                    "or the weights in method.*"
                )
            optimizer.zero_grad()
            terms["loss"].backward()
            optimizer.step()
            step += 1
            on_step(step, terms)
        if method.epoch_end(model, epoch):
            break
    return step
