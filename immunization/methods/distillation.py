"""What a net keeps of theta_0: features and class probabilities, distilled."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from immunization.data.task import TaskPair, log_probabilities
from immunization.methods.damping import damp, release
from immunization.models.activations import Stream, take
from immunization.models.base import Batch, Model

DAMPED = 1000
"""Most images to keep whose second moments damp the weights; of D_P, whose few classes are not all, a fifth of that."""


class Distillation:
    """L_distill = mean_K ||f - f_0||^2 / mean_P ||f_0 - mean f_0||^2 + mean_K KL(p_0 || p) of a model as it is now.

    f, f_0 are the features and p, p_0 the class probabilities of theta and theta_0; K is a batch of D_P and as many
    images of dataset.keep_root, if there are any, drawn anew for every step. Only nets have probabilities to distill:
    the head of a model of rows starts untrained.
    """

    def __init__(
        self, model: Model, pair: TaskPair, keeps: bool = True, damping: float = 0.0, enlarged: bool = False
    ) -> None:
        """`keeps`: images of dataset.keep_root are read; without, K is the batch of D_P.

        `damping` of the trained weights until `release`, by such images. `enlarged`: `larger` has those of D_P and any
        to keep at twice the size, and the weights are damped by these, too.
        """
        self.kept = model.kept() if keeps else None
        self.larger = [model.enlarged("primary", pair.primary.train)] if enlarged else []
        if enlarged and (kept := model.kept(enlarged=True)) is not None:
            self.larger.append(kept)
        self.omega_0 = [p.detach().clone() for p in model.head.parameters()]
        once = [pair.primary.train.x] if self.kept is None else [pair.primary.train.x, self.kept]
        sizes = chain(self._read(once, DAMPED), self._read(self.larger, DAMPED // 4))  # of as many places
        self.layers = damp(model.extractor, sizes, damping) if damping else []
        self.theta_0 = {name: p.detach().clone() for name, p in model.trained().items()}
        features = model.features(pair.primary.train.x)
        self.mean, self.size = features.mean(0), features.square().sum(1).mean()
        self.spread = self.size - self.mean.square().sum()

    def _read(self, parts: Sequence[Tensor | Stream], most: int) -> Iterator[Tensor]:
        """What the weights are damped by, in batches: rows of D_P and images to keep, where there are any."""
        for rows, count in zip(parts, (most // 5, most)[-len(parts) :], strict=False):
            few = torch.linspace(0, len(rows) - 1, min(len(rows), count)).long()  # of all classes
            yield from (batch.to(self.omega_0[0]) for batch in take(rows, few).split(50))

    def release(self) -> None:
        """Make damped weights plain ones again."""
        release(self.layers)

    def drawn(self, x: Tensor) -> Tensor:
        """As many images to keep as x has rows; none where there are none."""
        return x[:0] if self.kept is None else self.kept[torch.randint(len(self.kept), (len(x),))].to(x)

    @torch.no_grad()
    def before(self, model: Model, x: Tensor) -> Tensor:
        """f_0 [N, D]."""
        return model.training_features(x, self.theta_0)

    def loss(self, model: Model, features: Tensor, before: Tensor) -> Tensor:
        """L_distill of f and f_0 [N, D]."""
        p_0 = log_probabilities(F.linear(before, *self.omega_0))
        moved = (features - before).square().sum(1).mean() / self.spread
        if not model.deep:
            return moved
        return moved + F.kl_div(log_probabilities(model.head(features)), p_0, log_target=True, reduction="batchmean")

    def __call__(self, model: Model, primary: Batch) -> Tensor:
        """L_distill of a batch of D_P beside as many images to keep."""
        x = torch.cat([primary.x, self.drawn(primary.x)])
        return self.loss(model, model.training_features(x), self.before(model, x))
