"""Direct descent on the condition numbers (the paper's Opt-kappa baseline, and a log form)."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.models.base import Batch, Model
from immunization.spectral import log_condition_number


class OptKappa(Method):
    """Minimize kappa(H_P) - kappa(H_H) (`form="raw"`, the paper's), or its scale-free form.

    `form="log"` minimizes log kappa(H_P) - log kappa(H_H) + L(D_P): the logarithm of the RIR itself, up to its sign and
    a constant, beside the primary task.
    """

    def __init__(
        self,
        epochs: int,
        batch_size: int | None = None,
        form: Literal["raw", "log"] = "raw",
        max_accuracy_drop: float | None = None,
        patience: int | None = None,
    ) -> None:
        super().__init__(epochs, batch_size, patience, max_accuracy_drop)
        if form not in ("raw", "log"):
            raise ConfigError(f"method.form must be 'raw' or 'log', not {form!r}")
        self.form = form

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, features = model.outputs(primary) if self.form == "log" else (None, None)
        log_p = model.hessian_term(partial(log_condition_number, rank=primary.rank), primary, "none", features=features)
        log_h = model.hessian_term(partial(log_condition_number, rank=harmful.rank), harmful, "none")
        terms = {"log_kappa_primary": log_p, "log_kappa_harmful": log_h}
        if self.form == "raw":
            return {"loss": log_p.exp() - log_h.exp(), **terms}
        loss = self.pair.primary.loss(logits, primary.y)
        return {"loss": log_p - log_h + loss, "task_loss": loss, **terms}
