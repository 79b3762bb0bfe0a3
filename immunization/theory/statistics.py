"""Confidence of held-out measures: Wilson's interval, and 95 % intervals over resampled rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEVEL = 0.95
"""Of all intervals."""
ROUNDING = 1e-12
"""What a measure may fall short of a bar by."""
Z = 1.959964
"""Of a normal distribution, 95 % lie within so many standard deviations."""
RESAMPLES = 1000
TAIL = 0.025
BLOCK = 2**22
"""Counts held at once."""
FLAT = 1e-9
"""Share of the variance of targets below which a resample has none."""


def interval(share: float, rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a probability of which `rows` independent trials show `share`."""
    middle = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z / (1 + Z**2 / rows) * math.sqrt(share * (1 - share) / rows + (Z / (2 * rows)) ** 2)
    return min(max(0.0, middle - half), share), max(min(1.0, middle + half), share)  # not past it by rounding


def resamples(rows: int) -> Iterator[Tensor]:
    """How often each of `rows` rows is drawn, [B, rows] in blocks of resamples, the same ones at every call."""
    generator = np.random.default_rng(0)  # anybody can draw them again
    for some in torch.arange(RESAMPLES).split(max(1, BLOCK // rows)):
        drawn = torch.from_numpy(generator.integers(rows, size=(len(some), rows)))
        counts = torch.zeros(len(some), rows, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))


def varies(y: Tensor, counts: Tensor) -> Tensor:
    """Whether targets y [N] vary on each resample, [B]: else they have no R^2."""
    return _variance(y, counts) > FLAT * y.var(correction=0)


def resampled(scores: Tensor, y: Tensor, counts: Tensor, classes: int) -> Tensor:
    """Accuracy, or R^2 without `classes`, on each resample, [B, T], of the scores [T, N] of rows with targets y [N]."""
    counts = counts.to(scores)
    if classes:
        return counts @ scores.T / len(y)
    spread = _variance(y, counts).clamp(min=torch.finfo(y.dtype).tiny)
    errors = (1 - scores) * (y - y.mean()).square().mean()
    return 1 - counts @ errors.T / len(y) / spread[:, None]


def _variance(y: Tensor, counts: Tensor) -> Tensor:
    y = y - y.mean()
    return counts @ y.square() / len(y) - (counts @ y / len(y)).square()


def ends(values: Tensor) -> tuple[float, float]:
    """Ends of the 95 % interval of resampled values [B]; each is one of the values."""
    ordered, outside = values.sort().values, int(TAIL * len(values))
    return ordered[outside].item(), ordered[-1 - outside].item()


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def estimate(scores: Tensor) -> Estimate:
    """Mean of [draws, N] with an interval for rows and draws that are both random, the draws of the images at hand.

    Its variance is that of a layout of two crossed random factors without replication, with Satterthwaite's degrees of
    freedom for Student's t: a bootstrap of two or three draws would be too narrow. One row alone says nothing; of rows
    that all agree on something else than 0, as if one more did not.
    """
    from scipy.special import stdtrit

    draws, rows = scores.shape
    if rows < 2:
        return Estimate(scores.mean().item(), -math.inf, math.inf)
    mean, by_row, by_draw = scores.mean(), scores.mean(0), scores.mean(1, keepdim=True)
    terms, twice = [(by_row.var().item() / rows or (mean.item() / (rows + 1)) ** 2, rows - 1)], 0.0
    if draws > 1:
        terms.append((by_draw.var().item() / draws, draws - 1))
        rest = (scores - by_row - by_draw + mean).square().sum().item() / ((draws - 1) * (rows - 1))
        twice = rest / (draws * rows)  # is in both terms
    variance = max(sum(part for part, _ in terms) - twice, terms[0][0])
    half = 0.0
    if variance > 0:
        freedom = variance**2 / sum(part**2 / df for part, df in terms)
        half = stdtrit(freedom, (1 + LEVEL) / 2) * math.sqrt(variance)
    return Estimate(mean.item(), mean.item() - half, mean.item() + half)
