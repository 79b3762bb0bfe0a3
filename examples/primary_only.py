"""A method that has only the terms of the primary task."""

from functools import partial

from torch import Tensor

from immunization.checks import NonNegative
from immunization.methods import Method
from immunization.models import Batch, Model


class PrimaryOnly(Method):
    """Minimize L(D_P) + `weight` log(k ||H_P||^2 / tr(H_P)^2), and leave the harmful task alone.

    The second term is 0 where all k eigenvalues of H_P are equal. For linear models and nets.
    """

    epochs = 100
    weight: NonNegative = 1.0

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, features = model.outputs(primary)
        loss = self.pair.primary.loss(logits, primary.y)
        uneven = model.hessian_term(partial(unevenness, rank=primary.rank), primary, features=features)
        return {"loss": loss + self.weight * uneven, "task_loss": loss, "uneven": uneven}


def unevenness(features: Tensor, rank: int) -> Tensor:
    """log(k ||H||^2 / tr(H)^2) of H = F^T F for features F [N, D] of rank k."""
    return (rank * (features.mT @ features).square().sum() / features.square().sum().square()).log()
