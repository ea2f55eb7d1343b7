"""Intervals, bounds and tests for paired token decisions.

Positions of one document are not independent, so intervals come twice: Wilson's, as if they were, and one from
resampling whole documents. Gates use neither: see `clusters` and `chance`. Checked against scipy and statsmodels and
by simulation in tests/verify/accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

DOCUMENTS_MIN = 10  # with fewer documents their spread is a guess, and nothing is claimed
RESAMPLES = 4000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        """False for an interval that says nothing."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def outward(self, digits: int) -> tuple[float, float]:
        """In percent, rounded away from the middle: a printed interval never claims more than it has."""
        scale = 10**digits
        return np.floor(self.low * 100 * scale) / scale, np.ceil(self.high * 100 * scale) / scale


UNKNOWN = Interval(-np.inf, np.inf)  # too little was seen to say anything


def wilson(hits: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion. [0, 1] where n is 0."""
    return _score(hits, n, NormalDist().inv_cdf(0.5 + confidence / 2))


def wilson_bounds(hits: float, n: float, confidence: float = 0.95) -> Interval:
    """The two one-sided bounds, each at `confidence`: not an interval at that confidence."""
    return _score(hits, n, NormalDist().inv_cdf(confidence))


def _score(hits: float, n: float, z: float) -> Interval:
    if n <= 0:
        return Interval(0.0, 1.0)
    p, spread = hits / n, z * z / n
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0))


def design_effect(hits: Sequence[float], sizes: Sequence[float]) -> float:
    """How much wider documents make a proportion's variance: 1 for independent positions, and never less.

    hits, sizes: agreeing and scored positions of each document. The ratio estimator's variance over the binomial one.
    """
    h, n = np.asarray(hits, np.float64), np.asarray(sizes, np.float64)
    count, total = len(h), n.sum()
    if count < DOCUMENTS_MIN or total == 0:
        return 1.0
    p = h.sum() / total
    if p in (0.0, 1.0):
        return 1.0
    between = count / (count - 1) * np.square(h - p * n).sum() / total**2
    return float(max(between / (p * (1 - p) / total), 1.0))


def resample_weights(documents: int, resamples: int, seed: int) -> Floats:
    """How often each document is drawn in each resample: f64 [resamples, documents]; rows sum to `documents`."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples).astype(np.float64)


def document_bootstrap(
    sums: Sequence[float], sizes: Sequence[float], confidence: float = 0.95, seed: int = 1
) -> Interval:
    """Interval of sum(sums)/sum(sizes) from resampling documents; infinite with fewer than DOCUMENTS_MIN."""
    columns = np.asarray(sums, np.float64)[:, None]
    if len(columns) < DOCUMENTS_MIN:
        return UNKNOWN
    weights = resample_weights(len(columns), RESAMPLES, seed)
    low, high = bca(columns, np.asarray(sizes, np.float64), weights, confidence)
    return Interval(float(low[0]), float(high[0]))


def bca(sums: Floats, sizes: Floats, weights: Floats, confidence: float) -> tuple[Floats, Floats]:
    """Bias-corrected and accelerated bootstrap (Efron 1987) of sum(sums)/sum(sizes), its tails expanded for few
    documents (Hesterberg 2015): plain percentiles of skewed rates near 1 cover too little.

    sums: f64 [documents, samples]; sizes: f64 [documents]; weights: f64 [resamples, documents]. Returns two [samples].
    """
    from scipy.special import ndtr, ndtri

    total = sizes.sum()
    estimate = sums.sum(axis=0) / total
    ratios = np.sort((weights @ sums) / np.maximum(weights @ sizes, 1e-300)[:, None], axis=0)
    below = ((ratios < estimate).mean(axis=0) + (ratios <= estimate).mean(axis=0)) / 2
    bias = ndtri(np.clip(below, 1e-9, 1 - 1e-9))
    left_out = (sums.sum(axis=0) - sums) / (total - sizes)[:, None]
    gaps = left_out.mean(axis=0) - left_out
    squares = np.square(gaps).sum(axis=0)
    acceleration = np.power(gaps, 3).sum(axis=0) / np.maximum(6 * squares**1.5, 1e-300)
    tail = ndtri(expanded_tail(len(sizes), confidence))
    rows = np.arange(sums.shape[1])
    ends = []
    for z in (tail, -tail):
        place = ndtr(bias + (bias + z) / (1 - acceleration * (bias + z)))
        ends.append(ratios[np.clip(place * (len(ratios) - 1), 0, len(ratios) - 1).astype(int), rows])
    return ends[0], ends[1]


def expanded_tail(documents: int, confidence: float) -> float:
    """The lower tail's probability, widened to what Student's t asks for with this many documents."""
    from scipy.stats import t

    quantile = float(t.ppf(0.5 + confidence / 2, documents - 1)) * sqrt(documents / (documents - 1))
    return NormalDist().cdf(-quantile)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: positions that only one of two variants got right."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(comb(n, i) for i in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**n))


def positions_to_decide(
    rate: float, floor: float, confidence: float = 0.95, effect: float = 1.0
) -> int | None:
    """The least number of positions at which the observed rate would pass or fail the floor; None if it is the floor.

    Wilson's bound reaches the floor exactly where the score test does, so this is no approximation.
    """
    if rate == floor:
        return None
    z = NormalDist().inv_cdf(confidence)
    return ceil(effect * z * z * floor * (1 - floor) / (rate - floor) ** 2)


def positions_to_pass(
    truth: float, floor: float, power: float, confidence: float = 0.95, effect: float = 1.0
) -> int:
    """Positions with which a server whose true rate is `truth` passes the floor with probability `power`.

    Raises ValueError where the truth is not above the floor: no number passes then.
    """
    if truth <= floor:
        raise ValueError(f"a true rate of {truth:g} never passes a floor of {floor:g}")
    normal = NormalDist()
    null, alternative = sqrt(floor * (1 - floor)), sqrt(truth * (1 - truth))
    need = normal.inv_cdf(confidence) * null + normal.inv_cdf(power) * alternative
    return ceil(effect * (need / (truth - floor)) ** 2)
