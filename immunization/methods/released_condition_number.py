"""The paper's method as its authors released it, with the faults that docs/theory.md (section 5) explains."""

from __future__ import annotations

import math
from typing import Literal

from immunization.checks import AtLeastOne, AtLeastTwo, Count, EvenPower, Fraction, NonNegative, checked
from immunization.methods.base import Combine, preconditioner
from immunization.methods.condition_number import ConditionNumber
from immunization.models.base import Batch
from immunization.theory.preconditioning import Precondition


class ReleasedConditionNumber(ConditionNumber):
    """`ConditionNumber` with what the released code alone has, each an option that can be taken back.

    `side="output"` multiplies by K^-1 on the wrong side of the gradient, grad K^-1. `rank="full"` takes k = D in R_ill
    whatever the rank of the batch, so that sigma_k is 0 in batches of fewer rows. `ridge_harmful` is the ridge of K_H
    alone, for None the same as `ridge`. Its linear layer has a bias besides (`model.bias=true`).
    """

    @checked("method")
    def __init__(
        self,
        lambda_P: NonNegative,
        lambda_H: NonNegative,
        epochs: Count,
        batch_size: AtLeastTwo | None = 64,
        power: EvenPower = math.inf,
        precondition: Precondition = "ridge",
        ridge: NonNegative = 1.0,
        ridge_harmful: NonNegative | None = None,
        side: Literal["input", "output"] = "output",
        rank: Literal["data", "full"] = "full",
        balance: bool = False,
        smoothing: Fraction = 0.0,
        task_weight: NonNegative = 1.0,
        max_accuracy_drop: NonNegative | None = None,
        patience: AtLeastOne | None = None,
        combine: Combine = "sum",
    ) -> None:
        shared = power, precondition, ridge, balance, smoothing, task_weight, max_accuracy_drop, patience
        super().__init__(lambda_P, lambda_H, epochs, batch_size, *shared)
        self.combine = combine
        self.full_rank = rank == "full"
        self.preconditioner_P = preconditioner(precondition, ridge, side)
        self.preconditioner_H = {**self.preconditioner_P, "ridge": ridge if ridge_harmful is None else ridge_harmful}

    def rank_of_r_ill(self, harmful: Batch) -> int:
        return harmful.x.shape[1] if self.full_rank else harmful.rank
