"""TAR, tampering attack resistance (Tamirisa et al., ICLR 2025, arXiv 2408.00761)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from immunization.checks import NonNegative, Positive
from immunization.data.task import TaskPair, log_probabilities
from immunization.methods.attacker import AgainstFineTuning
from immunization.methods.distillation import Distillation
from immunization.models.base import Batch, Model


class TAR(AgainstFineTuning):
    """Minimize L(D_P) + mean_P ||f - f_0|| / size + tamper sum_k w_k L_TR(theta_k), f_0 the features of theta_0.

    theta_k is the attacker's copy of theta after k of K = `inner_steps` steps, at one of `inner_lrs`, drawn anew for
    every batch; L_TR is the negative entropy of their predictions for held-out rows, and w_k = exp(`late` (k - K)). Its
    gradient is taken where the copy stands, and applied to theta (first order).

    From the paper and its code, which are about language models: this loss, tamper = 4, late = 1/16, and rates of the
    attacker in the ratio 1 : 10 : 20. Ours: K = 8, not 64; the attacker has a fresh head, which is fitted first,
    takes plain gradient steps, and never trains on primary rows; a gradient is taken in every step, on other held-out
    training rows, not in every fourth on one batch; of the layers only the features stay near theta_0's, in units of
    `size`, the root of their mean squared norm; there is no safeguard before.
    """

    tamper: NonNegative
    late: NonNegative
    inner_lrs: Sequence[Positive]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inner_lrs = list(self.inner_lrs)

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.theta_0 = Distillation(model, pair, keeps=False)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        rate = self.inner_lrs[int(torch.randint(len(self.inner_lrs), ()))]
        weights = [math.exp(self.late * (k + 1 - self.inner_steps)) for k in range(self.inner_steps)]
        gradients, resistance = self.attacked(model, self.pair.harmful, harmful, negative_entropy, rate, weights)
        logits, features = model.outputs(primary)
        features = model.training_features(primary.x) if features is None else features
        loss = self.pair.primary.loss(logits, primary.y)
        moved = torch.linalg.vector_norm(features - self.theta_0.before(model, primary.x), dim=1).mean()
        moved = moved / self.theta_0.size.sqrt()
        products = ((p * g).sum() for p, g in zip(model.trained().values(), gradients, strict=True))
        slope = sum(products, torch.zeros(()))
        total = loss + moved + self.tamper * (slope - slope.detach() + resistance)
        return {"loss": total, "task_loss": loss, "moved": moved, "resistance": resistance}


def negative_entropy(logits: Tensor, _y: Tensor) -> Tensor:
    """Mean over rows of sum_c p_c log p_c."""
    log_p = log_probabilities(logits)
    return (log_p.exp() * log_p).sum(1).mean()
