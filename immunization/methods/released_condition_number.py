"""The paper's method as its authors released it, with the faults that docs/theory.md (section 5) explains."""

from __future__ import annotations

import math
from typing import Literal

from immunization.checks import NonNegative
from immunization.methods.base import preconditioner
from immunization.methods.condition_number import ConditionNumber
from immunization.models.base import Batch


class ReleasedConditionNumber(ConditionNumber):
    """`ConditionNumber` with what the released code alone has, each an option that can be taken back.

    `side="output"` multiplies by K^-1 on the wrong side of the gradient, grad K^-1. `rank="full"` takes k = D in R_ill
    whatever the rank of the batch, so that sigma_k is 0 in batches of fewer rows. `ridge_harmful` is the ridge of K_H
    alone, for None the same as `ridge`. Its linear layer has a bias besides (`model.bias=true`).
    """

    batch_size = 64
    power = math.inf
    precondition = "ridge"
    balance = False
    ridge_harmful: NonNegative | None = None
    side: Literal["input", "output"] = "output"
    rank: Literal["data", "full"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preconditioner_P = preconditioner(self.precondition, self.ridge, self.side)
        ridge = self.ridge if self.ridge_harmful is None else self.ridge_harmful
        self.preconditioner_H = {**self.preconditioner_P, "ridge": ridge}

    def rank_of_r_ill(self, harmful: Batch) -> int:
        return harmful.x.shape[1] if self.rank == "full" else harmful.rank
