"""Subspaces that the singular values of a linear map set apart, and what they tell about a task."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from immunization.theory import spectrum
from immunization.theory.probe import ridge_weights

ALIKE = 1e-6
"""Relative difference of singular values up to which they are alike: rounding says which directions they belong to."""

WHITENED = 1e-3
"""Share of the largest singular value of rows below which they are not whitened."""

NEAR = 3
"""Nearest rows among which rows have to be of each other to be near."""

DIRECTIONS = 20
"""Random directions of a subspace that its AUC is the mean of."""


def singled_out(theta: Tensor, most: int) -> list[Tensor]:
    """Orthonormal bases [D, k] of the subspaces of features that a map theta [D, E] sets apart, widest gap first.

    Features are X theta. A subspace has the left singular vectors before or behind a cut of the spectrum, as many
    as `counts` has up to `most`, and any number at its widest gap. No cut is made between singular values
    that are alike, up to `ALIKE` and the rounding of theta's dtype. [] where all of them are: the map tells nothing.
    """
    u, sigma, apart = _spectrum(theta)
    count = len(sigma)
    gaps = (sigma[:-1] / sigma[1:]).log().where(apart, 0.0)
    places = {p for k in counts(most) for p in (k, count - k)} | {int(gaps.argmax()) + 1 if count > 1 else 0}
    cuts = sorted((p for p in places if 0 < p < count and apart[p - 1]), key=lambda p: -gaps[p - 1].item())
    sides = [(side, not rank) for rank, p in enumerate(cuts) for side in (u[:, p:], u[:, :p])]
    return [side for side, widest in sides if widest or side.shape[1] <= most]


def ends(theta: Tensor) -> list[Tensor]:
    """Bases [D, k] of the left singular directions with the largest singular value of theta, and with the smallest.

    All directions whose singular values are alike belong together; [] where all of them are.
    """
    u, _, apart = _spectrum(theta)
    cuts = (apart.nonzero()[:, 0] + 1).tolist()
    return [u[:, : cuts[0]], u[:, cuts[-1] :]] if cuts else []


def _spectrum(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Left singular vectors [D, k], singular values [k], and [k - 1] whether each is clearly above the next."""
    u, sigma, _ = spectrum.svd(theta.double())
    noise = len(sigma) * torch.finfo(theta.dtype).eps * sigma[0]
    return u, sigma, sigma[:-1] - sigma[1:] > ALIKE * sigma[:-1] + noise


def varying(rows: Tensor, basis: Tensor, most: int) -> list[Tensor]:
    """Bases [D, k] of the k directions inside of `basis` along which rows [N, D] vary most, k as in `singled_out`.

    The last has all directions, scaled so that the rows have variance 1 along each (but for those of nearly none).
    """
    inside = rows @ basis
    _, sigma, vh = spectrum.svd(inside - inside.mean(0))
    seen = sigma > WHITENED * sigma[0]
    whitened = basis @ vh.T[:, seen] / sigma[seen] * len(rows) ** 0.5
    return [*(basis @ vh.T[:, :k] for k in counts(most) if k < len(vh)), whitened]


def whitened_by_neighbours(rows: Tensor, basis: Tensor) -> Tensor:
    """`basis` [D, k] as [D, k], in which the scatter of near neighbours among `rows` [N, D] is nearly white.

    Rows that are among the `NEAR` nearest ones of each other, by the angle from the mean, mostly share their class, so
    that their differences stand for the scatter within classes, which is known without a label. A ridge of the mean
    variance is added. Where no rows are near each other, all differences from the mean count.
    """
    inside = rows @ basis
    centered = inside - inside.mean(0)
    near = torch.zeros(len(rows), len(rows), dtype=torch.bool, device=rows.device)
    near.scatter_(1, nearest(unit_rows(centered), NEAR)[1], True)
    one, other = (near & near.T).triu().nonzero(as_tuple=True)
    differences = inside[one] - inside[other] if len(one) else centered
    scatter = differences.T @ differences
    ridge = scatter.trace() / len(scatter)
    values, vectors = torch.linalg.eigh(scatter + ridge * torch.eye(len(scatter)).to(scatter))
    return basis @ (vectors / values.clamp(min=torch.finfo(values.dtype).tiny).sqrt())


def nearest(units: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and places [N, count] of the nearest other rows of each of `units` [N, D], rows of length 1."""
    likeness = units @ units.T
    likeness.fill_diagonal_(-torch.inf)
    cosines, places = likeness.topk(min(count, len(units) - 1))
    return cosines, places


def unit_rows(x: Tensor) -> Tensor:
    """Rows [N, D] of length 1, however short they were; rows of 0 stay."""
    return torch.nn.functional.normalize(x / spectrum.power_of_two(x), eps=torch.finfo(x.dtype).tiny)


def counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... below `most`, and `most`."""
    doubled = (k for j in range(most.bit_length()) for k in (2**j, 3 * 2**j // 2) if k < most)
    return sorted({*doubled, most})


def read_directions(
    train: Tensor, targets: Tensor, basis: Tensor | None, ridges: Sequence[float]
) -> Callable[..., Tensor]:
    """Ridge regression on `train` [..., N, D] inside of `basis` [D, k]: rows [M, D] -> predictions [..., R, M, C].

    Features and `targets` [..., N, C] are centered by the training rows; `ridges` [R] are relative to lambda_1. A
    `basis` of None are all features. Where the rows do not differ, their mean target is predicted. Of bases [B, D, k]
    predictions are [B, ..., R, M, C], or those of the one at a `place` that is given beside the rows.
    """

    def inside(rows: Tensor) -> Tensor:
        if basis is None or basis.ndim == 2:
            return rows if basis is None else rows @ basis
        return torch.stack([rows @ own for own in basis])

    inputs = inside(train)
    mean, level = inputs.mean(-2, keepdim=True), targets.mean(-2, keepdim=True)
    u, sigma, vh = spectrum.svd(inputs - mean)
    relative = torch.tensor(ridges).to(sigma) * sigma[..., :1] ** 2
    weights = ridge_weights(sigma, vh.mT, u.mT @ (targets - level), relative)
    mean, level = mean.unsqueeze(-3), level.unsqueeze(-3)  # beside the ridges

    def predict(rows: Tensor, place: int | None = None) -> Tensor:
        if basis is not None and place is not None:
            return level + (rows @ basis[place] - mean[place]) @ weights[place]
        own = inside(rows)
        own = own.reshape(*own.shape[:-2], *[1] * (mean.ndim - 3), *own.shape[-2:])
        return level + (own - mean) @ weights

    return predict


def auc(scores: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How well each of `scores` [N, K] separates a class from the others, whatever its sign, mean over classes: [K].

    The area under the ROC curve, or 1 less that: .5 for scores that tell nothing.
    """
    ranks = scores.argsort(0).argsort(0).double() + 1
    own = torch.nn.functional.one_hot(labels, classes).double()
    n = own.sum(0)[:, None]
    above = (own.T @ ranks - n * (n + 1) / 2) / (n * (len(labels) - n)).clamp(min=1)
    return torch.maximum(above, 1 - above)[n[:, 0] > 0].mean(0)


def random_directions(basis: Tensor) -> Tensor:
    """`DIRECTIONS` directions [D, K] drawn from the span of `basis` [D, k], always the same of the same span."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(basis), DIRECTIONS, generator=generator, dtype=torch.float64)
    return basis @ (basis.T @ drawn.to(basis))


def random_rotation(dim: int) -> Tensor:
    """A random orthogonal matrix [D, D] in float64, always the same."""
    drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q
