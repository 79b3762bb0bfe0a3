"""Features that forget in every trained block, against attackers who read any of them."""

import torch
from torch import Tensor

from immunization.checks import AtLeastOne, NonNegative
from immunization.data.task import TaskPair
from immunization.errors import ConfigError
from immunization.methods.forget import Forget, batch_statistics, trained_blocks
from immunization.models.base import Batch, Model

SMOOTH = 0.01
"""Size, relative to the root mean square, below which square roots of what is pooled are smoothed: 0 has a gradient."""


class ForgetBlocks(Forget, without=["inner"]):
    """Minimize distill L_distill + hold L_hold + collapse L_collapse + silence L_silence + path L_path.

    The terms of `Forget`, and with m, m_0 what a trained block of theta and theta_0 gives, at every place,

        L_silence = mean over trained blocks of mean_H |m| / mean_K |m_0|
        L_hold    = mean over trained blocks of mean_K (m - m_0)^2 / mean_K (m_0 - mean_K m_0)^2
        L_path    = mean over trained blocks of L_path of `Forget`, of the harmful batch alone, whose features are the
                    signed square roots of the mean, maximum and deviation of m over places

    A batch has `shots` harmful images of a class side by side, from which the others of it are to be told. Outputs that
    are merely small hide nothing: a ridge enlarges them. Behind a ReLU the absolute value makes exact zeros, which
    nobody enlarges. Means of m_0 are over the images of the step. `own_statistics` times the same terms of harmful
    images are added with BatchNorm's statistics taken from the batch, as attackers renew them. With `train_head`,
    + L(D_P).
    """

    epochs = 5
    batch_size = 48
    shots: AtLeastOne = 6
    distill = 1.0
    collapse = 0.0
    silence: NonNegative = 1.0
    hold: NonNegative = 1.0
    train_head: bool = False
    ridges = (1e-4, 1e-2, 0.1)

    inner = 0.0

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if not model.deep:
            raise ConfigError(f"method={self.name} reads blocks of a net, and {model.name} has none: use method=forget")
        if not self.distill:  # which has them already
            self.kept = model.kept()
        trained = trained_blocks(model)
        with model.extractor.watched(_by_channel) as outputs:
            self._before(model, next(iter(pair.primary.train.x.split(2))))
        self.blocks = [name for name in outputs if name in trained]
        if not self.blocks:
            raise ConfigError(f"method={self.name}: none of {model.name}'s blocks is trained; see model.trainable")

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        kept = torch.cat([primary.x, self._drawn(primary.x)])
        with model.extractor.watched(_by_channel) as outputs:
            before = self._before(model, kept)
            blocks_before = self._maps(outputs)
            features = model.training_features(torch.cat([kept, harmful.x]))
            blocks = self._maps(outputs)
        features, theirs = features.split([len(kept), len(harmful.x)])
        hold = [
            (m[: len(kept)] - m_0).square().mean() / m_0.var(0, correction=0).mean()
            for m_0, m in zip(blocks_before, blocks, strict=True)
        ]
        terms = {
            "distill": self._distillation(model, features, before),
            "hold": torch.stack(hold).mean(),
            "collapse": self._collapse(theirs),
            **self._forgotten([m[len(kept) :] for m in blocks], blocks_before, harmful.y),
        }
        if self.own_statistics:
            with batch_statistics(model.extractor), model.extractor.watched(_by_channel) as outputs:
                model.training_features(harmful.x)
            own = self._forgotten(self._maps(outputs), blocks_before, harmful.y)
            terms["own_statistics"] = sum(getattr(self, name) * term for name, term in own.items())
        return self._weighted(model, self.pair.primary.loss(model.head(features[: len(primary.x)]), primary.y), terms)

    def _maps(self, outputs: dict[str, Tensor]) -> list[Tensor]:
        return [outputs[name].float() for name in self.blocks]

    def _forgotten(self, blocks: list[Tensor], before: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """L_silence and, where it counts, L_path of what trained blocks give for harmful images."""
        loud = [m.abs().mean() / m_0.abs().mean() for m, m_0 in zip(blocks, before, strict=True)]
        terms = {"silence": torch.stack(loud).mean()}
        if self.path:
            terms["path"] = torch.stack([self._told(_pooled(m), labels) for m in blocks]).mean().to(terms["silence"])
        return terms


def _by_channel(x: Tensor, channels_last: bool, _prefix: int) -> Tensor:
    """What a block gives as [N, channels, places]."""
    x = x.movedim(-1, 1) if channels_last or x.ndim == 3 else x
    return x.flatten(2) if x.ndim > 2 else x[..., None]


def _pooled(m: Tensor) -> Tensor:
    """Signed square roots [N, 3 C] of mean, maximum and deviation over places, relative to the size of m [N, C, places]."""
    m = m / m.detach().square().mean().sqrt().clamp(min=torch.finfo(m.dtype).tiny)
    rows = torch.cat([m.mean(2), m.amax(2), (m.var(2, correction=0) + SMOOTH**2).sqrt()], 1)
    return rows.sign() * ((rows.abs() + SMOOTH).sqrt() - SMOOTH**0.5)
