"""A map in closed form that squeezes the directions a harmful probe learns along, and hides them among decoys."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from immunization.checks import AboveOne, AtLeastOne, Positive, Share
from immunization.data.task import LEARNED, Split, Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Untrained
from immunization.methods.linear_map import bound_for, fit_head, probe_of_inputs, rescale, theta_of
from immunization.models.base import Model
from immunization.theory import spectrum
from immunization.theory.optimal_map import rotation
from immunization.theory.probe import Probe, ridge_weights

DEEPEST = 1e6
"""Condition number of theta where none is asked for."""
RIDGES = (10.0, 1.0, 0.1, 0.01, 0.001)
"""Tried where none is asked for, relative to the largest eigenvalue of K_H."""
GRID = 2.0 ** torch.arange(21, dtype=torch.float64)
"""Steps of gradient descent at which probes are compared."""
KEPT = (None, 0.3, 0.1, 0.03, 0.01, 0.001)
"""Shares of the longest direction of the primary probe's path, from which on directions stay out; None: none does."""
ROWS = 1000
"""Rows of a split, about, on which probes are compared."""
SHARE = 1e-6
"""Of the longest direction, below which another one is taken to lie in the span of the others."""


def discriminants(probe: Probe, ridge: float) -> Tensor:
    """Orthonormal basis [D, k] of (K + ridge lambda_1 I)^-1 X^T Y, k <= C, for the probe of some inputs."""
    relative = torch.tensor([ridge]).to(probe.sigma) * probe.sigma[0] ** 2
    return _span(ridge_weights(probe.sigma, probe.vectors, probe.coefficients, relative)[0])


def _span(directions: Tensor) -> Tensor:
    u, sigma, _ = spectrum.svd(directions)
    return u[:, sigma > SHARE * sigma[0]]


class Decoys(Untrained):
    """theta = (I - (1 - 1/kappa) B B^T) R: squeezes all directions of a subspace B [D, m] alike, to 1/kappa.

    B contains the directions along which a harmful probe learns: the span of (K_H + ridge lambda_1 I)^-1 X_H^T Y_H. A
    large `ridge` gives X_H^T Y_H. A probe that starts at 0 has the gradient theta^T X_H^T Y_H, so it finds almost
    nothing outside of B, and inside B it needs about kappa^2 times the steps (docs/theory.md, section 8). A small
    `ridge` gives the directions of least squares, which reveal more. Several harmful tasks add their directions.

    `kept`: directions along which a primary probe learns, up to the step at which it has learned, stay out of B if
    they have at least this share of the longest one (null: none stays out). So a fresh primary probe is not slowed.

    "auto" chooses `ridge` and `kept` among `RIDGES` and `KEPT`, on validation and on training rows. It takes the pair
    that slows the harmful probe most (of several tasks, the one that is learned first) and a fresh primary probe not
    at all; among equals, the pair that reveals and keeps least. If no pair leaves the primary probe as it is, it
    takes the pair that slows the harmful probe most relative to the primary one.

    `dimensions` is m. The directions of B beyond those of the harmful task are decoys: random directions, so that
    B B^T, which anyone can read from theta, is not the span of the harmful task alone (`evaluation.leak`). Tasks that
    learn along the decoys become slower, too. `dimensions=null`: no decoys.

    `max_condition` is kappa, the condition number of theta; "auto" is 64 for nets (`MAX_CONDITION`) and 1e6 for
    linear models (`DEEPEST`). R and the primary head are as in `ClosedForm`.
    """

    folds = True

    dimensions: AtLeastOne | None
    ridge: Positive | Literal["auto"]
    kept: Share | Literal["auto"] | None
    max_condition: AboveOne | Literal["auto"]
    rotate: bool

    @torch.no_grad()
    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        theta = theta_of(model, self.name)
        best = self.map(model, pair)
        theta.copy_(best @ rotation(len(theta)).to(best) if self.rotate else best)
        rescale(theta, self.primary.inputs)

    def map(self, model: Model, pair: TaskPair) -> Tensor:
        """theta [D, D] in float64, before it is rotated."""
        self.primary = Course(pair.primary, probe_of_inputs(pair.primary))
        self.harmful = [Course(task, probe_of_inputs(task)) for task in pair.harmful_tasks.values()]
        drawn = torch.randn(pair.dim, self.dimensions or 0, dtype=torch.float64).to(pair.primary.train.x.device)
        return self.search(1 / (bound_for(model, self.max_condition) or DEEPEST), drawn)

    def search(self, depth: float, drawn: Tensor) -> Tensor:
        """The map of the best `ridge` and `kept`; `drawn` [D, m] are directions to take decoys from."""
        best, chosen = -math.inf, None
        most = min((GRID[-1] / task.steps).min().item() for task in self.harmful)
        ridges = RIDGES if self.ridge == "auto" else [self.ridge]
        directions = [torch.cat([discriminants(task.inputs, ridge) for task in self.harmful], 1) for ridge in ridges]
        for kept in KEPT if self.kept == "auto" else [self.kept]:
            own = self.primary.directions(math.inf if kept is None else kept)
            for harmful in directions:
                theta = self.squeezed(harmful, own, depth, drawn)
                if theta is not None and (gain := self.gain(theta)) > best:
                    best, chosen = gain, theta
            if best >= most:  # never learned: no other map is slower
                break
        if chosen is None:
            raise ConfigError(
                "method=decoys: no direction of the harmful task lies outside of the primary task's, or no other is "
                "left; set method.kept higher or to null, or take another method"
            )
        return chosen

    def gain(self, theta: Tensor) -> float:
        """How much slower the harmful probe is; if it is not, or the primary one is, too, their ratio, far below 1."""
        primary = self.primary.slower(theta).max().item()
        harmful: float = min(task.slower(theta).min().item() for task in self.harmful)
        return harmful if primary <= 1 < harmful else 1e-9 * harmful / primary

    def squeezed(self, harmful: Tensor, own: Tensor, depth: float, drawn: Tensor) -> Tensor | None:
        """I - (1 - depth) B B^T for directions `harmful` [D, n] and `drawn`, less those of an orthonormal `own` [D, k].

        None where nothing is left to squeeze, or to keep. Raises ConfigError.
        """
        directions, decoys = (x - own @ (own.T @ x) for x in (harmful, drawn))
        needed = _span(directions)
        size, least = needed.shape
        wanted = least if self.dimensions is None else self.dimensions
        if not 0 < least < size:
            return None
        if not least <= wanted < size:
            raise ConfigError(
                f"method.dimensions={wanted} of {size} features: the harmful task needs {least}, and at least one must "
                f"be left; set it from {least} to {size - 1}, or null for no decoys"
            )
        basis = torch.linalg.qr(torch.cat([needed, decoys[:, : wanted - least]], 1)).Q
        # rounding errors of theta show in which basis B was written
        basis = basis @ rotation(wanted).to(basis)
        return torch.eye(size).to(basis) - (1 - depth) * basis @ basis.T

    def finish(self, model: Model) -> None:
        super().finish(model)
        fit_head(model, self.primary.inputs)


@dataclass
class Course:
    """A probe of a task's inputs by gradient descent, and how much later one behind a map gets as far.

    How far it gets is measured on validation and on training rows, as the former may be few, and the latter are fitted:
    on all, or on every n-th, so that these are at most twice `ROWS`.
    """

    task: Task
    inputs: Probe

    @property
    def splits(self) -> list[tuple[Split, slice]]:
        """The splits with rows, and which of them are looked at."""
        known = (split for split in (self.task.val, self.task.train) if len(split))
        return [(split, slice(None, None, max(1, len(split) // ROWS))) for split in known]

    @cached_property
    def before(self) -> Tensor:
        """The measure of the probe of the inputs, as in `curves`."""
        return self.curves(self.path)

    @cached_property
    def path(self) -> Tensor:
        """Heads [T, D, C] of the probe of the inputs after the steps of `GRID`."""
        return self.inputs.weights(GRID.to(self.inputs.sigma))

    @cached_property
    def steps(self) -> Tensor:
        """Steps of the probe of the inputs to `LEARNED` of its best on either split, [2]."""
        return self.first(self.before)

    @cached_property
    def spanned(self) -> tuple[Tensor, Tensor]:
        """Left singular vectors and singular values of the heads on the way there."""
        heads = self.path[self.steps.max() >= GRID.to(self.path)]
        return spectrum.svd(heads.transpose(0, 1).flatten(1))[:2]

    def curves(self, heads: Tensor) -> Tensor:
        """The measure [2, T] on either split with heads [T, D, C]."""
        return torch.stack([self.task.measure(s.x[rows].double() @ heads, s.y[rows]) for s, rows in self.splits])

    def first(self, curves: Tensor) -> Tensor:
        """Steps to the bar on either split; the last of `GRID` where it is never reached."""
        there = curves >= self.task.chance + LEARNED * (self.before.amax(1, True) - self.task.chance) - 1e-12
        return GRID.to(curves.device)[there.int().argmax(1).where(there.any(1), len(GRID) - 1)]

    def slower(self, theta: Tensor) -> Tensor:
        """Steps behind theta over those of the inputs, on either split."""
        behind = Probe.fit(self.inputs.root @ theta, self.inputs.coefficients, 0.0, rank=self.task.rank)
        return self.first(self.curves(theta @ behind.weights(GRID.to(theta.device)))) / self.steps

    def directions(self, share: float) -> Tensor:
        """Orthonormal directions [D, k] of the way there, with at least `share` of the longest one."""
        u, sigma = self.spanned
        return u[:, sigma >= share * sigma[0]]
