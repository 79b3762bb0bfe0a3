"""Direct descent on the condition numbers (the paper's Opt-kappa baseline, and a log form)."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

from torch import Tensor

from immunization.checks import AtLeastOne, AtLeastTwo, Count, EvenPower, Fraction, NonNegative, checked
from immunization.data.task import TaskPair
from immunization.methods.base import Method
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models.base import Batch, Model
from immunization.theory import spectrum
from immunization.theory.regularizers import log_condition_number, relative_log_condition_slope

SMOOTH = 8
"""The power of `form="log"` where none is given."""


class OptKappa(Method):
    """Minimize kappa(H_P) - kappa(H_H) (`form="raw"`, the paper's), or its scale-free form.

    `form="log"` minimizes log kappa(H_P) - log kappa(H_H), the logarithm of the RIR itself up to its sign and a
    constant, with M_p / M_-p (power means of the eigenvalues, p = `power`) in the place of kappa. A linear theta takes
    steps of its own, theta <- theta (I - rate (E_P - E_H)), E the relative gradients
    (`relative_log_condition_slope`): log kappa has a pole where theta loses rank, which steps of an optimizer run
    into. The optimizer trains the head alone. Nets follow the plain gradient, beside L(D_P).
    """

    @checked("method")
    def __init__(
        self,
        epochs: Count,
        batch_size: AtLeastTwo | None = None,
        form: Literal["raw", "log"] = "raw",
        power: EvenPower | None = None,
        rate: Fraction = 0.1,
        max_accuracy_drop: NonNegative | None = None,
        patience: AtLeastOne | None = None,
    ) -> None:
        super().__init__(epochs, batch_size, patience, max_accuracy_drop)
        usual = math.inf if form == "raw" else SMOOTH
        self.form, self.power, self.rate = form, usual if power is None else power, rate

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.multiplicative = self.form == "log" and model.linear_map() is not None
        if self.form == "log" and not pair.primary.width:
            outside = spectrum.dimensions_outside(pair.primary.root, pair.harmful.root, *pair.tolerance)
            if outside:
                self.undetermined = (
                    f"the objective is unbounded: {outside} of the {pair.harmful.rank} dimensions of range(K_H) are "
                    "outside of range(K_P), so that RIR says when the training stopped, and no more; "
                    "dataset.common_range=true leaves them out"
                )

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        if self.multiplicative:
            return self._multiply(model, primary, harmful)
        logits, features = model.outputs(primary) if self.form == "log" else (None, None)
        log_p, log_h = (
            model.hessian_term(
                partial(log_condition_number, rank=batch.rank, power=self.power), batch, "none", features=given
            )
            for batch, given in ((primary, features), (harmful, None))
        )
        terms = {"log_kappa_primary": log_p, "log_kappa_harmful": log_h}
        if self.form == "raw":
            return {"loss": log_p.exp() - log_h.exp(), **terms}
        loss = self.pair.primary.loss(logits, primary.y)
        return {"loss": log_p - log_h + loss, "task_loss": loss, **terms}

    def _multiply(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        """The step of a linear theta; terms are those before it."""
        theta = model.linear_map().data
        loss = self.pair.primary.loss(model.head(primary.x @ theta), primary.y)
        inputs = ((batch, batch.x if batch.root is None else batch.root) for batch in (primary, harmful))
        (log_p, slope_p), (log_h, slope_h) = (
            relative_log_condition_slope(x @ theta, batch.rank, self.power) for batch, x in inputs
        )
        theta -= self.rate * (theta.double() @ (slope_p - slope_h)).to(theta.dtype)
        return {
            "loss": loss + (log_p - log_h).to(loss.dtype),
            "task_loss": loss,
            "log_kappa_primary": log_p,
            "log_kappa_harmful": log_h,
        }

    def finish(self, model: Model) -> None:
        super().finish(model)
        if self.multiplicative:
            fit_head(model, probe_of_inputs(self.pair.primary))
