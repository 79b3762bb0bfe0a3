"""Several harmful tasks: the sum or the maximum of a method's losses against each."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from immunization.checks import annotated
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method, Stopping, Terms, over_tasks
from immunization.methods.hold import HoldsPrimary
from immunization.models.base import Batch, Model


class Combined(Method):
    """The losses of `method` against each harmful task, from a copy of its state for each, as one loss.

    Their mean, the sum up to a factor, so that rates keep their meaning; with `combine="worst"` the largest. Early
    stopping looks at the least of the scores.
    """

    def __init__(self, method: Method) -> None:
        super().__init__(**{name: getattr(method, name) for name in annotated(Method)})
        self.whole = method
        self.folds, self.alone, self.shots, self.latest = method.folds, method.alone, method.shots, method.latest

    @property
    def name(self) -> str:
        return self.whole.name

    def setup(self, model: Model, pair: TaskPair) -> None:
        self.parts: dict[str, Method] = {}
        for role, task in pair.harmful_tasks.items():
            part = self.parts[role] = copy.deepcopy(self.whole)
            part.role, part.keep = role, 0.0
            part.setup(model, replace(pair, harmful=task, more={}))
        super().setup(model, pair)
        for part in self.parts.values():
            part.callbacks = []
            if isinstance(part, HoldsPrimary):
                part.follow(self.callbacks)
        self.undetermined = next((part.undetermined for part in self.parts.values() if part.undetermined), "")
        self.untried = True

    def stopping(self, model: Model, judge: Method) -> Stopping | None:
        return self.whole.stopping(model, judge)

    def step(self, model: Model, primary: Batch, *harmful: Batch) -> Terms:
        before = [p.detach().clone() for p in model.parameters()] if self.untried else []
        terms = {
            role: part.step(model, primary, batch)
            for (role, part), batch in zip(self.parts.items(), harmful, strict=True)
        }
        self._check_unmoved(model, before)
        return over_tasks(terms, self.combine)

    def _check_unmoved(self, model: Model, before: Sequence[Tensor]) -> None:
        """Raise ConfigError where the first step has changed parameters: losses are then those of several models."""
        if self.untried and not all(map(torch.equal, model.parameters(), before)):
            raise ConfigError(
                f"method={self.name}: {type(self.whole).__name__}.step changes parameters itself, and there are "
                f"{len(self.parts)} harmful tasks, whose losses must be those of one model: give it one task, or set "
                "`several = True` in the class and let `step` take a batch of each"
            )
        self.untried = False

    def within(self, model: Model, loss: Tensor) -> Tensor:
        return torch.stack([part.within(model, loss) for part in self.parts.values()]).mean()

    def epoch_end(self, model: Model, epoch: int) -> bool:
        ended = [part.epoch_end(model, epoch) for part in self.parts.values()]
        return any(ended)

    def score(self, model: Model) -> float:
        return min(part.score(model) for part in self.parts.values())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"parts": {role: part.state_dict() for role, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, own in state.pop("parts").items():
            self.parts[role].load_state_dict(own)
        super().load_state_dict(state)

    def finish(self, model: Model) -> None:
        super().finish(model)
        for role, part in reversed(self.parts.items()):  # the first one may have damped the weights of all
            part.finish(model)
            suffix = "" if role == "harmful" else f"_{role}"
            self.flags |= {flag + suffix: reason for flag, reason in part.flags.items()}


def combined(method: Method, pair: TaskPair) -> Method:
    """`method` itself for one harmful task, or where it takes several as they are; raises ConfigError if it cannot."""
    if len(pair.harmful_tasks) == 1 or method.several:
        return method
    if type(method).step is Method.step:
        raise ConfigError(
            f"method={method.name} takes one harmful task, not {len(pair.harmful_tasks)}; give it one, or take "
            "another method (closed_form, learning_curve, decoys)"
        )
    return Combined(method)
