"""Methods against an attacker who trains a head on features.

NTL, non-transferable learning (Wang et al., ICLR 2022); EncoderLock, few weights of the encoder against probing (Ding
et al., NDSS 2025, arXiv 2411.12508); CLAMP, what an attacker's optimizer can reach at all, differentiated through its
steps (Sarker et al., CVPR 2026).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from immunization.checks import AtLeastOne, Count, Fraction, NonNegative, Positive
from immunization.data.task import Task, TaskPair
from immunization.errors import ConfigError
from immunization.methods.base import Method
from immunization.models.activations import take
from immunization.models.base import Batch, Model
from immunization.theory.regularizers import with_gradients


def scaled(features: Tensor) -> Tensor:
    """Features [N, D] divided by one factor, so that their mean squared norm is 1: a larger theta defends nothing."""
    return features / features.square().sum(1).mean().sqrt()


def fitted_head(task: Task, head: Tensor, features: Tensor, y: Tensor, rate: float, steps: int) -> Tensor:
    """`head` [outputs, D] after gradient steps down the loss of `features` [N, D], which are scaled; no graph."""
    features, head = scaled(features.detach()), head.detach()
    for _ in range(steps):
        head.requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(F.linear(features, head), y), head)
        head = head.detach() - rate * gradient
    return head


def drawn(task: Task, batch: Batch) -> Batch:
    """Training rows of a task, drawn at random, as many as there are in a batch of it."""
    rows = torch.randint(len(task.train), (len(batch.y),))
    return replace(batch, x=take(task.train.x, rows).to(batch.x), y=task.train.y[rows].to(batch.y))


class AgainstAttacker(Method):
    """A method that simulates an attacker; with `max_accuracy_drop` it goes back to the last epoch within that drop."""

    alone = True
    latest = True
    draws = False
    """Whether a step draws rows at random."""

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        if self.draws and not all(isinstance(task.train.x, Tensor) for task in pair.shown.values()):
            raise ConfigError(
                f"method={self.name} draws images at random in every step, so it needs activations that are kept: "
                "set dataset.augment=false, or raise dataset.cache_limit"
            )


class AgainstHead(AgainstAttacker):
    """A method whose attacker has a linear head w [outputs, D], zero at first and kept from step to step."""

    remembers: ClassVar[tuple[str, ...]] = ("attacker",)

    def setup(self, model: Model, pair: TaskPair) -> None:
        super().setup(model, pair)
        self.attacker = model.head.weight.new_zeros(pair.harmful.outputs, model.head.in_features)

    def harmful_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """The attacker's loss with w as it is, of `features` [N, D] before scaling."""
        return self.pair.harmful.loss(F.linear(scaled(features), self.attacker), batch.y)


KERNELS = 5
"""Gaussian kernels of the maximum mean discrepancy, each twice as wide as the one before."""


class NTL(AgainstHead):
    """Minimize L(D_P) - C min(1, alpha L(D_H, w) / C_H) min(1, beta MMD(D_P, D_H)).

    MMD is the maximum mean discrepancy, a distance between the features of the two tasks, or between the outputs of
    the trained block `block`. C and C_H are the numbers of outputs of the primary and the harmful head. Up to the
    factor C, the losses are divergences from one-hot labels, averaged over rows and classes. In the paper, C = C_H.
    Where they differ, for example 1,000 and 40, the weight of the second term is C / C_H times as large.

    From the paper and its code: this loss, alpha = beta = 0.1, five Gaussian kernels, and Adam at 1e-4; its MMD is of
    an early convolution. Ours: D_H has its own labels and its own head w; before it counts, w takes `head_steps`
    gradient steps of rate `head_lr` on the features of each batch, scaled to a mean squared norm of 1. In the paper,
    both tasks share one head. The paper claims nothing against an attacker who trains a new head on D_H.
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
            raise ConfigError(f"method.block={self.block} is not a trained block; {known}")

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        task = self.pair.harmful
        with self._seen(model) as seen:
            task_loss, features = self.loss_and_features(model, primary)
            ours = seen.get(self.block or "", features)
            features = model.training_features(harmful.x)
            theirs = seen.get(self.block or "", features)
        self.attacker = fitted_head(task, self.attacker, features, harmful.y, self.head_lr, self.head_steps)
        harmful_loss = self.harmful_loss(features, harmful)
        distance = mmd(ours.to(features), theirs.to(features))
        gain = (self.alpha * harmful_loss / task.outputs).clamp(max=1) * (self.beta * distance).clamp(max=1)
        loss = task_loss - model.head.out_features * gain
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


TINY = 1e-8
"""Added to the gradient of L(D_P) in the score of a weight."""


class Encoderlock(AgainstHead):
    """Minimize L(D_P) + log(1 + alpha L(D_P) / L(D_H, w)) in a few weights of theta, chosen round by round.

    Each round has `round_steps` steps. At its start, a fresh head for D_H is trained on all harmful training rows; it
    becomes the attacker's head w if it is stronger than the present one. Then every weight gets the score
    |grad L(D_H)| / (|grad L(D_P)| + 1e-8), with gradients averaged over `score_batches` pairs of batches. The
    `weights` best weights of the layer that has the largest score join the mask of trained weights.

    From the paper and its code: the loss, the scores, the mask, alpha = 1e3, ten pairs of batches, 100 weights and 40
    Adam steps at 1e-2 per round, and a fixed primary head. Ours: a step sees one pair of batches, not ten; Adam
    continues from round to round; the fresh head is trained in every round, not in every fifth, by `head_steps`
    gradient steps of rate `head_lr` on features scaled to a mean squared norm of 1; a head is stronger if its training
    loss is lower, not if its accuracy on test rows is higher; only new weights join; weights of downsampling layers
    and tiny weights can join, weights of normalization layers cannot; a model of rows also trains its primary head,
    which starts untrained.
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
                "method=encoderlock chooses weights of layers, and model.trainable names no layer with a matrix; "
                "name one, such as model.trainable=layer4"
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
        return self.primary_loss(model, primary), self.harmful_loss(model.training_features(harmful.x), harmful)

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


Loss = Callable[[Tensor], Tensor]
"""L_H as a function of the attacker's head."""

LARGEST_CONTRACTION = 0.99
"""Largest contraction factor in 1 / (1 - c)."""


class CLAMP(AgainstAttacker):
    """Minimize lambda_P L(D_P) + long L_long + contraction L_contraction + curvature L_curvature + invert L_invert.

    In every step, a simulated attacker trains a head w on D_H by K = `attack_steps` gradient steps of rate
    `attack_lr`. The gradients of the four terms (`attack_terms`) pass through these steps. The terms make the attacker
    start badly and converge slowly.

    From the paper, of which only notes by others were at hand: the four terms and their sum. Ours: every number; only
    the head is trained, on features scaled to a mean squared norm of 1; w starts in every step from a standard normal
    draw. L is the largest curvature on the way. The contraction factor c is the one by which a step of the attacker
    multiplies a small distance along its last step; it counts as at most 0.99 in `attack_terms`.
    """

    lambda_P: NonNegative
    long: NonNegative
    contraction: NonNegative
    curvature: NonNegative
    invert: NonNegative
    attack_steps: AtLeastOne
    attack_lr: Positive
    margin: NonNegative
    cap: NonNegative
    c_max: Fraction
    kappa_min: NonNegative
    eps: Positive

    def step(self, model: Model, primary: Batch, harmful: Batch) -> dict[str, Tensor]:
        loss, features = self.primary_loss(model, primary), scaled(model.training_features(harmful.x))

        def harmful_loss(w: Tensor) -> Tensor:
            return self.pair.harmful.loss(F.linear(features, w), harmful.y)

        shape = self.pair.harmful.outputs, features.shape[1]
        start = torch.randn(shape, dtype=features.dtype).to(features)  # the same numbers on every device
        limits = {name: getattr(self, name) for name in ("eps", "margin", "cap", "c_max", "kappa_min")}
        terms = attack_terms(harmful_loss, start, steps=self.attack_steps, rate=self.attack_lr, **limits)
        total = self.lambda_P * loss + sum(getattr(self, name) * term for name, term in terms.items())
        return {"loss": total, "task_loss": loss, **terms}


def attack_terms(
    loss: Loss,
    start: Tensor,
    *,
    steps: int,
    rate: float,
    eps: float,
    margin: float,
    cap: float,
    c_max: float,
    kappa_min: float,
) -> dict[str, Tensor]:
    """The four terms, before their weights.

    T(w) = w - rate grad loss(w) leads from w_0 = `start` to w_K in K = `steps` steps u_t = w_t - w_(t-1).

        long        = max(0, loss(w_0) - loss(w_K) + ||grad loss(w_K)|| B + L/2 B^2 - margin), B = ||u_K|| / (1 - c)
        contraction = softplus(c - c_max), c = ||T(w_K + eps v) - T(w_K)|| / eps, v = u_K / ||u_K||
        curvature   = sum_t softplus(kappa_min - kappa_t), kappa_t the second difference of loss at w_(t-1) along u_t
        invert      = -min(loss(w_0), cap)

    L is the largest kappa_t. `long` bounds the loss that further steps can still take off, however many.
    """

    def gradient(w: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(loss(w), w, create_graph=True)
        return slope

    path, tiny = [start.detach().requires_grad_()], torch.finfo(start.dtype).tiny
    for _ in range(steps):
        path.append(path[-1] - rate * gradient(path[-1]))
    ways = [b - a for a, b in pairwise(path)]
    directions = [way / way.norm().clamp(min=tiny) for way in ways]
    kappas = torch.stack([second_difference(loss, w, v, eps) for w, v in zip(path[:-1], directions, strict=True)])
    first, last, slope = path[0], path[-1], gradient(path[-1])
    c = (directions[-1] - rate * (gradient(last + eps * directions[-1]) - slope) / eps).norm()
    rest = ways[-1].norm() / (1 - c.clamp(max=LARGEST_CONTRACTION))
    gain = loss(first) - loss(last) + slope.norm() * rest + kappas.max() / 2 * rest**2
    return {
        "long": F.relu(gain - margin),
        "contraction": F.softplus(c - c_max),
        "curvature": F.softplus(kappa_min - kappas).sum(),
        "invert": -loss(first).clamp(max=cap),
    }


def second_difference(loss: Loss, w: Tensor, v: Tensor, eps: float) -> Tensor:
    """Curvature of `loss` at `w` along the unit `v`, from three values eps apart."""
    return (loss(w + eps * v) - 2 * loss(w) + loss(w - eps * v)) / eps**2
