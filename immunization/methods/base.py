"""The interface of an immunization method."""

import logging
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Count, NonNegative
from immunization.compute.machine import moved
from immunization.config import snake_case
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.distillation import Distillation
from immunization.models.base import Batch, Model, kept_of, load_into
from immunization.theory.preconditioning import Precondition

log = logging.getLogger(__name__)

Combine = Literal["sum", "worst"]
"""How a method takes several harmful tasks: the sum of what it does against each, up to a factor, or the worst one."""

CHECKS = 10
"""Scores taken within `patience` epochs."""

MIN_GAIN = 1e-3
"""Smallest gain of a score that counts as one."""

ITERATIVE = ("batch_size", "patience", "max_accuracy_drop", "combine", "keep")
"""Options that mean nothing to a method that does its work in `setup`."""


def preconditioner(mode: Precondition, ridge: float, side: str = "input") -> dict[str, Any]:
    """The options `precondition`, `ridge` and `side` of a method, as `Model.hessian_term` takes them."""
    if side == "output" and mode != "ridge":
        raise ConfigError(
            f"method.side=output needs method.precondition=ridge, not {mode}; a net, which has no matrix K, takes "
            "method.side=input (side='input' from Python)"
        )
    return {"mode": mode, "ridge": ridge, "side": side}


class Method(Component, group="method"):
    """One immunization method: `setup` once, then `step` on every pair of batches.

    `step` returns a dict with `loss`, the scalar to descend, and every term worth logging. A method without iterations
    leaves `epochs` at 0 and does its work in `setup`.

    With `patience`, training stops after that many epochs without a better `score` and goes back to the best
    parameters. With `max_accuracy_drop` it stops once the model's own primary head loses more than that on the
    validation split, and goes back to the best `score` before. `keep` times L_distill of `Distillation` is added to the
    loss: it keeps what a net makes of D_P and of the images of dataset.keep_root.

    `flags` (name -> reason) is for readers of the scores; `undetermined` is the reason where condition numbers are no
    result of this method on these data.
    """

    folds = False
    """Whether theta is a linear map behind the features of a deep net, which stay as they are."""
    alone = False
    """Whether a step takes gradients or features of its own, and so needs all rows of a batch in one process."""
    shots = 1
    """How many harmful images of a class stand side by side in a batch, where rows are stored."""
    role = "harmful"
    """Of the task that `setup` is given as the harmful one."""
    several = False
    """Whether `setup` takes all of `pair.harmful_tasks`; a method that does not is combined (`methods.combined`)."""

    epochs: Count = 0
    batch_size: AtLeastTwo | None = None
    _: KW_ONLY
    patience: AtLeastOne | None = None
    max_accuracy_drop: NonNegative | None = None
    combine: Combine = "sum"
    keep: NonNegative = 0.0

    def __post_init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.undetermined = ""

    @property
    def keeps(self) -> bool:
        """Whether images of dataset.keep_root are distilled."""
        return self.keep > 0

    @property
    def name(self) -> str:
        """The class name as its YAML is called: ConditionNumber -> condition_number."""
        return snake_case(type(self).__name__)

    def setup(self, model: Model, pair: TaskPair) -> None:
        """Prepare for one run; called before the optimizer is built."""
        self.pair, self.before = pair, {}
        if self.keep and not (model.trains_layers and model.trained()):
            raise ConfigError("method.keep distills layers of a net, and none is trained: set method.keep=0")
        self.distillation = Distillation(model, pair) if self.keep else None
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, {})
        if self.max_accuracy_drop is not None:
            if not len(pair.primary.val):
                raise ConfigError("method.max_accuracy_drop needs a validation split: set dataset.val_fraction above 0")
            if not model.deep:
                log.warning("method.max_accuracy_drop does little here: %s starts with a head at chance", model.name)
            self.accuracy = self._accuracy(model)
            self.best = -math.inf, 0, _copy(model)

    def renew_best(self, model: Model) -> None:
        """Copy theta_0 again where it is kept: damping has renamed its weights."""
        if self.best[2]:
            self.best = (*self.best[:2], _copy(model))

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    def loss_and_terms(self, model: Model, primary: Batch, *harmful: Batch) -> dict[str, Tensor]:
        """The dict that `step` returns. Raises ConfigError where that is not one of numbers with a loss."""
        terms = self.step(model, primary, *harmful)
        if wrong := _wrong(terms):
            raise ConfigError(f"method={self.name}: {type(self).__name__}.step must return {wrong}")
        if self.keep:
            kept = self.distillation(model, primary)
            terms = {**terms, "loss": terms["loss"] + self.keep * kept, "kept": kept}
        return terms

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
        elif not self.takes_score(epoch):
            return False
        score = self.score(model)
        if score > self.best[0] + MIN_GAIN:
            self.best = score, epoch, _copy(model)
        return self.patience is not None and bool(self.best[2]) and epoch - self.best[1] >= self.patience

    def takes_score(self, epoch: int) -> bool:
        """Whether a score is taken after this epoch."""
        return self.patience is not None and not (epoch + 1) % max(1, self.patience // CHECKS)

    def _accuracy(self, model: Model) -> float:
        task = self.pair.primary
        return task.measure(model.logits(task.val.x), task.val.y).item()

    def score(self, model: Model) -> float:
        """The score that early stopping maximizes: log RIR on the training inputs, -inf where it is not known."""
        harmful, primary = (self.log_ratio(model, role) for role in ("harmful", "primary"))
        bound = math.log(self.pair.primary.kappa_bound) - self.baseline(model, "primary")[1]
        return -math.inf if primary > bound - MIN_GAIN else harmful - primary

    def log_ratio(self, model: Model, role: str) -> float:
        """log of ratio (i), `harmful`, or (ii), `primary`, on the training inputs."""
        rank, before = self.baseline(model, role)
        task = getattr(self.pair, role)
        return math.log(task.condition_number(model.factor(task).double(), rank)) - before

    def baseline(self, model: Model, role: str) -> tuple[int, float]:
        """Rank and log kappa of a task before immunization, computed once."""
        if role not in self.before:
            task = getattr(self.pair, role)
            own = self.role if role == "harmful" else role
            factor = model.baseline_factor(own, task).double()
            rank = task.rank_of(factor)
            self.before[role] = rank, math.log(task.condition_number(factor, rank))
        return self.before[role]

    def state_dict(self) -> dict[str, Any]:
        """The part of the method that training changes: nested dicts, lists and tuples of tensors and plain values.

        A resumed run calls `setup`, then `load_state_dict`. A method with more to remember extends both.
        """
        return {"best": self.best, "flags": self.flags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, from any device; by default every entry is an attribute."""
        vars(self).update(moved(state, self.pair.primary.train.y.device))

    def keeps_last(self, model: Model) -> bool:
        """Whether the result is the last iterate, also where another one has the best score."""
        return False

    def finish(self, model: Model) -> None:
        """Called once after the last step, before the evaluation."""
        if self.best[2] and not self.keeps_last(model):
            load_into(model, self.best[2])


def _wrong(terms: Any) -> str:
    """What a step must return, where `terms` are not that; empty if they are."""
    if not isinstance(terms, Mapping) or not isinstance(terms.get("loss"), Tensor):
        given = f"a dict of {', '.join(terms) or 'nothing'}" if isinstance(terms, Mapping) else type(terms).__name__
        return f"a dict with the tensor `loss`, not {given}"
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.numel() != 1:
            given = f"of shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
            return f"tensors of one number each; `{name}` is {given}"
    return "" if terms["loss"].requires_grad else "a `loss` with its graph; this one has no gradient"


def _copy(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in kept_of(model).items()}
