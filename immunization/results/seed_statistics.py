"""Spread of a measure over seeds, and whether two methods differ: means, intervals and paired tests.

scipy.stats is loaded where it is needed: it takes as long as all else at the end of a multirun of one seed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

LEVEL = 0.95
"""Confidence of the intervals; tests are significant below 1 - LEVEL."""

PERMUTATIONS = 9999
"""Random permutations behind a p-value, which is at least the reciprocal of their number."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1; NaN for one value), bootstrap interval of the mean and number of values."""

    mean: float
    std: float
    low: float
    high: float
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """`values` [n] (one a seed) as a Summary; NaN without values.

    The interval is the percentile bootstrap's; it needs three values and is NaN below. It is narrow for few of them:
    of 5 values it covers the mean of a normal distribution in about 80 % of all cases.
    """
    x = np.asarray(values, dtype=float)
    if x.size == 0:
        return Summary(math.nan, math.nan, math.nan, math.nan, 0)
    low = high = math.nan
    if x.size >= 3:
        from scipy import stats

        interval = stats.bootstrap((x,), np.mean, method="percentile", confidence_level=LEVEL, rng=0, n_resamples=2000)
        low, high = interval.confidence_interval
    return Summary(float(x.mean()), float(x.std(ddof=1)) if x.size > 1 else math.nan, float(low), float(high), x.size)


def paired_p(a: Mapping[object, float], b: Mapping[object, float]) -> float:
    """Two-sided p-value of a paired t-test of `a` against `b` on the keys (seed, pair of classes) that both have.

    Of positive measures the logarithms are compared, because ratios spread by factors. NaN below three common keys.
    """
    keys = [key for key in a if key in b]
    x, y = (np.array([values[key] for key in keys], dtype=float) for values in (a, b))
    if len(keys) < 3:
        return math.nan
    if min(x.min(), y.min()) > 0:
        x, y = np.log(x), np.log(y)
    difference = x - y
    if np.ptp(difference) <= 1e-12 * np.abs(x).max():  # a test of constant differences divides by zero
        return 1.0 if abs(difference[0]) <= 1e-12 * np.abs(x).max() else 0.0
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(stats.ttest_1samp(difference, 0.0).pvalue)


def rank_correlation(x: Mapping[tuple[str, str], float], y: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Spearman's rho of two measures of ordered pairs of classes, and its two-sided p-value; NaN below three pairs.

    Pairs that share a class are not independent. Where all pairs of the classes are there, p therefore comes from
    PERMUTATIONS random permutations of the classes, each of which moves all their pairs (the quadratic assignment
    procedure; Krackhardt, 1988); else it is the one for independent pairs, which is too small.
    """
    keys = [key for key in x if key in y]
    if len(keys) < 3:
        return math.nan, math.nan
    from scipy import stats

    a, b = (stats.rankdata([values[key] for key in keys]) for values in (x, y))
    a, b = ((ranks - ranks.mean()) / max(np.linalg.norm(ranks - ranks.mean()), 1e-300) for ranks in (a, b))
    rho = float(a @ b)
    classes = sorted({name for key in keys for name in key})
    if len(keys) < len(classes) * (len(classes) - 1):
        return rho, float(stats.spearmanr([x[key] for key in keys], [y[key] for key in keys]).pvalue)
    first, second = np.array([[classes.index(name) for name in key] for key in keys]).T
    matrix = np.zeros((len(classes), len(classes)))
    matrix[first, second] = a
    permuted = np.random.default_rng(0).permuted(np.tile(np.arange(len(classes)), (PERMUTATIONS, 1)), axis=1)
    others = matrix[permuted[:, first], permuted[:, second]] @ b
    return rho, float((1 + (np.abs(others) >= abs(rho) - 1e-12).sum()) / (1 + PERMUTATIONS))


def ties(values: Mapping[T, Mapping[object, float]], best: T) -> set[T]:
    """The names whose values do not differ significantly from those of `best`, itself included.

    Paired t-tests against `best`, corrected for their number by Holm's method.
    """
    p = {name: paired_p(values[best], values[name]) for name in values if name != best}
    tested = sorted((name for name in p if not math.isnan(p[name])), key=p.__getitem__)
    different: set[T] = set()
    for rank, name in enumerate(tested):
        if p[name] > (1 - LEVEL) / (len(tested) - rank):
            break
        different.add(name)
    return {best} | (set(tested) - different)
