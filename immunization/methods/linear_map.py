"""Linear maps: what their methods share, and the map that is optimal for RIR, in closed form."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from immunization.checks import AboveOne, NonNegative
from immunization.data.task import SPLITS, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Untrained
from immunization.models.base import Model
from immunization.theory import spectrum
from immunization.theory.optimal_map import Spread, bounded_map, optimal_map
from immunization.theory.probe import Probe

MAX_CONDITION = 64.0
"""Condition number of a folded map at which bfloat16 and int8 keep the primary task, and a harmful probe on ResNet18
and ViT-Tiny needs over 500 times the steps; half of it is too little for the latter (docs/results/precision.md)."""

SLACK = 0.05
"""Share by which a simpler (earlier stopped) probe may miss the best generalization score."""


def theta_of(model: Model, method: str) -> nn.Parameter:
    """theta [D, D] where features are X theta; ConfigError for any other model."""
    theta = model.linear_map()
    if theta is None:
        raise ConfigError(
            f"method={method} acts on a linear extractor without bias: use model=linear with model.bias=false, not "
            f"{model.name}"
        )
    return theta


def probe_of_inputs(task: Task) -> Probe:
    """The probe on the training inputs: root S V^T [k, D] of K and c = U^T Y [k, C], whatever the number of rows."""
    return Probe.of(task.train.x, task.targets(task.train.y), task.eps, task.rank)


def sum_root(tasks: Mapping[str, Task]) -> Tensor:
    """[k, D] with the sum of the K of some tasks as its Gram matrix."""
    roots = [task.root for task in tasks.values()]
    if len(roots) == 1:
        return roots[0]
    return spectrum.compress(torch.cat(roots), eps=max(task.eps for task in tasks.values()))


def centered_task(task: Task) -> Task:
    """The task with the mean over its training rows subtracted from all inputs."""
    mean = task.train.x.mean(0)
    parts = {name: replace(getattr(task, name), x=getattr(task, name).x - mean) for name in SPLITS}
    return replace(task, **parts)


def generalizing_step(inputs: Probe, task: Task) -> float:
    """Number of gradient steps from 1 to 2^20 after which the probe of the inputs generalizes best.

    This is the first one that comes within `SLACK` of the least generalized cross-validation (Golub, Heath and Wahba,
    1979), which needs no held-out rows: ||Y - F w_t||^2 / (N - sum_i (1 - (1 - r_i)^t))^2, r_i = (sigma_i / sigma_1)^2.
    """
    steps = 2 ** torch.arange(0, 20.5, 0.5, dtype=torch.float64, device=inputs.sigma.device)
    total = task.targets(task.train.y).square().sum()
    missed = inputs.excess(steps) + (total - inputs.coefficients.square().sum()).clamp(min=0)
    left = len(task.train) - inputs.learned(steps).sum(1)
    score = (missed / left.square()).nan_to_num(math.inf)  # 0/0 where all N rows are fitted
    return steps[(score <= (1 + SLACK) * score.min()).nonzero()[0, 0]].item()


def bound_for(model: Model, bound: float | Literal["auto"] | None) -> float | None:
    """The largest condition number of theta: `bound`, where "auto" is `MAX_CONDITION` for a net and none otherwise."""
    if bound == "auto":
        return MAX_CONDITION if model.deep else None
    return bound


@torch.no_grad()
def rescale(theta: nn.Parameter, inputs: Probe) -> None:
    """Multiply theta by the power of two that brings its features nearest to the mean square of the inputs."""
    factor = (inputs.root.norm() / (inputs.root @ theta.double()).norm()).item()
    theta.mul_(2.0 ** round(math.log2(factor)))  # binary formats multiply by it without rounding


@torch.no_grad()
def fit_head(model: Model, inputs: Probe) -> None:
    """Set the primary head to theta^-1 w*, w* the minimum-norm least squares on the inputs: their logits agree."""
    model.set_head(torch.linalg.solve(theta_of(model, "fit_head").double(), inputs.optimum()).T)


class ClosedForm(Untrained):
    """theta = K_P^-1/2 Q Delta R, which attains the ceiling of RIR (`optimal_map` has the derivation and the options).

    The columns of Q are the eigenvectors of K_P^-1/2 K_H K_P^-1/2, Delta is diagonal, and R is a random rotation, drawn
    from torch's global generator. With `rotate=False` there is no R. R changes no spectrum, but it hinders attackers
    that treat coordinates separately (Adam, column scaling).

    `max_condition` bounds the condition number of theta by the smallest sufficient ridge (`bounded_map`), so that
    coarse number formats can represent theta and its inverse; "auto" is 64 for nets (`MAX_CONDITION`) and no bound
    for linear models. The primary head is the least squares solution on the inputs. For several harmful tasks, K_H is
    the sum over them.
    """

    folds = True

    primary_ratio: NonNegative
    ridge: NonNegative
    spread: Spread
    rotate: bool
    max_condition: AboveOne | Literal["auto"] | None

    @torch.no_grad()
    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        theta = theta_of(model, self.name)
        root_p, root_h = pair.primary.root, sum_root(pair.harmful_tasks)
        generator = torch.default_generator if self.rotate else None
        options = self.primary_ratio, self.ridge, self.spread, generator
        bound = bound_for(model, self.max_condition)
        try:
            a = optimal_map(root_p, root_h, *options) if bound is None else bounded_map(root_p, root_h, bound, *options)
        except ConfigError as error:
            raise ConfigError(f"method.{error}") from error
        theta.copy_(a)
        if bound is not None:
            rescale(theta, probe_of_inputs(pair.primary))
        if len(root_h) == 1:
            self.flags["harmful_rank_one"] = "K_H has rank 1: kappa(H_H) is 1 whatever theta is, nothing is immunized"
        elif outside := spectrum.dimensions_outside(root_p, root_h, *pair.tolerance):
            self.flags["common_range"] = (
                f"{outside} of the {len(root_h)} dimensions of range(K_H) are outside of range(K_P), where RIR is "
                "unbounded: closed_form is optimal for K_H projected onto range(K_P) and keeps the other directions as "
                "they are; dataset.common_range=true leaves them out"
            )

    def finish(self, model: Model) -> None:
        fit_head(model, probe_of_inputs(self.pair.primary))
