"""EncoderLock (Ding et al., NDSS 2025, arXiv 2411.12508): few weights of the encoder against probing."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import AtLeastOne, NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.attacker import AgainstHead, drawn, fitted_head, scaled
from immunization.models.base import Batch, Model
from immunization.theory.regularizers import with_gradients

TINY = 1e-8
"""Added to the gradient of L(D_P) in the score of a weight."""


class Encoderlock(AgainstHead):
    """Minimize L(D_P) + log(1 + alpha L(D_P) / L(D_H, w)) in few weights of theta, a mask that grows round by round.

    A round is `round_steps` steps. At its start, a fresh head for D_H is trained on all training rows and becomes w
    where it is stronger; weights are scored by |grad L(D_H)| / (|grad L(D_P)| + 1e-8), gradients being means over
    `score_batches` pairs of batches, and the `weights` best of the layer with the largest score join the mask.

    From the paper and its code: the loss, the scores, the mask, alpha = 1e3, ten pairs of batches, 100 weights and 40
    Adam steps at 1e-2 per round, and a fixed primary head. Ours: a step sees one pair of batches, not ten, and Adam
    goes on from round to round; the fresh head is trained in every round, not after five, by `head_steps` gradient
    steps of rate `head_lr` on features scaled to a mean squared norm of 1, and stronger is a lower training loss, not a
    higher accuracy on test rows; all weights that join are new; those of downsampling layers and tiny ones may, and no
    normalization layer; the primary head of a model of rows, which starts untrained, is trained too.
    """

    draws = True
    remembers = (*AgainstHead.remembers, "masks", "taken")

    alpha: NonNegative
    weights: AtLeastOne
    score_batches: AtLeastOne
    round_steps: AtLeastOne
    head_steps: AtLeastOne
    head_lr: NonNegative

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.trained().items() if p.ndim > 1}
        if not self.masks:
            raise ConfigError(
                "method=encoderlock chooses weights of layers, and model.trainable names no layer with a matrix"
            )
        self.taken = 0

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        starts = self.taken % self.round_steps == 0
        self.taken += 1
        if starts:
            self._renew_attacker(model)
            self._grow(model, list(self._theta(model).values()), primary, harmful)
        loss, harmful_loss = self._losses(model, primary, harmful)
        weights = torch.stack([mask.sum() for mask in self.masks.values()]).sum().to(loss)
        total = loss + torch.log1p(self.alpha * loss / harmful_loss)
        total = self.within(model, total)
        return {"loss": total, "task_loss": loss, "harmful_loss": harmful_loss, "weights": weights}

    def within(self, model: Model, loss: Tensor) -> Tensor:
        """`loss` with gradients in the mask alone, and in the head of a model of rows."""
        masks = {p: self.masks[name] for name, p in self._theta(model).items()}
        parameters = [*masks, *([] if model.deep else model.head.parameters())]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        inside = {p: g * masks.get(p, 1.0) for p, g in zip(parameters, gradients, strict=True) if g is not None}
        return with_gradients(loss.detach(), inside)

    def _theta(self, model: Model) -> dict[str, nn.Parameter]:
        """The parameters that a mask has."""
        return {name: p for name, p in model.trained().items() if name in self.masks}

    def _losses(self, model: Model, primary: Batch, harmful: Batch) -> tuple[Tensor, Tensor]:
        """L(D_P) and L(D_H, w) of batches."""
        logits, _ = model.outputs(primary)
        return self.pair.primary.loss(logits, primary.y), self.harmful_loss(model.training_features(harmful.x), harmful)

    def _grow(self, model: Model, theta: Sequence[Tensor], primary: Batch, harmful: Batch) -> None:
        """Let weights join the mask, by the gradients of these batches and of others, drawn from all training rows."""
        sums = [[torch.zeros_like(p) for p in theta] for _ in range(2)]
        for number in range(self.score_batches):
            if number:
                primary, harmful = drawn(self.pair.primary, primary), drawn(self.pair.harmful, harmful)
            for slopes, loss in zip(sums, self._losses(model, primary, harmful), strict=True):
                for total, slope in zip(slopes, torch.autograd.grad(loss, theta), strict=True):
                    total += slope / self.score_batches
        of_primary, of_harmful = sums
        grow(self.masks, of_harmful, of_primary, self.weights)

    def _renew_attacker(self, model: Model) -> None:
        """Train a head from zero on all training rows of D_H, and keep it if its loss is lower."""
        task, rows = self.pair.harmful, self.pair.harmful.train
        features = model.features(rows.x)
        fresh = fitted_head(task, torch.zeros_like(self.attacker), features, rows.y, self.head_lr, self.head_steps)
        losses = [task.loss(F.linear(scaled(features), head), rows.y) for head in (fresh, self.attacker)]
        if losses[0] < losses[1]:
            self.attacker = fresh


def grow(masks: Mapping[str, Tensor], harmful: Sequence[Tensor], primary: Sequence[Tensor], count: int) -> None:
    """Let the `count` best weights of the layer with the best one join its mask, in place, by their gradients."""
    best: float | Tensor = -1.0
    chosen = None
    for mask, g_h, g_p in zip(masks.values(), harmful, primary, strict=True):
        scores = (g_h.abs() / (g_p.abs() + TINY)).masked_fill(mask, 0.0).flatten()
        top = scores.topk(min(count, len(scores)))
        if top.values[0] > best:
            best, chosen = top.values[0], (mask, top.indices)
    if chosen is not None:
        mask, places = chosen
        mask.view(-1)[places] = True
