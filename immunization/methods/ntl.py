"""NTL, non-transferable learning (Wang et al., ICLR 2022)."""

import torch
from torch import Tensor

from immunization.checks import Count, NonNegative
from immunization.methods.attacker import AgainstHead, fitted_head
from immunization.models.base import Batch, Model

KERNELS = 5
"""Gaussian kernels of the maximum mean discrepancy, each twice as wide as the one before."""


class NTL(AgainstHead):
    """Minimize L(D_P) - min(1, alpha L(D_H, w)) min(1, beta MMD(features of D_P, features of D_H)).

    From the paper and its code: this loss, alpha = beta = 0.1, five Gaussian kernels and Adam at 1e-4; the KL
    divergence from one-hot labels is the cross-entropy. Ours: D_H has labels of its own, and a head w that takes
    `head_steps` gradient steps of rate `head_lr` on the features of each batch, scaled to a mean squared norm of 1,
    before it counts; the paper's tasks share one head. MMD is of the features before the head. The paper claims nothing
    against an attacker who trains a new head on D_H.
    """

    epochs = 40
    batch_size = 64
    alpha: NonNegative = 0.1
    beta: NonNegative = 0.1
    head_steps: Count = 1
    head_lr: NonNegative = 0.5

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        logits, features = model.outputs(primary)
        features = model.training_features(primary.x) if features is None else features
        loss, theirs = self.pair.primary.loss(logits, primary.y), model.training_features(harmful.x)
        self.attacker = fitted_head(self.pair.harmful, self.attacker, theirs, harmful.y, self.head_lr, self.head_steps)
        harmful_loss, distance = self.harmful_loss(theirs, harmful), mmd(features, theirs)
        gain = (self.alpha * harmful_loss).clamp(max=1) * (self.beta * distance).clamp(max=1)
        return {"loss": loss - gain, "task_loss": loss, "harmful_loss": harmful_loss, "mmd": distance}


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Squared maximum mean discrepancy of rows [N, D] and [M, D], biased, under the sum of five Gaussian kernels.

    k(x, y) = sum_i exp(-||x - y||^2 / (2^i s)), i = -2..2, s the mean squared distance of two different rows.
    """
    both = torch.cat([a, b])
    squared = both.square().sum(1)
    distances = (squared[:, None] + squared - 2 * both @ both.mT).clamp(min=0)
    bandwidth = distances.detach().sum() / (len(both) * (len(both) - 1))
    widths = (bandwidth * 2.0 ** (i - KERNELS // 2) for i in range(KERNELS))
    kernel = torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)
    n = len(a)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
