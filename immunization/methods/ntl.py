"""NTL, non-transferable learning (Wang et al., ICLR 2022)."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from immunization.checks import Count, NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.attacker import AgainstHead, fitted_head
from immunization.models.base import Batch, Model

KERNELS = 5
"""Gaussian kernels of the maximum mean discrepancy, each twice as wide as the one before."""


class NTL(AgainstHead):
    """Minimize L(D_P) - C min(1, alpha L(D_H, w) / C_H) min(1, beta MMD(D_P, D_H)).

    C and C_H are the outputs of the heads. Up to the factor C, the losses are divergences from one-hot labels, averaged
    over rows and classes. MMD is of the features, or of what the trained block `block` gives. Where C is not C_H, as
    with a net's own head of 1,000 outputs and 40 harmful classes, the second term weighs C / C_H times the paper's.

    From the paper and its code: this loss, alpha = beta = 0.1, five Gaussian kernels and Adam at 1e-4; its MMD is of an
    early convolution. Ours: D_H has labels of its own, and a head w that takes `head_steps` gradient steps of rate
    `head_lr` on the features of each batch, scaled to a mean squared norm of 1, before it counts; the paper's tasks
    share one head. The paper claims nothing against an attacker who trains a new head on D_H.
    """

    alpha: NonNegative
    beta: NonNegative
    head_steps: Count
    head_lr: NonNegative
    block: str | None

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        trained = model.chain.trained_blocks() if model.trains_layers else []
        if self.block not in (None, *trained):
            known = f"{model.name} trains {', '.join(trained)}" if trained else f"{model.name} trains none: set null"
            raise ConfigError(f"method.block={self.block} is no trained block; {known}")

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        task = self.pair.harmful
        with self._seen(model) as seen:
            logits, features = model.outputs(primary)
            ours = seen.get(self.block or "", model.training_features(primary.x) if features is None else features)
            features = model.training_features(harmful.x)
            theirs = seen.get(self.block or "", features)
        self.attacker = fitted_head(task, self.attacker, features, harmful.y, self.head_lr, self.head_steps)
        task_loss, harmful_loss = self.pair.primary.loss(logits, primary.y), self.harmful_loss(features, harmful)
        distance = mmd(ours.to(features), theirs.to(features))
        gain = (self.alpha * harmful_loss / task.outputs).clamp(max=1) * (self.beta * distance).clamp(max=1)
        loss = task_loss - logits.shape[1] * gain
        return {"loss": loss, "task_loss": task_loss, "harmful_loss": harmful_loss, "mmd": distance}

    def _seen(self, model: Model) -> AbstractContextManager[dict[str, Tensor]]:
        """Inside, the dict has what blocks gave last, [N, D], if one of them is asked for."""
        return model.chain.watched(lambda x, *_: x.flatten(1)) if self.block else nullcontext({})


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Squared maximum mean discrepancy of rows [N, D] and [M, D], biased, under the sum of five Gaussian kernels.

    k(x, y) = sum_i exp(-||x - y||^2 / (2^i s)), i = -2..2, s the mean squared distance of two different rows.
    """
    both = torch.cat([a, b])
    squared = both.square().sum(1)
    distances = (squared[:, None] + squared - 2 * both @ both.mT).clamp(min=0)
    bandwidth = distances.detach().sum() / (len(both) * (len(both) - 1))
    bandwidth = bandwidth.where(bandwidth > 0, 1.0)  # rows that are all equal
    widths = (bandwidth * 2.0 ** (i - KERNELS // 2) for i in range(KERNELS))
    kernel = torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)
    n = len(a)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
