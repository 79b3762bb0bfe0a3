"""The RIR-optimal linear map in closed form (docs/theory.md, "The ceiling of RIR, and the map that attains it")."""

from typing import Literal

import torch

from immunization.checks import AboveOne, NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.methods.linear_map import bound_for, fit_head, probe_of_inputs, rescale, sum_root, theta_of
from immunization.models.base import Model
from immunization.theory import spectrum
from immunization.theory.optimal_map import Spread, bounded_map, optimal_map


class ClosedForm(Method):
    """theta = K_P^-1/2 Q Delta R, which attains the ceiling of RIR; see `optimal_map` for the options.

    `max_condition` bounds the condition number of theta by the least ridge that does (`bounded_map`), so that number
    formats of few digits hold it and its inverse; "auto" is `MAX_CONDITION` for nets and no bound for linear models.
    `rotate=True` ends in a random rotation, drawn from torch's global generator: no spectrum sees it, but attackers
    that treat coordinates separately (Adam, column scaling) do. The primary head is the least squares of the inputs.
    Several harmful tasks count by the sum of their K_H.
    """

    folds = True
    several = True

    primary_ratio: NonNegative
    ridge: NonNegative
    spread: Spread
    rotate: bool
    max_condition: AboveOne | Literal["auto"] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = 0

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
