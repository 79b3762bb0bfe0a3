"""Callbacks of the training loop: images to keep, early stopping, and a bound on ratio (ii)."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.distillation import Distillation
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models.base import Batch, Model, kept_of, load_into
from immunization.theory.optimal_map import conditioned

log = logging.getLogger(__name__)

Terms = dict[str, Tensor]
"""What a step returns: `loss`, the scalar to descend, and every other scalar worth logging."""

CHECKS = 10
"""Scores taken within `patience` epochs."""
MIN_GAIN = 1e-3
"""Smallest gain of a score that counts as one."""

BOUND = 0.99
"""Largest ratio (ii) of `hold_primary="auto"`."""
MARGIN = 0.01
"""The controller aims at log (ii) this much below the bound, so that it comes to rest on the right side."""
PACE, REACTION, LARGEST = 2.0, 10.0, 0.3
"""Integral gain, proportional gain, and the value at which the violation |log (ii) - target| is clipped."""
HIGHEST = 6.0
"""Largest log of the factor on lambda_P: beyond, R_well is all that an optimizer sees."""
START, SETTLED = 0.25, 0.5
"""Shares of the training: unconstrained until START; then the target falls from (ii) at START to the bound at SETTLED,
since weights that will hold kappa(H_P) often let it rise first."""
LARGE, SELDOM = 256, 5
"""Models of more features are measured every SELDOM epochs only: their condition numbers cost more than a step."""


class LogRatios:
    """Logarithms of ratio (i) of harmful tasks and of ratio (ii) of the primary one, on their training inputs."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self._baselines: dict[str, tuple[int, float]] = {}

    @property
    def harmful(self) -> list[str]:
        return [role for role in self.tasks if role != "primary"]

    def of(self, model: Model, role: str) -> float:
        """log kappa of the task's features, less that before immunization."""
        return self.of_factor(model.factor(self.tasks[role]).double(), model, role)

    def of_factor(self, factor: Tensor, model: Model, role: str) -> float:
        """The same of features with the Gram of `factor`."""
        rank, before = self.baseline(model, role)
        return math.log(self.tasks[role].condition_number(factor, rank)) - before

    def baseline(self, model: Model, role: str) -> tuple[int, float]:
        """Rank and log kappa of a task before immunization, computed once."""
        if role not in self._baselines:
            task = self.tasks[role]
            factor = model.baseline_factor(role, task).double()
            rank = task.rank_of(factor)
            self._baselines[role] = rank, math.log(task.condition_number(factor, rank))
        return self._baselines[role]


class Callback:
    """What the training loop calls beside the steps of a method."""

    def add(self, model: Model, primary: Batch, terms: Terms) -> Terms:
        """The terms of a step, with what this adds to the loss."""
        return terms

    def epoch_end(self, model: Model, epoch: int) -> bool:
        """Called after every epoch; True stops the training."""
        return False

    def finish(self, model: Model) -> None:
        """Called once after the last step, before the method's own `finish`."""

    def state_dict(self) -> dict[str, Any]:
        """What changes during the training, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Keep(Callback):
    """Adds `weight` times L_distill of D_P and of the images of dataset.keep_root."""

    def __init__(self, model: Model, pair: TaskPair, weight: float, within: Callable[[Model, Tensor], Tensor]) -> None:
        if not (model.trains_layers and model.trained()):
            raise ConfigError("method.keep distills layers of a net, and none is trained: set method.keep=0")
        self.distillation, self.weight, self.within = Distillation(model, pair), weight, within

    def add(self, model: Model, primary: Batch, terms: Terms) -> Terms:
        kept = self.within(model, self.distillation(model, primary))
        return {**terms, "loss": terms["loss"] + self.weight * kept, "kept": kept}


class Stoppable(Protocol):
    """The part of a method that decides when its training stops."""

    pair: TaskPair
    ratios: LogRatios
    flags: dict[str, str]
    latest: bool
    epochs: int
    patience: int | None
    max_accuracy_drop: float | None

    def score(self, model: Model) -> float: ...
    def accuracy(self, model: Model) -> float: ...


class Stopping(Callback):
    """Goes back to the parameters of the best score.

    It stops after `patience` epochs without a better one, and where the accuracy of the model's own primary head has
    fallen by more than `max_accuracy_drop` on the validation split.
    """

    def __init__(self, method: Stoppable, model: Model) -> None:
        self.method, self.score, self.epoch = method, -math.inf, 0
        self.best: dict[str, Tensor] = {}
        if method.max_accuracy_drop is not None:
            if not len(method.pair.primary.val):
                raise ConfigError("method.max_accuracy_drop needs a validation split: set dataset.val_fraction above 0")
            if not model.deep:
                log.warning("method.max_accuracy_drop does little here: %s starts with a head at chance", model.name)
            self.accuracy, self.best = method.accuracy(model), _copy(model)

    def epoch_end(self, model: Model, epoch: int) -> bool:
        method = self.method
        if (largest := method.max_accuracy_drop) is not None:
            drop = self.accuracy - method.accuracy(model)
            if drop > largest:
                method.flags["stopped_early"] = (
                    f"after {epoch + 1} epochs the primary accuracy on the validation split was {drop:.4f} below "
                    f"theta_0's, more than method.max_accuracy_drop={largest}; the best before is kept"
                )
                return True
        elif not self.scores(epoch):
            return False
        score = self.score_of(model)
        if method.latest or score > self.score + MIN_GAIN:
            self.score, self.epoch, self.best = score, epoch, _copy(model)
        return method.patience is not None and bool(self.best) and epoch - self.epoch >= method.patience

    def scores(self, epoch: int) -> bool:
        """Whether a score is taken after this epoch."""
        patience = self.method.patience
        return patience is not None and not (epoch + 1) % max(1, patience // CHECKS)

    def score_of(self, model: Model) -> float:
        return self.method.score(model)

    def finish(self, model: Model) -> None:
        if self.best:
            load_into(model, self.best)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("score", "epoch", "best")}


class Bound(Stopping):
    """Ends the training where ratio (ii) = kappa(H_P) / kappa(K_P) is within a bound and ratio (i) is largest.

    After `START` of the training, `factor` multiplies lambda_P. It is set after every epoch by a proportional-integral
    controller of log (ii): exp(multiplier + REACTION violation), where the violation is the distance of log (ii) from
    the target, and the multiplier sums up PACE violations, but never falls below 0. A run that needed the factor ends
    with the iterate of the largest (i) among those within the bound. Where theta is a linear map and the last iterate
    is outside, the nearest maps within the bound (`conditioned`) compete.
    """

    def __init__(self, method: Stoppable, model: Model, limit: float) -> None:
        """`limit` is the log of the bound."""
        super().__init__(method, model)
        self.limit, self.multiplier, self.factor = limit, 0.0, 1.0
        self.allowed: float | None = None  # log (ii) at START, or the target if that is larger
        self.acted = False
        self.every = SELDOM if method.pair.dim > LARGE else 1

    def epoch_end(self, model: Model, epoch: int) -> bool:
        if self.scores(epoch) or self.method.max_accuracy_drop is not None:
            self.ratio = self.method.ratios.of(model, "primary")
        if self.scores(epoch) and epoch + 1 >= START * self.method.epochs:
            self._control(self.ratio, (epoch + 1) / self.method.epochs)
        return super().epoch_end(model, epoch)

    def _control(self, ratio: float, share: float) -> None:
        """Set the factor by log (ii) after this share of the training."""
        bound = self.limit - MARGIN
        self.allowed = max(ratio, bound) if self.allowed is None else self.allowed
        remaining = max(0.0, (SETTLED - share) / (SETTLED - START))
        target = bound + remaining * (self.allowed - bound)
        violation = min(max(ratio - target, -LARGEST), LARGEST)
        self.multiplier = min(max(self.multiplier + PACE * violation, 0.0), HIGHEST)
        self.factor = math.exp(min(max(self.multiplier + REACTION * violation, 0.0), HIGHEST))
        self.acted |= self.factor > 1

    def scores(self, epoch: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == self.method.epochs

    def score_of(self, model: Model) -> float:
        """log (i), of several tasks the smallest, where the bound is satisfied."""
        return self._smallest(model, lambda task: model.factor(task)) if self.ratio <= self.limit else -math.inf

    def _smallest(self, model: Model, factor: Callable[[Task], Tensor]) -> float:
        ratios = self.method.ratios
        return min(ratios.of_factor(factor(ratios.tasks[role]).double(), model, role) for role in ratios.harmful)

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("multiplier", "factor", "allowed", "acted")}
        return super().state_dict() | own

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        method, theta = self.method, model.linear_map()
        last = method.ratios.of(model, "primary")
        stops = method.patience is not None or method.max_accuracy_drop is not None
        if last <= self.limit and not self.acted and not stops:
            return  # the weights held the bound by themselves: the run is what it is without one
        maps = [] if theta is None or last <= self.limit else self._nearest(model, theta.double())
        super().finish(model)
        score, nearest = max(maps, key=lambda candidate: candidate[0], default=(-math.inf, None))
        if theta is not None and nearest is not None and score > self.score + MIN_GAIN:
            theta.copy_(nearest)
        elif self.score == -math.inf and last > self.limit:
            method.flags["primary_not_held"] = (
                f"no iterate has a ratio (ii) of at most method.hold_primary={math.exp(self.limit):.3g}; that of the "
                f"last one is {math.exp(last):.3g}{'; theta_0 is kept' if self.best else ''}"
            )
        if theta is not None:
            fit_head(model, probe_of_inputs(method.pair.primary))

    def _nearest(self, model: Model, theta: Tensor) -> list[tuple[float, Tensor]]:
        """Score and map, for both ways to bring theta within the bound."""
        ratios, root = self.method.ratios, self.method.pair.primary.root.double()
        kappa = math.exp(ratios.baseline(model, "primary")[1] + self.limit)
        maps = [conditioned(theta, root, kappa, raised) for raised in (True, False)]

        def score(a: Tensor) -> float:
            return self._smallest(model, lambda task: task.root.double() @ a)

        return [(score(a), a) for a in maps if a.isfinite().all()]


def bound_of(hold: float | str | None, by_default: bool) -> float | None:
    """The log of the bound that `hold_primary` asks for; "auto" is `BOUND` where there is one `by_default`."""
    if isinstance(hold, str):
        return math.log(BOUND) if by_default else None
    return None if hold is None else math.log(hold)


def _copy(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in kept_of(model).items()}
