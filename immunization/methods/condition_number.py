"""Our variant of Algorithm 1 of the paper, the variant of its released code, and the ablation to R_ill."""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from immunization.checks import EvenPower, Fraction, NonNegative
from immunization.compute import distributed
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.methods.hold import HoldsPrimary
from immunization.models.base import Batch, Model
from immunization.theory.regularizers import Precondition, r_ill_of_features, r_well_of_features


def preconditioner(mode: Precondition, ridge: float, side: str = "input") -> dict[str, Any]:
    """The options `precondition`, `ridge` and `side` of a method, as `Model.hessian_term` takes them."""
    if side == "output" and mode != "ridge":
        raise ConfigError(
            f"method.side=output needs method.precondition=ridge, not {mode}; a net, which has no matrix K, takes "
            "method.side=input (side='input' from Python)"
        )
    return {"mode": mode, "ridge": ridge, "side": side}


ROUNDING = 1e-9
"""Length of a gradient, relative to its loss, below which it is none."""


class ConditionNumber(HoldsPrimary):
    """Minimize L(D_P) + lambda_P R_well,p(H_P) + lambda_H R_ill(H_H), Algorithm 1 of the paper.

    R_well is small if the primary Hessian H_P is well-conditioned, R_ill is small if the harmful Hessian H_H is
    ill-conditioned. `task_weight` is the weight of L(D_P).

    - `power` is p in R_well,p = (M_p^2 - M_2^2) / 2. M_p is the power mean of the rank(H_P) nonzero eigenvalues. `inf`
      is the paper's choice (Eq. 3), which compares the largest eigenvalue with the mean square over all D; it has a
      kink wherever the two largest eigenvalues meet.
    - `precondition` says how the gradients of the regularizers are multiplied by K_P^-1 and K_H^-1: `cancelled` (K
      drops out exactly), `ridge` (the inverse of K + `ridge` I), `pinv` (the pseudo-inverse) or `none`.
    - `balance=True` scales both weights: at theta_0, the gradient of each regularizer is then as long as that of the
      loss.
    - `hold_primary` bounds ratio (ii) (`Bound`; docs/theory.md, section 3); "auto" does so for linear models with
      balanced weights.
    """

    remembers = ("scale_P", "scale_H")
    side_by_side = ("lambda_P", "lambda_H", "task_weight")

    lambda_P: NonNegative
    lambda_H: NonNegative
    power: EvenPower
    precondition: Precondition
    ridge: NonNegative
    balance: bool
    smoothing: Fraction
    task_weight: NonNegative

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preconditioner_P = self.preconditioner_H = preconditioner(self.precondition, self.ridge)

    def holds(self, model: Model) -> bool:
        return self.balance and not model.trains_layers

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.scale_P: float | None = None if self.balance else 1.0
        self.scale_H = 1.0
        if self.power == math.inf and self.lambda_P:
            self.flags["kinks"] = (
                "method.power=inf, the paper's R_well, has a kink wherever the largest eigenvalues meet: on another "
                "processor this run gives other decimals"
            )

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, features = model.outputs(primary)
        loss = self.pair.primary.loss(logits, primary.y, self.smoothing)
        r_well = partial(r_well_of_features, rank=self.rank_of_r_well(primary), power=self.power)
        r_ill = partial(r_ill_of_features, rank=self.rank_of_r_ill(harmful))
        well = model.hessian_term(r_well, primary, **self.preconditioner_P, features=features)
        ill = model.hessian_term(r_ill, harmful, **self.preconditioner_H)
        if self.scale_P is None:
            self.scale_P, self.scale_H = self._balanced(model, loss, well, ill)
        weight_P, weight_H = self.lambda_P * self.scale_P * self.factor, self.lambda_H * self.scale_H
        total = self.task_weight * loss + weight_P * well + weight_H * ill
        return {"loss": total, "task_loss": loss, "r_well": well, "r_ill": ill}

    def rank_of_r_well(self, primary: Batch) -> int:
        """k of R_well: the paper's counts all dimensions, also those that the primary features lack."""
        return self.pair.dim if self.power == math.inf else primary.rank

    def rank_of_r_ill(self, harmful: Batch) -> int:
        """k of R_ill: sigma_k is the smallest singular value that the harmful features have."""
        return harmful.rank

    def _balanced(self, model: Model, loss: Tensor, well: Tensor, ill: Tensor) -> tuple[float, float]:
        """The scales of both weights at which the gradients of both terms are as long as that of the loss."""
        theta = list(model.trained().values())

        def norm(term: Tensor) -> float:
            gradients = torch.autograd.grad(term, theta, retain_graph=True, allow_unused=True)
            summed = distributed.summed([g for g in gradients if g is not None])
            return float(sum(g.square().sum().item() for g in summed) ** 0.5)

        # a head that starts at zero gives the loss no gradient in theta, nor does one that undoes it, up to rounding
        unit = own if (own := norm(loss)) > ROUNDING * loss.abs().item() else 1.0
        return unit / (norm(well) or 1.0), unit / (norm(ill) or 1.0)


class ReleasedConditionNumber(ConditionNumber):
    """`ConditionNumber` with the peculiarities of the released code, each as an option (docs/reproduction.md).

    - `side="output"` multiplies by K^-1 on the wrong side of the gradient: grad K^-1.
    - `rank="full"` sets k = D in R_ill whatever the rank of the batch is. In batches of fewer than D rows, sigma_k is
      then 0.
    - `ridge_harmful` is the ridge of K_H; None: `ridge`.
    - The linear layer of the released code also has a bias (`model.bias=true`).
    """

    ridge_harmful: NonNegative | None
    side: Literal["input", "output"]
    rank: Literal["data", "full"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preconditioner_P = preconditioner(self.precondition, self.ridge, self.side)
        ridge = self.ridge if self.ridge_harmful is None else self.ridge_harmful
        self.preconditioner_H = {**self.preconditioner_P, "ridge": ridge}

    def rank_of_r_ill(self, harmful: Batch) -> int:
        return self.pair.dim if self.rank == "full" else harmful.rank


class RIllOnly(Method):
    """Minimize only R_ill(H_H) by plain gradient descent, the ablation of the paper.

    `normalize=True` divides R_ill by its first value. For large Hessians R_ill is so small (1e-12 on MNIST) that Adam's
    eps would cancel its gradient. The other options are those of `ReleasedConditionNumber`.
    """

    remembers = ("scale",)
    side_by_side = ()

    normalize: bool
    precondition: Precondition
    ridge: NonNegative
    side: Literal["input", "output"]
    rank: Literal["data", "full"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preconditioner = preconditioner(self.precondition, self.ridge, self.side)

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.scale: float | None = None if self.normalize else 1.0

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        rank = self.pair.dim if self.rank == "full" else harmful.rank
        ill = model.hessian_term(partial(r_ill_of_features, rank=rank), harmful, **self.preconditioner)
        if self.scale is None:
            self.scale = 1 / ill.item()
        return {"loss": self.scale * ill, "r_ill": ill}
