"""Training of layers so that harmful classes cannot be told apart, by probes, whitening or in earlier blocks."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from immunization.checks import AtLeastOne, Fraction, NonNegative, Positive, Share
from immunization.compute.machine import memory, onto
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.methods.base import Method
from immunization.methods.distillation import Distillation
from immunization.models.base import Batch, Model
from immunization.models.chain import norms_of
from immunization.theory.probe import leave_one_out, ridge_weights
from immunization.theory.spectrum import svd

log = logging.getLogger(__name__)

CHOSEN = tuple(10.0**e for e in range(-12, 1))
"""Ridges, relative to sigma_1^2, of the attacker whom early stopping looks at."""


class Forget(Method):
    """Minimize L(D_P) + distill * L_distill + collapse * L_collapse + path * L_path + inner * L_inner.

    A word before a loss is the option of that name: the weight of the loss.

    f and f_0 are the features of theta and theta_0; c is the point of `target` (0, or the mean of f_0 over D_P);
    mean_P and mean_H are means over primary and harmful rows.

        L_distill  = that of `Distillation`: it keeps features and logits
        L_collapse = mean_H log(1 + ||f - c||^2 / (`floor` mean_P ||f_0||^2))
        L_path     = sum_lambda max(0, cos(leave-one-out predictions of ridge lambda, centered targets))
        L_inner    = mean over trained blocks but the net's last of mean_H log(1 + ||g||^2 / (`floor` mean_P ||g_0||^2))

    - L_path is large if a ridge probe can predict a row from the other rows (`leave_one_out`); its gradient passes
      through these predictions. The rows are those of the batch, and a memory bank without gradients: features of the
      rows that this pass over D_H has already shown, as they were then.
    - L_inner is against attackers who read earlier blocks; g is the pooled output of a block.
    - `damping` makes the trained weights `Damped`: they change little along the inputs that their layers get from D_P
      and from the images to keep.
    - `train_head` trains a net's head on the classes of D_P, which costs accuracy on its other classes; without it,
      L(D_P) is left out.
    - BatchNorm statistics do not change. `own_statistics` adds L_collapse with the statistics of the harmful batch,
      against attackers who use their own.
    - `interpolate`: the run ends at theta_0 + `interpolate` (theta - theta_0). On the way back to theta_0, what the
      net should keep returns faster than what it forgets (after WiSE-FT; Wortsman et al., CVPR 2022).
    - `patience` and `max_accuracy_drop` go back to the best epoch: the one with the largest accuracy of the model's
      own head minus that of the best ridge probe on D_H, on validation rows.
    """

    alone = True
    remembers = ("bank", "labels")
    enlarged = 0.0  # share of steps that read images at twice the size

    distill: NonNegative
    collapse: NonNegative
    path: NonNegative
    inner: NonNegative
    own_statistics: NonNegative
    damping: NonNegative
    target: Literal["zero", "mean"]
    floor: Positive
    train_head: bool
    interpolate: Share
    ridges: Sequence[Positive]

    @property
    def keeps(self) -> bool:
        return self.distill > 0 or self.damping > 0

    def setup(self, model: Model, pair: TaskPair) -> None:
        if not model.trained() or (model.deep and not model.trains_layers):
            raise ConfigError(
                f"method={self.name} needs trained layers, and there are none, since a map behind the features forgets "
                "nothing; name layers with model.trainable=..."
            )
        scored = self.patience or self.max_accuracy_drop is not None
        if scored and not (len(pair.primary.val) and len(pair.harmful.val)):
            key = "patience" if self.patience else "max_accuracy_drop"
            raise ConfigError(f"method.{key} needs validation rows of both tasks; set dataset.val_fraction above 0")
        if self.path:
            self.check_path(pair.harmful)
        model.head.requires_grad_(self.train_head or not model.deep)
        self.distillation = Distillation(model, pair, self.keeps, self.damping, self.enlarged > 0)
        super().setup(model, pair)  # after the weights are damped, which renames them
        self.mean, self.size = self.distillation.mean, self.distillation.size
        self.sizes = self._inner_sizes(model, pair.primary.train.x) if self.inner else {}
        if self.inner and not self.sizes:
            log.warning("method.inner has no effect: no block before the last one is trained")
        self.bank, self.labels = self.mean.new_empty(0, len(self.mean)), pair.harmful.train.y[:0]

    def check_path(self, task: Task) -> None:
        """Raise for a class of fewer than two rows, and for features of all rows that take more than the memory."""
        check_pairs(task)
        size, most = len(task.train) * task.dim * 8, memory(task.train.y.device)
        if size > most:
            raise ConfigError(
                f"method.path keeps a memory bank of {len(task.train):,} rows x {task.dim:,} features, "
                f"{size / 2**30:.3g} GiB in float64, and there are {most / 2**30:.3g}: set method.path=0 or "
                "give fewer rows"
            )

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        loss, features = self.loss_and_features(model, primary)
        watched: AbstractContextManager[dict[str, Tensor]] = model.chain.watched() if self.sizes else nullcontext({})
        with watched as outputs:
            theirs = model.training_features(harmful.x)
        x = primary.x
        if len(own := self.distillation.drawn(x)):
            x, features = torch.cat([x, own]), torch.cat([features, model.training_features(own)])
        distill = self.distillation.loss(model, features, self.distillation.before(model, x))
        terms = {"distill": distill, "collapse": self._collapse(theirs)}
        if self.path:
            terms["path"] = self._path(theirs, harmful)
        if self.sizes:
            collapsed = [self._near(outputs[block].to(theirs), size) for block, size in self.sizes.items()]
            terms["inner"] = torch.stack(collapsed).mean()
        if self.own_statistics:
            with batch_statistics(model.extractor):
                terms["own_statistics"] = self._collapse(model.training_features(harmful.x))
        return self._weighted(model, loss, terms)

    @torch.no_grad()
    def finish(self, model: Model) -> None:
        super().finish(model)
        if self.role == "harmful":  # once, where there is a copy of the method for each of several tasks
            starts = [*self.distillation.theta_0.values(), *self.distillation.omega_0]
            for p, start in zip([*model.trained().values(), *model.head.parameters()], starts, strict=True):
                p.lerp_(start, 1 - self.interpolate)
        self.distillation.release()

    def _weighted(self, model: Model, loss: Tensor, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `step` returns; without a head to train, L(D_P) would only make the net one for the classes of D_P."""
        total = sum(getattr(self, name) * term for name, term in terms.items())
        return {"loss": loss + total if self.train_head or not model.deep else total, "task_loss": loss, **terms}

    def _collapse(self, features: Tensor) -> Tensor:
        centered = features if self.target == "zero" else features - self.mean
        return self._near(centered, self.size)

    def _near(self, rows: Tensor, size: Tensor) -> Tensor:
        """Mean over rows of log(1 + ||row||^2 / (`floor` size))."""
        return torch.log1p(rows.square().sum(1) / (self.floor * size)).mean()

    def _inner_sizes(self, model: Model, x: Tensor) -> dict[str, Tensor]:
        """mean ||g_0||^2 over rows x, of each block with trained weights but the net's last one, by name."""
        if not model.deep:
            return {}
        trained = model.chain.trained_blocks()
        sums: dict[str, Tensor] = {}
        with model.chain.watched() as outputs:
            for _ in model.feature_batches(x):
                for block in list(outputs)[:-1]:
                    if block in trained:
                        sums[block] = sums.get(block, 0.0) + outputs[block].square().sum()
        return {block: total / len(x) for block, total in sums.items()}

    def _path(self, features: Tensor, batch: Batch) -> Tensor:
        """L_path of the batch beside the memory bank, which the batch then joins; a new pass empties the bank first."""
        if batch.first:
            self.bank, self.labels = self.bank[:0], self.labels[:0]
        rows, self.labels = torch.cat([self.bank, features]), torch.cat([self.labels, batch.y])
        self.bank = rows.detach()
        return self._told(rows, self.labels).to(features)

    def _told(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Sum over `ridges` of max(0, cos(leave-one-out predictions, centered targets)), in float64."""
        targets = self.pair.harmful.targets(labels)
        predictions = leave_one_out(rows, targets, self.ridges).flatten(1)
        return F.cosine_similarity(predictions, (targets - targets.mean(0)).flatten(), 1).clamp(min=0).sum()

    def score(self, model: Model) -> float:
        """Accuracy (or R^2) on validation rows: of the model's own head on D_P, less that of the best ridge on D_H."""
        task = self.pair.harmful
        train, val = (model.features(split.x).double() for split in (task.train, task.val))
        mean, targets = train.mean(0), task.targets(task.train.y)
        u, sigma, vh = svd(train - mean)
        ridges = sigma.new_tensor(CHOSEN) * sigma[0] ** 2
        weights = ridge_weights(sigma, vh.mT, u.mT @ (targets - targets.mean(0)), ridges)
        probe = task.measure((val - mean) @ weights + targets.mean(0), task.val.y)
        return self.accuracy(model) - probe.max().item()


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, every BatchNorm in `module` takes mean and variance from its batch, and keeps nothing of them."""
    norms: list[Any] = norms_of(module)
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, state in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = state


def check_pairs(task: Task) -> None:
    """Raise DataError for a class of fewer than two rows."""
    if task.classes and (fewest := torch.bincount(task.train.y, minlength=task.classes).min().item()) < 2:
        raise DataError(
            f"method.path leaves one row out, and a class of '{task.name}' has {fewest} training rows: give at least "
            "two of each class, or set method.path=0"
        )


SMOOTH = 0.01
"""Size, relative to the root mean square, below which the square roots are smoothed: 0 has a gradient."""


class ForgetBlocks(Forget):
    """Minimize distill L_distill + hold L_hold + path L_path + silence L_silence + collapse L_collapse.

    The terms are those of `Forget`, applied to every trained block. m and m_0 are the outputs of a trained block of
    theta and theta_0 at every position; mean_K is a mean over primary images and images to keep (`Distillation`).

        L_hold    = mean over trained blocks of mean_K (m - m_0)^2 / mean_K (m_0 - mean_K m_0)^2
        L_path    = mean over trained blocks of L_path of `Forget`, of the harmful batch alone, whose features are the
                    signed square roots of the mean, maximum and deviation of m over positions
        L_silence = mean over trained blocks of mean_H |m| / mean_K |m_0|

    - L_path does not depend on the scale of m: a ridge probe enlarges small outputs, so making them small hides
      nothing. L_silence makes outputs behind a ReLU exactly zero, which nobody can enlarge. Means of m_0 are over the
      images of the step.
    - A batch has `shots` harmful images of each of its classes, so that a ridge probe can tell classes apart.
    - In a share `enlarged` of the steps, half as many images are read at twice their size, as attackers read small
      images. Weights are `Damped` by D_P and the images to keep, at all sizes that are read.
    - For nets with BatchNorm, `own_statistics` adds L_path and L_silence with the statistics of the harmful batch,
      against attackers who use their own. `train_head` adds L(D_P).
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
            few = onto(next(iter(pair.primary.train.x.split(2))), self.distillation.omega_0[0])
            self.distillation.before(model, few)
        self.blocks = [name for name in outputs if name in trained]
        self.renewed = bool(norms_of(model.extractor))
        if not self.blocks:
            raise ConfigError(
                f"method={self.name}: none of {model.name}'s blocks is trained; name some with model.trainable=..."
            )
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
