"""Bounds that hold with few documents: positions of one document are alike, so documents are what is counted.

Variances are cluster-robust with Bell and McCaffrey's correction (CR2), quantiles are Student's with Satterthwaite's
degrees of freedom. A proportion's bounds are Clopper and Pearson's at the effective number of positions (Korn and
Graubard 1998). A mean of values that are never negative takes a log-normal bound too (Zou, Taleban and Huo 2009):
the few documents seen hardly ever hold the one that makes the mean. What these cover is measured by
tests/verify/accept/coverage.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.accept.stats import DOCUMENTS_MIN, UNKNOWN, Interval

# A signed mean is judged as if one more document lay this many times as far out as the furthest seen.
FURTHER = 2.0
# A document's mean counts as at least this share of the overall mean where logarithms are taken.
LOG_FLOOR = 0.02
RESERVE = 0.9  # of the tail that a mean's bounds may miss; the rest is for documents that no model fits

Floats = NDArray[np.float64]


def standard_error(sums: Floats, sizes: Floats) -> float:
    """CR2 standard error of sum(sums)/sum(sizes), documents drawn independently. sums, sizes: f64 [documents]."""
    total = sizes.sum()
    residuals = sums - sums.sum() / total * sizes
    return float(sqrt((np.square(residuals) / (1 - sizes / total)).sum()) / total)


def freedom(sizes: Floats) -> float:
    """Satterthwaite's degrees of freedom of that error: documents - 1 for equal sizes, fewer for unequal ones.

    The smaller of the two for independent and for wholly alike positions. sizes: f64 [documents].
    """
    return _freedom(tuple(sizes.tolist()))


@lru_cache(maxsize=64)
def _freedom(sizes_of: tuple[float, ...]) -> float:
    sizes = np.asarray(sizes_of)
    total, count = sizes.sum(), len(sizes)
    residual = np.eye(count) - np.outer(sizes, np.ones(count)) / total
    form = residual.T @ (residual / (1 - sizes / total)[:, None])
    found = []
    for variance in (sizes, np.square(sizes)):
        product = form * variance
        found.append(np.trace(product) ** 2 / np.trace(product @ product))
    return float(min(found))


def proportion_bounds(hits: Floats, sizes: Floats, confidence: float, effect: float = 1.0) -> Interval:
    """Two one-sided bounds of a proportion, each at `confidence`.

    hits, sizes: f64 [documents]. effect: the least design effect to assume.
    """
    from scipy.special import betaincinv

    n = effective_positions(hits, sizes, confidence, effect)
    x = hits.sum() / sizes.sum() * n
    low = float(betaincinv(x, n - x + 1, 1 - confidence)) if x > 0 else 0.0
    high = float(betaincinv(x + 1, n - x, confidence)) if x < n else 1.0
    return Interval(low, high)


def effective_positions(hits: Floats, sizes: Floats, confidence: float, effect: float = 1.0) -> float:
    """Independent positions that would say as much, Student's wider tail taken off too."""
    total = sizes.sum()
    p = hits.sum() / total
    t, z = _student(freedom(sizes), confidence), NormalDist().inv_cdf(confidence)
    binomial = p * (1 - p) / total
    if binomial > 0:
        effect = max(standard_error(hits, sizes) ** 2 / binomial, effect)
    return float(total / effect * (z / t) ** 2)


def mean_bounds(
    sums: Sequence[float], sizes: Sequence[float], confidence: float = 0.95, positive: bool = False
) -> Interval:
    """Two one-sided bounds of sum(sums)/sum(sizes), each at `confidence`; infinite below DOCUMENTS_MIN documents.

    positive: no value is below 0, so a few documents may hold most of it (a divergence).
    """
    y, m = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    if len(y) < DOCUMENTS_MIN:
        return UNKNOWN
    if not y.any():
        return Interval(0.0, 0.0)
    kept = 1 - (1 - confidence) * RESERVE
    return _positive_bounds(y, m, kept) if positive else _signed_bounds(y, m, kept)


def _signed_bounds(sums: Floats, sizes: Floats, confidence: float) -> Interval:
    """Student's, with one further document put on the side where the bound is: a rare bad one may not be drawn."""
    mean = sums.sum() / sizes.sum()
    size = sizes.mean()
    distances = sums / sizes - mean
    ends = []
    for side, furthest in ((-1, distances.min()), (1, distances.max())):
        y = np.append(sums, (mean + FURTHER * furthest) * size)
        m = np.append(sizes, size)
        t = _student(freedom(m), confidence)
        ends.append(float(y.sum() / m.sum() + side * t * standard_error(y, m)))
    return Interval(*ends)


def _positive_bounds(sums: Floats, sizes: Floats, confidence: float) -> Interval:
    """The outer ones of Student's bounds and of those for log-normal documents."""
    from scipy.special import chdtri

    mean, weights = sums.sum() / sizes.sum(), sizes / sizes.sum()
    half = _student(freedom(sizes), confidence) * standard_error(sums, sizes)
    count = 1 / np.square(weights).sum()
    logs = np.log(np.maximum(sums / sizes / mean, LOG_FLOOR))
    middle = (weights * logs).sum()
    spread = (weights * np.square(logs - middle)).sum() * count / (count - 1)
    from_mean = (_student(count - 1, confidence) ** 2) * spread / count
    high, low = (
        abs((count - 1) / float(chdtri(count - 1, 1 - tail)) - 1) for tail in (1 - confidence, confidence)
    )
    top = middle + spread / 2 + sqrt(from_mean + (high * spread) ** 2 / 4)
    bottom = middle + spread / 2 - sqrt(from_mean + (low * spread) ** 2 / 4)
    return Interval(
        max(min(mean - half, mean * exp(min(bottom, 700.0))), 0.0),
        max(mean + half, mean * exp(min(top, 700.0))),
    )


@lru_cache(maxsize=64)
def _student(degrees: float, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, confidence))


def median_bounds(values: Sequence[float], confidence: float) -> Interval:
    """Two one-sided bounds of a median from order statistics (the sign test); infinite where there are too few."""
    from scipy.special import bdtr

    ordered, count = sorted(values), len(values)
    left_out = next(k for k in range(count + 1) if bdtr(k, count, 0.5) > 1 - confidence)
    return Interval(ordered[left_out - 1], ordered[-left_out]) if left_out else UNKNOWN
