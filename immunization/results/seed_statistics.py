"""Spread of a measure over seeds, and whether two methods differ: means, intervals and paired tests.

Values are Series by seed and pair of classes. scipy is loaded where it is needed: scipy.stats takes as long as all else
at the end of a multirun of one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

LEVEL = 0.95
"""Confidence of the intervals; tests are significant below 1 - LEVEL."""
ENOUGH = 5
"""Seeds that a paired test needs: with fewer, it tells hardly any two methods apart."""
ROUNDING = 1e-9
"""Values that agree but for such a share are the same."""
PERMUTATIONS = 9999
"""Random permutations behind a p-value, which is at least the reciprocal of their number."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1; NaN for one value), interval of the mean and number of values."""

    mean: float
    std: float
    low: float
    high: float
    n: int


def summarize(values: Sequence[float] | pd.Series) -> Summary:
    """`values` [n] (one per seed) as a Summary; NaN without values.

    The interval is Student's, which supposes a normal distribution; it needs three values and is NaN below.
    """
    x = np.asarray(values, dtype=float)
    if x.size < 2:
        return Summary(float(x[0]) if x.size else math.nan, math.nan, math.nan, math.nan, x.size)
    mean, std, half = float(x.mean()), float(x.std(ddof=1)), math.nan
    std = std if std > ROUNDING * abs(mean) else 0.0
    if x.size >= 3:
        from scipy.special import stdtrit

        half = float(stdtrit(x.size - 1, (1 + LEVEL) / 2)) * std / math.sqrt(x.size)
    return Summary(mean, std, mean - half, mean + half, x.size)


def _both(a: pd.Series, b: pd.Series) -> pd.DataFrame:
    """The values of the keys that both have."""
    return a.to_frame("a").join(b.rename("b"), how="inner")


def paired_p(a: pd.Series, b: pd.Series) -> float:
    """Two-sided p-value of a paired t-test of `a` against `b` on the keys (seed, pair of classes) that both have.

    Differences are averaged over the pairs of each seed, since those of one seed are not independent. Positive measures
    are compared by their logarithms, because ratios spread by factors. The p-value is 1 for values that only rounding
    tells apart, and where logarithms and values disagree on which are larger, and NaN for others of fewer than ENOUGH
    seeds.
    """
    both = _both(a, b)
    x, y = both.a, both.b
    if len(both) and np.allclose(x, y, rtol=ROUNDING, atol=0):
        return 1.0
    if both.index.get_level_values(0).nunique() < ENOUGH:
        return math.nan
    larger = x.mean() > y.mean()
    if both.min(axis=None) > 0:
        x, y = np.log(x), np.log(y)
    difference = summarize((x - y).groupby(level=0).mean())
    if (difference.mean > 0) != larger:
        return 1.0
    if not difference.std:  # they differ by one and the same number, or factor
        return 0.0 if difference.mean else 1.0
    from scipy.special import stdtr

    t = difference.mean / difference.std * math.sqrt(difference.n)
    return 2 * float(stdtr(difference.n - 1, -abs(t)))


def paired_ratio(a: pd.Series, b: pd.Series) -> Summary | None:
    """Geometric mean of a / b over the keys (seed, pair of classes) that both have, with its interval over seeds.

    None for fewer than three seeds, and for values that are not all positive and finite.
    """
    both = _both(a, b)
    if not ((both > 0) & np.isfinite(both)).all(axis=None):
        return None
    logs = np.log(both.a / both.b).groupby(level=0).mean()
    if len(logs) < 3:
        return None
    summary = summarize(logs)
    return replace(summary, mean=math.exp(summary.mean), low=math.exp(summary.low), high=math.exp(summary.high))


def rank_correlation(x: pd.Series, y: pd.Series) -> tuple[float, float]:
    """Spearman's rho of two measures of ordered pairs of classes, and its two-sided p-value; NaN below three pairs.

    Pairs that share a class are not independent. Where all pairs of the classes are there, p therefore comes from
    PERMUTATIONS random permutations of the classes, each of which moves all their pairs (the quadratic assignment
    procedure; Krackhardt, 1988); else it is the one for independent pairs, which is too small.
    """
    if min(len(x), len(y)) < 3 or len(both := _both(x, y)) < 3:
        return math.nan, math.nan
    from scipy import stats

    a, b = (stats.rankdata(both[name]) for name in ("a", "b"))
    a, b = ((ranks - ranks.mean()) / max(np.linalg.norm(ranks - ranks.mean()), 1e-300) for ranks in (a, b))
    rho = float(a @ b)
    classes = sorted({name for pair in both.index for name in pair})
    if len(both) < len(classes) * (len(classes) - 1):
        return rho, float(stats.spearmanr(both.a, both.b).pvalue)
    first, second = np.array([[classes.index(name) for name in pair] for pair in both.index]).T
    matrix = np.zeros((len(classes), len(classes)))
    matrix[first, second] = a
    permuted = np.random.default_rng(0).permuted(np.tile(np.arange(len(classes)), (PERMUTATIONS, 1)), axis=1)
    others = matrix[permuted[:, first], permuted[:, second]] @ b
    return rho, float((1 + (np.abs(others) >= abs(rho) - 1e-12).sum()) / (1 + PERMUTATIONS))


def ties(values: Mapping[T, pd.Series], ranked: Sequence[T]) -> set[T]:
    """The first of `ranked`, best first, and those behind it up to the first that is told from it.

    Paired t-tests against the first, corrected for their number by Holm's method; what cannot be tested is told from it
    too. None behind one that is worse than the best can be as good as the best: its values only spread more.
    """
    best, *others = ranked
    p = {name: paired_p(values[best], values[name]) for name in others}
    tested = sorted((name for name in others if not math.isnan(p[name])), key=p.__getitem__)
    significant = takewhile(lambda i: p[tested[i]] <= (1 - LEVEL) / (len(tested) - i), range(len(tested)))
    alike = set(tested[len(list(significant)) :])
    return {best, *takewhile(alike.__contains__, others)}
