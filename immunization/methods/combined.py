"""Several harmful tasks for a method that is written for one."""

import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.models.base import Batch, Model
from immunization.theory.regularizers import with_gradients

Step = tuple[dict[str, Tensor], dict[Tensor, Tensor], list[Tensor]]
"""The terms of a step, the gradient of its loss in every parameter, and what it has added to these itself."""


class Combined(Method):
    """A copy of `method` per harmful task, with a state of its own, on the primary and that task.

    In a step all copies start from the same parameters; the loss, its gradient and what a method adds to parameters
    itself (heads that it fits, steps of its own) are the mean of theirs: the sum up to a factor, so that rates keep
    their meaning. With `combine="worst"` they are those of the copy with the largest loss. Early stopping looks at the
    least of the scores.
    """

    def __init__(self, method: Method) -> None:
        super().__init__(**{option.name: getattr(method, option.name) for option in fields(Method)})
        self.whole = method
        self.folds, self.alone, self.shots = method.folds, method.alone, method.shots

    @property
    def name(self) -> str:
        return self.whole.name

    def setup(self, model: Model, pair: TaskPair) -> None:
        if type(self.whole).loss_and_terms is not Method.loss_and_terms:  # it changes the gradients of what it keeps
            self.keep = 0.0
        super().setup(model, pair)
        self.parts: dict[str, Method] = {}
        for role, task in pair.harmful_tasks.items():
            part = self.parts[role] = copy.deepcopy(self.whole)
            part.keep, part.role = 0.0 if self.keep else part.keep, role  # this method keeps, once
            part.setup(model, replace(pair, harmful=task, more={}))
            part.patience = part.max_accuracy_drop = None  # this method stops, by all of their scores
        self.renew_best(model)
        self.undetermined = next((part.undetermined for part in self.parts.values() if part.undetermined), "")

    def step(self, model: Model, primary: Batch, *harmful: Batch) -> dict[str, Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in parameters]
        steps = [
            self._of_part(part, model, primary, batch, parameters, start)
            for part, batch in zip(self.parts.values(), harmful, strict=True)
        ]
        losses = {f"loss_{role}": terms["loss"] for role, (terms, _, _) in zip(self.parts, steps, strict=True)}
        if self.combine == "worst":
            steps = [steps[torch.stack(list(losses.values())).argmax()]]
        terms = {name: torch.stack([one[name] for one, _, _ in steps]).mean() for name in steps[0][0]}
        for i, (p, before) in enumerate(zip(parameters, start, strict=True)):
            p.data.copy_(before + torch.stack([moved[i] for _, _, moved in steps]).mean(0))
        reached = [p for p in parameters if any(p in slopes for _, slopes, _ in steps)]
        mean = {p: sum(slopes[p] for _, slopes, _ in steps if p in slopes) / len(steps) for p in reached}
        return terms | losses | {"loss": with_gradients(terms["loss"], mean)}

    @staticmethod
    def _of_part(
        part: Method, model: Model, primary: Batch, harmful: Batch, parameters: list[Tensor], start: list[Tensor]
    ) -> Step:
        for p, before in zip(parameters, start, strict=True):
            p.data.copy_(before)
        terms = part.loss_and_terms(model, primary, harmful)
        slopes = torch.autograd.grad(terms["loss"], parameters, allow_unused=True)
        given = {p: slope for p, slope in zip(parameters, slopes, strict=True) if slope is not None}
        moved = [p.detach() - before for p, before in zip(parameters, start, strict=True)]
        return {name: term.detach() for name, term in terms.items()}, given, moved

    def epoch_end(self, model: Model, epoch: int) -> bool:
        ended = [part.epoch_end(model, epoch) for part in self.parts.values()]
        return super().epoch_end(model, epoch) or any(ended)

    def takes_score(self, epoch: int) -> bool:
        return super().takes_score(epoch) or any(part.takes_score(epoch) for part in self.parts.values())

    def score(self, model: Model) -> float:
        for part in self.parts.values():
            part.best = self.best
        return min(part.score(model) for part in self.parts.values())

    def keeps_last(self, model: Model) -> bool:
        stops = self.patience is not None or self.max_accuracy_drop is not None
        return not stops and all(part.keeps_last(model) for part in self.parts.values())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"parts": {role: part.state_dict() for role, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, one in state.pop("parts").items():
            self.parts[role].load_state_dict(one)
        super().load_state_dict(state)

    def finish(self, model: Model) -> None:
        super().finish(model)
        for role, part in reversed(self.parts.items()):  # the first one may have damped the weights of all
            part.best = self.best
            part.finish(model)
            suffix = "" if role == "harmful" else f"_{role}"
            self.flags |= {flag + suffix: reason for flag, reason in part.flags.items()}


def combined(method: Method, pair: TaskPair) -> Method:
    """`method` itself for one harmful task, or where it takes several as they are; raises ConfigError if it cannot."""
    if len(pair.harmful_tasks) == 1 or method.several:
        return method
    if type(method).step is Method.step:
        raise ConfigError(
            f"method={method.name} does its work at once and for one harmful task, not for {len(pair.harmful_tasks)}; "
            "give it one, or take another method (closed_form, learning_curve)"
        )
    return Combined(method)
