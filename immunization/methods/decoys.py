"""A map in closed form that squeezes what a harmful probe learns along, and decoys that hide where that is."""

from typing import Literal

import torch
from torch import Tensor, nn

from immunization.checks import AboveOne, AtLeastOne, Positive
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.methods.linear_map import bound_for, fit_head, probe_of_inputs, rescale, theta_of
from immunization.models.base import Model
from immunization.theory import spectrum
from immunization.theory.probe import Probe, ridge_weights

DEEPEST = 1e6
"""Condition number of theta where none is asked for."""
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
    and needs about kappa^2 times the steps for what is (docs/theory.md, section 8). In the limit the little that it
    finds at once points to the right class, which is all that an accuracy asks for, so the ridge stays finite. Several
    harmful tasks add their directions.

    The others of `dimensions` are decoys: random directions, so that B B^T, which anybody reads from theta, is not the
    span of the harmful task alone (`evaluation.leak`). Tasks whose signals lie in them become slower, too.
    `dimensions=null`: no decoys.

    `max_condition` is kappa, the condition number of theta; "auto" is `MAX_CONDITION` for nets, `DEEPEST` for linear
    models. `rotate` and the primary head are as in `ClosedForm`.
    """

    folds = True
    several = True

    dimensions: AtLeastOne | None
    ridge: Positive
    max_condition: AboveOne | Literal["auto"]
    rotate: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = 0

    @torch.no_grad()
    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        theta, primary = theta_of(model, self.name), probe_of_inputs(pair.primary)
        needed = torch.cat([discriminants(probe_of_inputs(t), self.ridge) for t in pair.harmful_tasks.values()], 1)
        basis = self.with_decoys(_span(needed))
        depth = 1 / (bound_for(model, self.max_condition) or DEEPEST)
        squeezed = torch.eye(len(theta)).to(basis) - (1 - depth) * basis @ basis.T
        rotation = torch.empty(theta.shape, dtype=torch.float64)
        theta.copy_(squeezed @ nn.init.orthogonal_(rotation).to(basis) if self.rotate else squeezed)
        rescale(theta, primary)

    def with_decoys(self, needed: Tensor) -> Tensor:
        """B [D, m] around an orthonormal basis [D, k] of the harmful task's directions. Raises ConfigError."""
        size, least = needed.shape
        wanted = least if self.dimensions is None else self.dimensions
        if not least <= wanted < size:
            raise ConfigError(
                f"method.dimensions={wanted} of {size} features: the harmful task needs {least}, and at least one must "
                f"be left; set it from {least} to {size - 1}, or null for no decoys"
            )
        drawn = torch.randn(size, wanted - least, dtype=torch.float64).to(needed)
        return torch.linalg.qr(torch.cat([needed, drawn], 1)).Q

    def finish(self, model: Model) -> None:
        super().finish(model)
        fit_head(model, probe_of_inputs(self.pair.primary))
