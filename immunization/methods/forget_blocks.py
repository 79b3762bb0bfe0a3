"""Features that forget in every trained block, against attackers who read any of them."""

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from immunization.checks import AtLeastOne, Fraction, NonNegative
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.forget import Forget, batch_statistics, check_pairs
from immunization.models.base import Batch, Model
from immunization.models.chain import norms_of

SMOOTH = 0.01
"""Size, relative to the root mean square, below which the square roots are smoothed: 0 has a gradient."""


class ForgetBlocks(Forget):
    """Minimize distill L_distill + hold L_hold + path L_path + silence L_silence + collapse L_collapse.

    The terms of `Forget`, and with m, m_0 what a trained block of theta and theta_0 gives, at every place, and K as in
    `Distillation`,

        L_hold    = mean over trained blocks of mean_K (m - m_0)^2 / mean_K (m_0 - mean_K m_0)^2
        L_path    = mean over trained blocks of L_path of `Forget`, of the harmful batch alone, whose features are the
                    signed square roots of the mean, maximum and deviation of m over places
        L_silence = mean over trained blocks of mean_H |m| / mean_K |m_0|

    A batch has `shots` harmful images of a class side by side: ridges are to tell each from the others' labels. L_path
    does not depend on the scale of m: outputs that are merely small hide nothing, since a ridge enlarges them.
    L_silence makes exact zeros behind a ReLU, which nobody enlarges. Means of m_0 are over the images of the step.
    In a share `enlarged` of steps half as many images, of all kinds, are read at twice the size, as attackers read
    small ones. Weights are `Damped` by D_P and the images to keep, at all sizes that are read.
    Of nets with BatchNorm, `own_statistics` times L_path and L_silence are added with its statistics taken from the
    harmful batch, as attackers renew them. With `train_head`, + L(D_P).
    """

    shots: AtLeastOne
    enlarged: Fraction
    silence: NonNegative
    hold: NonNegative
    train_head: bool

    @property
    def keeps(self) -> bool:
        return super().keeps or self.hold > 0

    def setup(self, model: Model, pair: TaskPair) -> None:
        if not model.deep:
            raise ConfigError(f"method={self.name} reads blocks of a net, and {model.name} has none: use method=forget")
        super().setup(model, pair)
        trained = model.chain.trained_blocks()
        with model.chain.watched(_by_channel) as outputs:
            few = next(iter(pair.primary.train.x.split(2))).to(self.distillation.omega_0[0])
            self.distillation.before(model, few)
        self.blocks = [name for name in outputs if name in trained]
        self.renewed = bool(norms_of(model.extractor))
        if not self.blocks:
            raise ConfigError(f"method={self.name}: none of {model.name}'s blocks is trained; see model.trainable")
        self.larger = model.enlarged(self.role, pair.harmful.train) if self.enlarged else None

    def check_path(self, task: Task) -> None:
        """Raise DataError for a class of fewer than two rows; there is no memory bank."""
        check_pairs(task)

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        kept, y, x, labels = self._drawn(primary, harmful)
        with model.chain.watched(_by_channel) as outputs:
            before = self.distillation.before(model, kept)
            blocks_before = self._maps(outputs)
        with parametrize.cached(), model.chain.watched(_by_channel) as outputs:  # damped weights once a step
            features = model.training_features(kept)
            blocks = self._maps(outputs)
            theirs = model.training_features(x)
            hold = [
                (m - m_0).square().mean() / m_0.var(0, correction=0).mean()
                for m_0, m in zip(blocks_before, blocks, strict=True)
            ]
            terms = {
                "distill": self.distillation.loss(model, features, before),
                "hold": torch.stack(hold).mean(),
                "collapse": self._collapse(theirs),
                **self._forgotten(self._maps(outputs), blocks_before, labels),
            }
            if self.own_statistics and self.renewed:
                with batch_statistics(model.extractor):
                    model.training_features(x)
                own = self._forgotten(self._maps(outputs), blocks_before, labels)
                terms["own_statistics"] = sum(getattr(self, name) * term for name, term in own.items())
        return self._weighted(model, self.pair.primary.loss(model.head(features[: len(y)]), y), terms)

    def _drawn(self, primary: Batch, harmful: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K of a step with labels of its first rows, of D_P, and harmful images with labels, which are grouped.

        The batches beside images to keep, or half as many of each at twice the size.
        """
        if self.larger is None or torch.rand(()) >= self.enlarged:
            return torch.cat([primary.x, self.distillation.drawn(primary.x)]), primary.y, harmful.x, harmful.y
        few = max(2, len(primary.y) // 2)
        drawn = [torch.randint(len(rows), (few,)) for rows in self.distillation.larger]
        kept = torch.cat([rows[some] for rows, some in zip(self.distillation.larger, drawn, strict=True)])
        theirs = self._grouped(max(2, len(harmful.y) // 2))
        of_all = self.pair.primary.train.y, self.pair.harmful.train.y
        y, labels = (task[rows.to(task.device)] for task, rows in zip(of_all, (drawn[0], theirs), strict=True))
        return kept.to(primary.x), y, self.larger[theirs].to(harmful.x), labels

    def _grouped(self, few: int) -> Tensor:
        """So many training rows of D_H, `shots` of a class side by side."""
        y, classes = self.pair.harmful.train.y.cpu(), self.pair.harmful.classes
        rows = torch.randperm(len(y))
        if classes:
            drawn = torch.randperm(classes)[: max(2, few // self.shots)]
            labels = y[rows]
            shots = min(self.shots, max(1, few // 2))  # of two classes at least
            rows = torch.cat([rows[labels == c][:shots] for c in drawn])
        return rows[:few]

    def _maps(self, outputs: dict[str, Tensor]) -> list[Tensor]:
        return [outputs[name].float() for name in self.blocks]

    def _forgotten(self, blocks: list[Tensor], before: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """L_silence and, where it has a weight, L_path of what trained blocks give for harmful images."""
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
    """Signed roots [N, 3 C] of mean, maximum and deviation over places of m [N, C, places], whatever its scale."""
    m = m / m.detach().square().mean().sqrt().clamp(min=torch.finfo(m.dtype).tiny)
    rows = torch.cat([m.mean(2), m.amax(2), (m.var(2, correction=0) + SMOOTH**2).sqrt()], 1)
    return rows.sign() * ((rows.abs() + SMOOTH).sqrt() - SMOOTH**0.5)
