"""Ridge regression and discriminant analysis on kernels of standardized columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from immunization.theory.spectrum import power_of_two

NOISE = 10 * torch.finfo(torch.float32).eps
"""Deviation of a column, relative to its largest value, below which it holds nothing but rounding."""

PART = 2**18
"""Numbers that the CPU standardizes at a time: as many as its cache holds."""

SHARPNESS = torch.logspace(-0.5, 1.5, 17, dtype=torch.float64)
"""What classes' scores of deviation 1 are multiplied by before the softmax that makes them probabilities."""


class Rule(NamedTuple):
    """A ridge, relative to the mean of a kernel's diagonal, and whether it is that of a discriminant analysis."""

    ridge: float
    discriminant: bool = False


@dataclass(frozen=True)
class Kernel:
    """Inner products of columns with mean 0 and deviation 1: `own` [n, n] of training rows, `others` [M, n] with them.

    `squares` [M] are those of other rows with themselves. Kernels of blocks side by side add up. `columns` were read.
    They lie in the CPU's memory: they are small, and what is solved with them waits more than it computes on a GPU.
    """

    own: Tensor
    others: Tensor
    squares: Tensor
    columns: int = 0

    def __add__(self, more: Kernel) -> Kernel:
        sums = (self.own + more.own, self.others + more.others, self.squares + more.squares)
        return Kernel(*sums, self.columns + more.columns)

    @classmethod
    def of(cls, train: Tensor, *others: Tensor, root: bool = False) -> Kernel:
        """From columns [n, D], or the mean of one or two views [views, n, D], and those of other rows, [.., M_i, D].

        Columns that do not vary, up to rounding, are left out. `root`: of the columns' signed square roots. All is
        computed in float64.
        """
        columns = _mean(train, root=False)
        mean, deviation = _moments(columns)
        alive = deviation > NOISE * torch.maximum(columns.amax(0), -columns.amin(0))
        if root:
            columns = _mean(train, root)
            mean, deviation = _moments(columns)

        dead = None if alive.all() else ~alive

        def standardized(x: Tensor) -> Tensor:
            x.sub_(mean).div_(deviation)
            return x if dead is None else x.masked_fill_(dead, 0.0)  # also where they are not finite

        columns = standardized(columns)
        sizes = [x.shape[-2] for x in others]
        rows = max(1, PART // max(1, len(mean)) if mean.device.type == "cpu" else max(sizes))
        rest, squares = mean.new_empty(sum(sizes), len(mean)), mean.new_empty(sum(sizes))
        for into, norms, views in zip(rest.split(sizes), squares.split(sizes), others, strict=True):
            for part, norm, own in zip(into.split(rows), norms.split(rows), views.split(rows, -2), strict=True):
                part.copy_(standardized(_mean(own, root)))
                norm.copy_(torch.linalg.vector_norm(part, dim=1).square())
        return cls(_gram(columns).cpu(), (rest @ columns.T).cpu(), squares.cpu(), int(alive.sum()))

    @classmethod
    def centered(cls, own: Tensor, others: Tensor, squares: Tensor, columns: int) -> Kernel:
        """From any inner products, of what then has mean 0 over training rows."""
        mean, all_mean, others_mean = own.mean(0), own.mean(), others.mean(1, keepdim=True)
        own = own - mean - mean[:, None] + all_mean
        squares = squares - 2 * others_mean[:, 0] + all_mean
        return cls(own, others - others_mean - mean + all_mean, squares, columns)

    def gaussian(self) -> Kernel:
        """exp(-d^2 / 2) of distances, in units in which the mean of d^2 over training rows is 1, of mean 0 there."""
        if not self.columns:
            return self
        square = self.own.diagonal()
        own = square[:, None] + square - 2 * self.own
        others = self.squares[:, None] + square - 2 * self.others
        scale = -2 * own.mean()
        own, others = torch.exp(own / scale), torch.exp(others / scale)
        return Kernel.centered(own, others, torch.ones_like(self.squares), self.columns)

    def predictions(self, targets: Tensor, rules: Sequence[Rule]) -> Tensor:
        """Predictions [rules, M, C] by each rule, with an intercept, for targets [n, C], one-hot for a discriminant.

        As the smallest ridge is far above the rounding of float64, the systems are solved directly.
        """
        from scipy.linalg import cho_factor, cho_solve  # a quarter of the time of torch's

        mean, size = targets.mean(0), self.own.diagonal().mean()
        if not self.columns:
            return mean.expand(len(rules), len(self.others), -1)

        @cache
        def solved(ridge: float) -> tuple[Tensor, Tensor]:
            system = self.own.clone()
            system.diagonal().add_(ridge * size)
            factor = cho_factor(system.numpy(), lower=True, overwrite_a=True, check_finite=False)
            dual = torch.from_numpy(cho_solve(factor, (targets - mean).numpy(), check_finite=False))
            return dual, self.others @ dual

        def predicted(rule: Rule) -> Tensor:
            dual, centered = solved(rule.ridge)
            if not rule.discriminant:
                return centered + mean
            return discriminants(centered, targets, dual * rule.ridge * size)

        return torch.stack([predicted(rule) for rule in rules])


def discriminants(predictions: Tensor, targets: Tensor, residuals: Tensor) -> Tensor:
    """Linear discriminants [M, C] with a ridge in the scatter within classes, from a ridge regression on the classes.

    `predictions` [M, C] and `residuals` [n, C] are those of the regression on centered one-hot `targets` [n, C].

    With A = X^T Y and T = X^T X + ridge, the scatter within classes is W = T - A N^-1 A^T, where N = Y^T Y holds the
    classes' sizes. As f(x) = x^T T^-1 A are the regression's predictions, x^T W^-1 A N^-1 = f(x) (N - A^T T^-1 A)^-1 by
    Woodbury's identity: one C x C matrix makes discriminants of them (Hastie, Buja and Tibshirani, Penalized
    discriminant analysis, Annals of Statistics 1995). A class without training rows is the least likely one.
    """
    sizes = targets.sum(0)
    if not (known := sizes > 0).all():
        scores = discriminants(predictions[:, known], targets[:, known], residuals[:, known])
        found = scores.amin(1, keepdim=True).repeat(1, len(known))
        found[:, known] = scores
        return found
    inverse = torch.linalg.inv(targets.T @ residuals + sizes[:, None] * sizes / len(targets))
    inverse = (inverse + inverse.T) / 2
    own = (inverse.diagonal() - 1 / sizes) / 2
    return len(targets) * (predictions @ inverse - own) + sizes.log()


def probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    """Those of classes [rules, M, C], from scores, as sharp as suits the `labels` [V] of the first V rows best.

    The scores' deviation is that of these V rows, too: other rows choose nothing.
    """
    deviation = scores[:, : len(labels)].std((1, 2), keepdim=True)
    scaled = scores / deviation.where(deviation > 0, 1.0)
    own = scaled[:, : len(labels)].permute(2, 0, 1).contiguous()  # sums over classes that lie apart are faster
    above = own - own.gather(0, labels.expand(1, *own.shape[1:]))  # the right class

    def loss(place: Tensor) -> Tensor:
        return torch.logsumexp(above * SHARPNESS[place][:, None], 0).mean(1)

    low, high = (torch.full((len(scores),), place) for place in (0, len(SHARPNESS) - 1))
    while (low < high).any():  # the loss is convex: it falls up to the best place, and nowhere behind it
        middle = (low + high) // 2
        after = (middle + 1).clamp(max=len(SHARPNESS) - 1)
        falls = loss(after) < loss(middle)
        low, high = after.where(falls, low), high.where(falls, middle)
    return torch.softmax(scaled * SHARPNESS[low][:, None, None], 2)


def _mean(views: Tensor, root: bool) -> Tensor:
    """Columns [N, D] or the mean of one or two views [views, N, D], in float64; with `root` its signed square roots."""
    first, *more = views if views.ndim == 3 else [views]
    mean = first.to(torch.float64, copy=True)
    for other in more:
        mean.add_(other).mul_(0.5)
    return mean.sign().mul_(mean.abs_().sqrt_()) if root else mean


def _gram(x: Tensor) -> Tensor:
    """Inner products [n, n] of rows [n, D] in float64: by one thread or two on the CPU, half of them are computed."""
    if x.device.type != "cpu" or not x.numel() or torch.get_num_threads() > 2:  # SciPy has one thread
        return x @ x.T
    from scipy.linalg.blas import dsyrk

    half = torch.from_numpy(dsyrk(1.0, x.numpy().T, trans=1)).mT  # the lower one, row by row
    return half.tril_().add_(half.tril(-1).mT)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation [D] of columns [N, D], part by part: a third of the time of torch's variance."""
    mean, scale = x.mean(0), power_of_two(x)
    squares = sum(((part - mean) / scale).square_().sum(0) for part in x.split(64))
    return mean, (squares / len(x)).sqrt() * scale
