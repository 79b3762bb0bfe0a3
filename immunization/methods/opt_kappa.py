"""Direct descent on the condition numbers (the paper's Opt-kappa baseline, and forms without its scale)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from immunization.checks import EvenPower, Fraction, NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Terms, counted, over_tasks
from immunization.methods.condition_number import preconditioner
from immunization.methods.hold import HoldsPrimary
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models.base import Batch, Model, Regularizer
from immunization.theory import spectrum
from immunization.theory.regularizers import (
    Precondition,
    log_authors_condition_number,
    log_condition_number,
    relative_log_condition_slope,
    with_gradients,
)

SMOOTH = 8
"""The power of `form="log"` where none is given."""

FORMS = {
    "raw": lambda log_p, log_h: log_p.exp() - log_h.exp(),
    "log": lambda log_p, log_h: log_p - log_h,
    "reciprocal_log": lambda log_p, log_h: log_p + 1 / log_h,
    "reciprocal_loglog": lambda log_p, log_h: log_p.log() + 1 / log_h.log(),
}
"""The objective of log kappa(H_P) and log kappa(H_H)."""


class OptKappa(HoldsPrimary):
    """Minimize kappa(H_P) - kappa(H_H) (`form="raw"`, as in the paper), or another one of `FORMS`.

    - `form="log"` minimizes log kappa(H_P) - log kappa(H_H), which is -log RIR up to a constant. Each kappa is replaced
      by M_p / M_-p, power means of the eigenvalues with p = `power`.
    - With `form="log"`, a linear theta takes its own steps, theta <- theta (I - rate (E_P - E_H)); E is the gradient
      relative to theta (`relative_log_condition_slope`). The reason: log kappa has a pole where theta loses rank, and
      the steps of an optimizer run into the pole. The optimizer then trains at most the head. `rate=None`: the
      optimizer trains theta, as in every other form.
    - The reciprocal forms reproduce the paper's numbers (docs/reproduction.md).
    - `conditioning="authors"` is kappa(H + 1e-6 I) of all D eigenvalues, as in the released code.
    - Gradients are multiplied by K^-1 as in `ReleasedConditionNumber`.
    - `task_weight` is the weight of L(D_P) (None: 0 for raw, else 1).
    - `hold_primary`, for form="log", bounds ratio (ii): a factor on log kappa(H_P) rises while (ii) is too large
      (`Bound`; docs/theory.md, section 3).
    """

    several = True

    form: Literal["raw", "log", "reciprocal_log", "reciprocal_loglog"]
    conditioning: Literal["rank", "authors"]
    power: EvenPower | None
    rate: Fraction | None
    task_weight: NonNegative | None
    precondition: Precondition
    ridge: NonNegative
    side: Literal["input", "output"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exponent = self.power or (SMOOTH if self.form == "log" else math.inf)
        self.weight = float(self.form != "raw") if self.task_weight is None else self.task_weight
        self.authors = self.conditioning == "authors"
        if self.precondition == "cancelled" and not self.authors:
            raise ConfigError(
                "method.precondition=cancelled needs method.conditioning=authors; otherwise use ridge, pinv or none"
            )
        self.preconditioner = preconditioner(self.precondition, self.ridge, self.side)
        if self.form != "log" and self.hold_primary not in ("auto", None):
            raise ConfigError(f"method.hold_primary={self.hold_primary} needs method.form=log, not {self.form}")

    def holds(self, model: Model) -> bool:
        """Whether the objective is that of the spectra: log kappa, or a power mean, of a linear map."""
        return self.form == "log" and not self.authors and not model.trains_layers

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        relative = self.form == "log" and self.rate is not None and not self.authors
        self.theta = model.linear_map() if relative else None
        for task in pair.harmful_tasks.values() if self.holds(model) and not self.undetermined else ():
            if outside := spectrum.dimensions_outside(pair.primary.root, task.root, *pair.tolerance):
                self.undetermined = (
                    f"the objective is unbounded: {outside} of the {task.rank} dimensions of range(K_H) are "
                    "outside of range(K_P), so that RIR says when the training stopped, and no more; "
                    "dataset.common_range=true leaves them out"
                )

    def step(self, model: Model, primary: Batch, *harmful: Batch) -> Terms:
        batches = dict(zip(self.pair.harmful_tasks, harmful, strict=True))
        if self.theta is not None:
            return self._multiply(model, self.theta, primary, batches)
        features, terms = None, {}
        if self.weight:
            logits, features = model.outputs(primary)
            terms = {"task_loss": self.pair.primary.loss(logits, primary.y)}
        log_p = model.hessian_term(self._log_kappa(model, primary), primary, **self.preconditioner, features=features)

        def against(batch: Batch) -> Terms:
            log_h = model.hessian_term(self._log_kappa(model, batch), batch, **self.preconditioner)
            loss = FORMS[self.form](self.factor * log_p, log_h)
            loss = loss + self.weight * terms["task_loss"] if self.weight else loss
            return {"loss": loss, **terms, "log_kappa_primary": log_p, "log_kappa_harmful": log_h}

        return over_tasks({role: against(batch) for role, batch in batches.items()}, self.combine)

    def _log_kappa(self, model: Model, batch: Batch) -> Regularizer:
        if self.authors:
            return log_authors_condition_number
        of_features = _of_alive if model.trains_layers else log_condition_number
        return partial(of_features, rank=batch.rank, power=self.exponent)

    def _multiply(self, model: Model, parameter: nn.Parameter, primary: Batch, harmful: Mapping[str, Batch]) -> Terms:
        """The step of a linear theta; terms are those before it."""
        theta = parameter.data
        loss = self.pair.primary.loss(model.head(primary.x @ theta), primary.y)

        def of(batch: Batch) -> tuple[Tensor, Tensor]:
            features = (batch.x if batch.root is None else batch.root) @ theta
            return relative_log_condition_slope(features, batch.rank, self.exponent)

        if model.deep:  # its own head undoes theta, whatever that is
            loss = with_gradients(loss.detach(), {parameter: torch.zeros_like(theta)})
        (log_p, slope_p), slopes = of(primary), {role: of(batch) for role, batch in harmful.items()}
        terms = {
            role: {
                "loss": self.weight * loss + (self.factor * log_p - log_h).to(loss.dtype),
                "task_loss": loss,
                "log_kappa_primary": log_p,
                "log_kappa_harmful": log_h,
            }
            for role, (log_h, _) in slopes.items()
        }
        slope_h = torch.stack([slopes[role][1] for role in counted(terms, self.combine)]).mean(0)
        # where the factor is large, the step is that of log kappa(H_P), and no longer
        theta -= (self.rate or 0.0) * (theta.double() @ (slope_p - slope_h / self.factor)).to(theta.dtype)
        return over_tasks(terms, self.combine)

    def finish(self, model: Model) -> None:
        super().finish(model)
        if self.theta is not None:
            fit_head(model, probe_of_inputs(self.pair.primary))


def _of_alive(features: Tensor, rank: int, power: float) -> Tensor:
    """`log_condition_number` of a net's features [N, D], to whose rank dead units add nothing."""
    return log_condition_number(features, min(rank, int(features.detach().any(0).sum())), power)
