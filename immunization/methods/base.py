"""The interface of an immunization method, and the callbacks of the loop that all methods share."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, Component, Count, NonNegative, snake_case
from immunization.compute.machine import moved
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.distillation import Distillation
from immunization.models.base import Batch, Model, kept_of, load_into

log = logging.getLogger(__name__)

Terms = dict[str, Tensor]
"""What a step returns: `loss`, the scalar to descend, and every other scalar worth logging."""

Combine = Literal["sum", "worst"]
"""How the losses against several harmful tasks make one: their mean, or the largest."""


CHECKS = 10
"""Scores taken within `patience` epochs."""
MIN_GAIN = 1e-3
"""Smallest gain of a score that counts as one."""

ROUGH = 1e-8
"""Smallest eigenvalue of a Gram matrix, relative to the largest one, of which rounding leaves six digits."""


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

    def roughly(self, model: Model, role: str) -> float:
        """`of` to six digits at half its cost, from the features' Gram matrix; infinite where it does not tell them."""
        factor = model.factor(self.tasks[role]).double()
        rank, before = self.baseline(model, role)
        wide = len(factor) < factor.shape[1]
        values = torch.linalg.eigvalsh(factor @ factor.mT if wide else factor.mT @ factor)
        smallest, largest = values[-rank].item(), values[-1].item()
        return math.log(largest / smallest) - before if 0 < ROUGH * largest < smallest else math.inf

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
            raise ConfigError("method.keep distills trained layers, and no layer is trained; set method.keep=0")
        self.distillation, self.weight, self.within = Distillation(model, pair), weight, within

    def add(self, model: Model, primary: Batch, terms: Terms) -> Terms:
        kept = self.within(model, self.distillation(model, primary))
        return {**terms, "loss": terms["loss"] + self.weight * kept, "kept": kept}


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

    option = "method/common/trained"

    folds = False
    """Whether theta is a linear map behind the features of a deep net, which stay as they are."""
    alone = False
    """Whether a step takes gradients or features of its own, and so needs all rows of a batch in one process."""
    shots = 1
    """How many harmful images of a class stand side by side in a batch, where rows are stored."""
    role = "harmful"
    """Of the task that `setup` is given as the harmful one."""
    side_by_side: ClassVar[tuple[str, ...] | None] = None
    """Options in which jobs differ where `step` also takes stacks, of linear models and full batches with a leading
    dimension for jobs; None where it does not."""
    several = False
    """Whether `setup` and `step` take all of `pair.harmful_tasks`; the losses of one that does not are combined."""
    latest = False
    """Whether the best epoch is the last one within `max_accuracy_drop`, whatever its score."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """Attributes that training changes, for checkpoints."""

    epochs: Count = 0
    batch_size: AtLeastTwo | None
    patience: AtLeastOne | None = None
    max_accuracy_drop: NonNegative | None
    combine: Combine
    keep: NonNegative

    def __post_init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.undetermined = ""
        self.callbacks: list[Callback] = []

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
        self.pair = pair
        self.ratios = LogRatios({self.role if role == "harmful" else role: t for role, t in pair.shown.items()})
        self.callbacks = [Keep(model, pair, self.keep, self.within)] if self.keep else []
        if (stopping := self.stopping(model, self)) is not None:
            self.callbacks.append(stopping)

    def join(self, model: Model, methods: "Sequence[Method]") -> None:
        """Take over what methods of jobs side by side have besides numbers; `model` is their stacked one."""

    def stopping(self, model: Model, judge: "Method") -> "Stopping | None":
        """What may end the training early, by the scores of `judge`: this method, or the one that it is a part of."""
        stops = self.patience is not None or self.max_accuracy_drop is not None
        return Stopping(judge, model) if stops else None

    def step(self, model: Model, primary: Batch, harmful: Batch) -> Terms:
        raise NotImplementedError

    def primary_loss(self, model: Model, primary: Batch) -> Tensor:
        """L(D_P) of the model's own head on a batch."""
        return self.pair.primary.loss(model.outputs(primary)[0], primary.y)

    def loss_and_features(self, model: Model, primary: Batch, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """L(D_P) of the model's own head on a batch, and the features [N, D]."""
        logits, features = model.outputs(primary)
        features = model.training_features(primary.x) if features is None else features
        return self.pair.primary.loss(logits, primary.y, smoothing), features

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
        own = {name: getattr(self, name) for name in self.remembers}
        return {"callbacks": [callback.state_dict() for callback in self.callbacks], "flags": self.flags, **own}

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


class Stopping(Callback):
    """Goes back to the parameters of the best score.

    It stops after `patience` epochs without a better one, and where the accuracy of the model's own primary head has
    fallen by more than `max_accuracy_drop` on the validation split.
    """

    def __init__(self, method: Method, model: Model) -> None:
        self.method, self.score, self.epoch = method, -math.inf, 0
        self.best: dict[str, Tensor] = {}
        if method.max_accuracy_drop is not None:
            if not len(method.pair.primary.val):
                raise ConfigError("method.max_accuracy_drop needs a validation split: set dataset.val_fraction above 0")
            if not model.deep:
                log.warning("method.max_accuracy_drop has little effect: the head of %s starts at chance", model.name)
            self.accuracy, self.best = method.accuracy(model), parameters_of(model)

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
        self.compare(model, epoch)
        return method.patience is not None and bool(self.best) and epoch - self.epoch >= method.patience

    def compare(self, model: Model, epoch: int) -> None:
        """Keep the parameters after this epoch if their score is the best so far."""
        score = self.score_of(model)
        if self.method.latest or score > self.score + MIN_GAIN:
            self.score, self.epoch, self.best = score, epoch, parameters_of(model)

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


def parameters_of(model: Model) -> dict[str, Tensor]:
    """A copy of what training may change in a model, for `load_into`."""
    return {name: tensor.clone() for name, tensor in kept_of(model).items()}


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


class Untrained(Method):
    """A method without iterations; `epochs` is accepted so that sweeps can mix methods, and ignored."""

    several = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = 0


class Identity(Untrained):
    """theta_I = theta_0: the model stays as it is. This is what other methods are compared with."""


class Unmodified(Method):
    """The model as it is, for `immunize=false`: an audit of weights that were immunized before."""

    several = True
