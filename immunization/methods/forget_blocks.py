"""Features that forget in every trained block, against attackers who read any of them."""

import torch
from torch import Tensor

from immunization.checks import NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.forget import Forget, trained_blocks
from immunization.models.base import Batch, Model


class ForgetBlocks(Forget, without=["path", "inner", "own_statistics", "ridges"]):
    """Minimize distill L_distill + hold L_hold + collapse L_collapse + silence L_silence, with `train_head` + L(D_P).

    The terms of `Forget`, and with m, m_0 what a trained block of theta and theta_0 gives, at every place,

        L_silence = mean over trained blocks of mean_H |m| / mean_K |m_0|
        L_hold    = mean over trained blocks of mean_K (m - m_0)^2 / mean_K (m_0 - mean_K m_0)^2

    Outputs that are merely small hide nothing: a ridge enlarges them. Behind a ReLU the absolute value makes exact
    zeros, which nobody enlarges; blocks that end otherwise only shrink. Means of m_0 are over the images of the step.
    """

    epochs = 5
    batch_size = 32
    distill = 1.0
    collapse = 0.0
    silence: NonNegative = 1.0
    hold: NonNegative = 1.0
    train_head: bool = False

    path = 0.0
    inner = 0.0
    own_statistics = 0.0

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if not model.deep:
            raise ConfigError(f"method={self.name} reads blocks of a net, and {model.name} has none: use method=forget")
        if not self.distill:  # which has them already
            self.kept = model.kept()
        trained = trained_blocks(model)
        with model.extractor.watched(lambda x, *_: x) as outputs:
            self._before(model, next(iter(pair.primary.train.x.split(2))))
        self.blocks = [name for name in outputs if name in trained]
        if not self.blocks:
            raise ConfigError(f"method={self.name}: none of {model.name}'s blocks is trained; see model.trainable")

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        kept = torch.cat([primary.x, self._drawn(primary.x)])
        with model.extractor.watched(lambda x, *_: x) as outputs:
            before = self._before(model, kept)
            blocks_before = self._maps(outputs)
            features = model.training_features(torch.cat([kept, harmful.x]))
            blocks = self._maps(outputs)
        features, theirs = features.split([len(kept), len(harmful.x)])
        silence, hold = [], []
        for m_0, m in zip(blocks_before, blocks, strict=True):
            silence.append(m[len(kept) :].abs().mean() / m_0.abs().mean())
            hold.append((m[: len(kept)] - m_0).square().mean() / m_0.var(0, correction=0).mean())
        terms = {
            "distill": self._distillation(model, features, before),
            "hold": torch.stack(hold).mean(),
            "collapse": self._collapse(theirs),
            "silence": torch.stack(silence).mean(),
        }
        return self._weighted(model, self.pair.primary.loss(model.head(features[: len(primary.x)]), primary.y), terms)

    def _maps(self, outputs: dict[str, Tensor]) -> list[Tensor]:
        return [outputs[name].float() for name in self.blocks]
