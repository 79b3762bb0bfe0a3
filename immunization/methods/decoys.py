"""A map in closed form that squeezes what a harmful probe learns along, and decoys that hide where that is."""

from typing import Literal

import torch
from torch import Tensor, nn

from immunization.checks import AboveOne, AtLeastOne, Positive
from immunization.data.task import LEARNED, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.methods.linear_map import bound_for, fit_head, probe_of_inputs, rescale, theta_of
from immunization.models.base import Model
from immunization.theory import spectrum
from immunization.theory.probe import Probe, ridge_weights

DEEPEST = 1e6
"""Condition number of theta where none is asked for."""
RIDGES = (10.0, 1.0, 0.1, 0.01, 0.001)
"""Tried where none is asked for, relative to the largest eigenvalue of K_H."""
GRID = 2.0 ** torch.arange(21, dtype=torch.float64)
"""Steps of gradient descent at which probes are compared."""
SHARE = 1e-6
"""Of the longest direction, below which another one is taken to lie in the span of the others."""


def discriminants(probe: Probe, ridge: float) -> Tensor:
    """Orthonormal basis [D, k] of (K + ridge lambda_1 I)^-1 X^T Y, k <= C, for the probe of some inputs."""
    relative = torch.tensor([ridge]).to(probe.sigma) * probe.sigma[0] ** 2
    return _span(ridge_weights(probe.sigma, probe.vectors, probe.coefficients, relative)[0])


def _span(directions: Tensor) -> Tensor:
    u, sigma, _ = spectrum.svd(directions)
    return u[:, sigma > SHARE * sigma[0]]


class Decoys(Method):
    """theta = (I - (1 - 1/kappa) B B^T) R: all directions of a subspace B [D, m] are squeezed alike, to 1/kappa.

    B holds the span of (K_H + ridge lambda_1 I)^-1 X_H^T Y_H. For a large ridge that is X_H^T Y_H itself: of a probe
    that starts at 0 the gradient is theta^T X_H^T Y_H, so that it finds next to nothing along what is not squeezed,
    and needs about kappa^2 times the steps for what is (docs/theory.md, section 8). For a small one it is the least
    squares' own directions, which tell more. "auto" is that of `RIDGES` with the most steps of the harmful probe over
    those of a fresh primary probe, which count from the baseline's on, both to `LEARNED` of what the baseline reaches
    on validation rows (on training rows where there are none); of equals the largest. Several harmful tasks add their
    directions, and the one that is learned first counts.

    The others of `dimensions` are decoys: random directions, so that B B^T, which anybody reads from theta, is not the
    span of the harmful task alone (`evaluation.leak`). Tasks whose signals lie in them become slower, too.
    `dimensions=null`: no decoys.

    `max_condition` is kappa, the condition number of theta; "auto" is `MAX_CONDITION` for nets, `DEEPEST` for linear
    models. `rotate` and the primary head are as in `ClosedForm`.
    """

    folds = True
    several = True

    dimensions: AtLeastOne | None
    ridge: Positive | Literal["auto"]
    max_condition: AboveOne | Literal["auto"]
    rotate: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = 0

    @torch.no_grad()
    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        theta, self.primary = theta_of(model, self.name), probe_of_inputs(pair.primary)
        self.harmful = [(task, probe_of_inputs(task)) for task in pair.harmful_tasks.values()]
        depth = 1 / (bound_for(model, self.max_condition) or DEEPEST)
        drawn = torch.randn(len(theta), self.dimensions or 0, dtype=torch.float64).to(theta.device)
        maps = [self.squeezed(ridge, depth, drawn) for ridge in (RIDGES if self.ridge == "auto" else [self.ridge])]
        best = max(maps, key=self.gain) if len(maps) > 1 else maps[0]
        rotation = torch.empty(theta.shape, dtype=torch.float64)
        theta.copy_(best @ nn.init.orthogonal_(rotation).to(best) if self.rotate else best)
        rescale(theta, self.primary)

    def squeezed(self, ridge: float, depth: float, drawn: Tensor) -> Tensor:
        """I - (1 - depth) B B^T, where `drawn` [D, m] are directions to take decoys from. Raises ConfigError."""
        needed = _span(torch.cat([discriminants(probe, ridge) for _, probe in self.harmful], 1))
        size, least = needed.shape
        wanted = least if self.dimensions is None else self.dimensions
        if not least <= wanted < size:
            raise ConfigError(
                f"method.dimensions={wanted} of {size} features: the harmful task needs {least}, and at least one must "
                f"be left; set it from {least} to {size - 1}, or null for no decoys"
            )
        basis = torch.linalg.qr(torch.cat([needed, drawn[:, : wanted - least]], 1)).Q
        return torch.eye(size).to(basis) - (1 - depth) * basis @ basis.T

    def gain(self, theta: Tensor) -> float:
        """Steps of the harmful probe that learns first over those of a primary one, each over the baseline's."""
        slower = min(_slower(theta, task, probe) for task, probe in self.harmful)
        return slower / max(_slower(theta, self.pair.primary, self.primary), 1.0)

    def finish(self, model: Model) -> None:
        super().finish(model)
        fit_head(model, self.primary)


def _slower(theta: Tensor, task: Task, inputs: Probe) -> float:
    """Steps of a probe behind theta over those of one of the inputs; the last of `GRID` where it never comes there."""
    rows = task.val if len(task.val) else task.train

    def curve(x: Tensor, probe: Probe) -> Tensor:
        return task.measure(x @ probe.weights(GRID.to(x.device)), rows.y)

    before = curve(rows.x.double(), inputs)
    bar = task.chance + LEARNED * (before.max() - task.chance) - 1e-12
    behind = Probe.fit(inputs.root @ theta, inputs.coefficients, 0.0, rank=task.rank)
    first, base = (
        GRID[int((own >= bar).int().argmax())] if (own >= bar).any() else GRID[-1]
        for own in (curve(rows.x.double() @ theta, behind), before)
    )
    return (first / base).item()
