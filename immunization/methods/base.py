"""The interface of an immunization method."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Count, NonNegative
from immunization.compute.machine import moved
from immunization.config import snake_case
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.callbacks import MIN_GAIN, Bound, Callback, Keep, LogRatios, Stopping, Terms
from immunization.models.base import Batch, Model
from immunization.theory.regularizers import Precondition

Combine = Literal["sum", "worst"]
"""How the losses against several harmful tasks make one: their mean, or the largest."""

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

    What all methods share are `callbacks` of the training loop, made by `setup` from these options. With `patience`,
    training stops after that many epochs without a better `score` and goes back to the best parameters. With
    `max_accuracy_drop` it stops once the model's own primary head loses more than that on the validation split, and
    goes back to the best `score` before. `keep` times L_distill of `Distillation` is added to the loss: it keeps what a
    net makes of D_P and of the images of dataset.keep_root.

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
    """Whether `setup` and `step` take all of `pair.harmful_tasks`; the losses of one that does not are combined."""
    latest = False
    """Whether the best epoch is the last one within `max_accuracy_drop`, whatever its score."""

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
        self.callbacks: list[Callback] = []
        self.bound: Bound | None = None

    @property
    def keeps(self) -> bool:
        """Whether images of dataset.keep_root are distilled."""
        return self.keep > 0

    @property
    def name(self) -> str:
        """The class name as its YAML is called: ConditionNumber -> condition_number."""
        return snake_case(type(self).__name__)

    @property
    def factor(self) -> float:
        """What multiplies the weight of the term that lowers kappa(H_P)."""
        return 1.0 if self.bound is None else self.bound.factor

    def setup(self, model: Model, pair: TaskPair) -> None:
        """Prepare for one run; called before the optimizer is built."""
        self.pair = pair
        self.ratios = LogRatios({self.role if role == "harmful" else role: t for role, t in pair.shown.items()})
        limit = self.limit(model)
        self.bound = None if limit is None else Bound(self, model, limit)
        self.callbacks = [Keep(model, pair, self.keep, self.within)] if self.keep else []
        if self.bound is not None:
            self.callbacks.append(self.bound)
        elif self.patience is not None or self.max_accuracy_drop is not None:
            self.callbacks.append(Stopping(self, model))

    def limit(self, model: Model) -> float | None:
        """The log of the largest ratio (ii) that the training may end with; None for no bound."""
        return None

    def step(self, model: Model, primary: Batch, harmful: Batch) -> Terms:
        raise NotImplementedError

    def within(self, model: Model, loss: Tensor) -> Tensor:
        """A loss beside the method's own, with gradients only in what this method trains."""
        return loss

    def epoch_end(self, model: Model, epoch: int) -> bool:
        """Called after every epoch, before the callbacks; True stops the training."""
        return False

    def accuracy(self, model: Model) -> float:
        """Measure of the model's own primary head on the validation split."""
        task = self.pair.primary
        return task.measure(model.logits(task.val.x), task.val.y).item()

    def score(self, model: Model) -> float:
        """The score that early stopping maximizes: log RIR on the training inputs, -inf where it is not known.

        Of several harmful tasks the smallest.
        """
        primary = self.ratios.of(model, "primary")
        bound = math.log(self.pair.primary.kappa_bound) - self.ratios.baseline(model, "primary")[1]
        if primary > bound - MIN_GAIN:
            return -math.inf
        return min(self.ratios.of(model, role) for role in self.ratios.harmful) - primary

    def state_dict(self) -> dict[str, Any]:
        """The part of the method that training changes: nested dicts, lists and tuples of tensors and plain values.

        A resumed run calls `setup`, then `load_state_dict`. A method with more to remember extends both.
        """
        return {"callbacks": [callback.state_dict() for callback in self.callbacks], "flags": self.flags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, from any device; by default every entry is an attribute."""
        state = moved(state, self.pair.primary.train.y.device)
        for callback, own in zip(self.callbacks, state.pop("callbacks"), strict=True):
            callback.load_state_dict(own)
        vars(self).update(state)

    def finish(self, model: Model) -> None:
        """Called once after the last step, before the evaluation."""
        for callback in self.callbacks:
            callback.finish(model)


def checked_step(method: Method, model: Model, primary: Batch, *harmful: Batch) -> Terms:
    """The terms of a step, with what callbacks add; raises ConfigError where `step` returns no dict of numbers."""
    terms = method.step(model, primary, *harmful)
    if wrong := _wrong(terms):
        raise ConfigError(f"method={method.name}: {type(method).__name__}.step must return {wrong}")
    for callback in method.callbacks:
        terms = callback.add(model, primary, terms)
    return terms


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


def counted(terms: Mapping[str, Terms], combine: Combine) -> list[str]:
    """The roles of the harmful tasks whose losses count in a step: all, or the one with the largest."""
    roles = list(terms)
    if combine == "sum" or len(roles) == 1:
        return roles
    return [roles[int(torch.stack([own["loss"].detach() for own in terms.values()]).argmax())]]


def over_tasks(terms: Mapping[str, Terms], combine: Combine) -> Terms:
    """One step of the terms against each harmful task, by role: their mean, so that rates keep their meaning."""
    if len(terms) == 1:
        return next(iter(terms.values()))
    counting = [terms[role] for role in counted(terms, combine)]
    mean = {name: torch.stack([own[name] for own in counting]).mean() for name in counting[0]}
    return mean | {f"loss_{role}": own["loss"].detach() for role, own in terms.items()}
