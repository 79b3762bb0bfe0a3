"""Ridge regression and discriminant analysis on kernels of standardized columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from immunization.theory.spectrum import power_of_two

Solved = tuple[Tensor, Tensor]
"""Regressions of mean 0: their dual weights [..., n, C] and ridges [...]."""

NOISE = 10 * torch.finfo(torch.float32).eps
"""Deviation of a column, relative to its largest value, below which it holds nothing but rounding."""

PART, NARROWEST = 2**17, 512
"""Numbers that the CPU standardizes at a time, as many as its cache holds, and the fewest columns."""

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
        n, m, device = train.shape[-2], sum(x.shape[-2] for x in others), train.device
        new = partial(torch.zeros, dtype=torch.float64, device=device)
        own, between, squares = new(n, n), new(m, n), new(m)
        count = 0
        for x, rest, alive in standardized(train, *others, root=root):
            _add_products(own, x, x)
            _add_products(between, rest, x)
            squares += torch.linalg.vector_norm(rest, dim=1).square()
            count += alive
        own = own.tril_().add_(own.tril(-1).mT)  # the other half may not have been computed
        return cls(own.cpu(), between.cpu(), squares.cpu(), count)

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

    def solved(self, targets: Tensor, ridges: Sequence[float]) -> Solved:
        """Regressions on targets [n, C] by each ridge, with an intercept.

        As the smallest ridge is far above the rounding of float64, the systems are solved directly.
        """
        from scipy.linalg.lapack import dpotrf, dpotrs  # a quarter of the time of torch's

        centered = (targets - targets.mean(0)).T.contiguous().numpy().T
        damping = torch.tensor(ridges, dtype=torch.float64) * self.own.diagonal().mean()
        duals = []
        for ridge in damping:
            system = self.own.clone()
            system.diagonal().add_(ridge)
            factor, failed = dpotrf(system.numpy().T, lower=False, overwrite_a=True, clean=False)
            if failed:
                raise np.linalg.LinAlgError(f"the kernel with its ridge is not positive definite ({failed})")
            duals.append(torch.from_numpy(dpotrs(factor, centered)[0]))
        return torch.stack(duals), damping

    def predictions(self, targets: Tensor, rules: Sequence[Rule]) -> tuple[Tensor, list[Solved]]:
        """Predictions [rules, M, C] for targets [n, C], one-hot for a discriminant, and each rule's regression."""
        if not self.columns:
            return targets.mean(0).expand(len(rules), len(self.others), -1), []
        ridges = list(dict.fromkeys(rule.ridge for rule in rules))
        dual, damping = solved = self.solved(targets, ridges)
        found = torch.einsum("mn,rnc->rmc", self.others, dual)
        made = {kind: predicted_by(kind, found, targets, solved) for kind in {rule.discriminant for rule in rules}}
        places = [ridges.index(rule.ridge) for rule in rules]
        predicted = torch.stack([made[rule.discriminant][place] for rule, place in zip(rules, places, strict=True)])
        return predicted, [(dual[place], damping[place]) for place in places]

    def nbytes(self) -> int:
        return self.own.nbytes + self.others.nbytes + self.squares.nbytes


def regression_of(train: Tensor, *others: Tensor, duals: Tensor, root: bool) -> Tensor:
    """Inner products of other rows with training rows, as `Kernel.of` has them, times `duals` [n, C]: [M, C].

    By the weights of columns, which costs less than the products where C is below n.
    """
    dual, rows = duals.to(train.device), sum(x.shape[-2] for x in others)
    total = dual.new_zeros(rows, dual.shape[1])
    for own, rest, _ in standardized(train, *others, root=root):
        total += rest @ (own.T @ dual)
    return total.cpu()


def standardized(train: Tensor, *others: Tensor, root: bool = False) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Some columns at a time of what `Kernel.of` takes, [n, d] of mean 0 and deviation 1, and [M, d] of other rows.

    And how many of them vary: the others are 0.
    """
    sizes, (n, columns), device = [x.shape[-2] for x in others], train.shape[-2:], train.device
    width = max(NARROWEST, PART // max(1, n + sum(sizes))) if device.type == "cpu" else max(1, columns)
    for begin in range(0, columns, width):
        own, *views = (x[..., begin : begin + width] for x in (train, *others))
        own, rest = _mean(own), torch.cat([_mean(x) for x in views])
        mean, deviation = _moments(own)
        alive = deviation > NOISE * torch.maximum(own.amax(0), -own.amin(0))
        if root:
            own, rest = (_signed_root(x) for x in (own, rest))
            mean, deviation = _moments(own)
        for x in (own, rest):
            x.sub_(mean).div_(deviation)
            if not alive.all():
                x.masked_fill_(~alive, 0.0)  # also where they are not finite
        yield own, rest, int(alive.sum())


def predicted_by(discriminant: bool, regressions: Tensor, targets: Tensor, solved: Solved) -> Tensor:
    """Predictions [..., M, C] from those of regressions on targets [n, C], of mean 0."""
    dual, ridge = solved
    if not discriminant:
        return regressions + targets.mean(0)
    return discriminants(regressions, targets, dual * ridge[..., None, None])


def discriminants(predictions: Tensor, targets: Tensor, residuals: Tensor) -> Tensor:
    """Linear discriminants [..., M, C] with a ridge in the scatter within classes, from ridge regressions on classes.

    `predictions` [..., M, C] and `residuals` [..., n, C] are those of regressions on centered one-hot `targets` [n, C].

    With A = X^T Y and T = X^T X + ridge, the scatter within classes is W = T - A N^-1 A^T, where N = Y^T Y holds the
    classes' sizes. As f(x) = x^T T^-1 A are the regression's predictions, x^T W^-1 A N^-1 = f(x) (N - A^T T^-1 A)^-1 by
    Woodbury's identity: one C x C matrix makes discriminants of them (Hastie, Buja and Tibshirani, Penalized
    discriminant analysis, Annals of Statistics 1995). A class without training rows is the least likely one.
    """
    sizes = targets.sum(0)
    if not (known := sizes > 0).all():
        scores = discriminants(predictions[..., known], targets[:, known], residuals[..., known])
        found = scores.amin(-1, keepdim=True).repeat(*[1] * (scores.ndim - 1), len(known))
        found[..., known] = scores
        return found
    inverse = torch.linalg.inv(targets.T @ residuals + sizes[:, None] * sizes / len(targets))
    inverse = (inverse + inverse.mT) / 2
    own = (inverse.diagonal(dim1=-2, dim2=-1) - 1 / sizes) / 2
    return len(targets) * (predictions @ inverse - own[..., None, :]) + sizes.log()


def probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    """Those of classes [rules, M, C], from scores, as sharp as suits the `labels` [V] of the first V rows best.

    The scores' deviation is that of these V rows, too: other rows choose nothing.
    """
    deviation = scores[:, : len(labels)].std((1, 2), keepdim=True)
    scaled = scores / deviation.where(deviation > 0, 1.0)
    own = scaled[:, : len(labels)].permute(2, 0, 1).contiguous()  # sums over classes that lie apart are faster
    above = own - own.gather(0, labels.expand(1, *own.shape[1:]))  # the right class
    at_once = SHARPNESS.split(max(1, PART // max(1, above.numel())))
    losses = torch.cat([torch.logsumexp(above[:, None] * s[:, None, None], 0).mean(2) for s in at_once])
    low, high = (torch.full((1, len(scores)), place) for place in (0, len(SHARPNESS) - 1))
    while (low < high).any():  # the loss is convex: it falls up to the best place, and nowhere behind it
        middle = (low + high) // 2
        after = (middle + 1).clamp(max=len(SHARPNESS) - 1)
        falls = losses.gather(0, after) < losses.gather(0, middle)
        low, high = after.where(falls, low), high.where(falls, middle)
    return torch.softmax(scaled * SHARPNESS[low[0]][:, None, None], 2)


def _signed_root(x: Tensor) -> Tensor:
    size = x.abs()
    if size.device.type == "cpu":
        np.sqrt(size.numpy(), out=size.numpy())  # torch's takes twice as long
    else:
        size.sqrt_()
    return size.copysign_(x)


def _mean(views: Tensor) -> Tensor:
    """Columns [N, D] or the mean of one or two views [views, N, D], in float64."""
    first, *more = views if views.ndim == 3 else [views]
    mean = first.to(torch.float64, copy=True)
    for other in more:
        mean.add_(other).mul_(0.5)
    return mean


def _add_products(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x y^T to `total` [N, M] in float64. Where y is x, one or two threads of a CPU may compute the lower half."""
    if x.device.type != "cpu" or not total.numel() or torch.get_num_threads() > 2:  # SciPy has one thread
        total.addmm_(x, y.T)
        return
    from scipy.linalg.blas import dgemm, dsyrk  # twice as fast as torch's for few rows

    a, b, c = (z.numpy().T for z in (y, x, total))
    if x is y:
        dsyrk(1.0, a, 1.0, c, trans=1, overwrite_c=1)
    else:
        dgemm(1.0, a, b, 1.0, c, trans_a=1, overwrite_c=1)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation [D] of columns [N, D], part by part: a third of the time of torch's variance."""
    mean, scale = x.mean(0), power_of_two(x)
    squares = sum(((part - mean) / scale).square_().sum(0) for part in x.split(64))
    return mean, (squares / len(x)).sqrt() * scale
