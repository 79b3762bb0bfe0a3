"""What the methods for linear maps share: theta itself, the D x D statistics of a task, and the least-squares head."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from immunization.data.task import SPLITS, Task
from immunization.errors import ConfigError
from immunization.models.base import Model
from immunization.theory import spectrum
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
