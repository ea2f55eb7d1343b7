"""How often a server exactly at a limit looks as good as this one: simulated, with the documents that were asked.

With few documents no bound from their spread holds: a server whose misses sit in one document of thirty shows none in
most samples of ten. So a proportion's gate asks this too. Every correlation within documents that the counts allow
(profile likelihood of the beta-binomial, up to CORRELATION_MAX) is tried with two shapes of the documents' rates,
beta and logit-normal, and the worst chance counts. All draws are seeded: the same counts give the same chance.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, log1p

import numpy as np
from numpy.typing import NDArray

CORRELATION_MAX = 0.6
DRAWS = 2000
LIKELY = 1.353  # half the 90 % quantile of chi-square with one degree of freedom
# A further fifth is kept back for what the simulation does not know: the correlation's error and other shapes.
RESERVE = 0.8
SEED = 20

Floats = NDArray[np.float64]
CORRELATIONS = (0.0, *(float(r) for r in np.geomspace(0.002, CORRELATION_MAX, 12)))


def chance_of(hits: Floats, sizes: Floats, limit: float, above: bool) -> float:
    """The chance that a server whose true rate is `limit` shows a rate as high (above) or as low as this one's.

    hits, sizes: f64 [documents], whole numbers. limit: strictly between 0 and 1. Returns 0 to 1.
    """
    rate = hits.sum() / sizes.sum()
    likelihoods = _likelihoods(hits, sizes, limit)
    best = max(likelihoods)
    chances = [
        _tail(_rates(limit, c, shape, tuple(sizes.astype(int).tolist())), rate, above)
        for c, likelihood in zip(CORRELATIONS, likelihoods, strict=True)
        if likelihood >= best - LIKELY
        for shape in ("beta", "logit-normal")
    ]
    return max(chances)


def _tail(rates: Floats, rate: float, above: bool) -> float:
    extreme = rates >= rate - 1e-12 if above else rates <= rate + 1e-12
    return float(extreme.mean())


def _likelihoods(hits: Floats, sizes: Floats, rate: float) -> list[float]:
    """Log likelihoods of the counts under beta-binomials of this rate, for each of CORRELATIONS, up to a constant."""
    from scipy.special import gammaln

    misses = sizes - hits
    independent = float((hits * np.log(rate) + misses * log1p(-rate)).sum())
    strength = 1 / np.array(CORRELATIONS[1:])[:, None] - 1
    a, b = rate * strength, (1 - rate) * strength
    terms = gammaln(a + hits) - gammaln(a) + gammaln(b + misses) - gammaln(b)
    terms += gammaln(strength) - gammaln(strength + sizes)
    return [independent, *terms.sum(axis=1).tolist()]


@lru_cache(maxsize=512)
def _rates(limit: float, correlation: float, shape: str, sizes: tuple[int, ...]) -> Floats:
    """Overall rates f64 [DRAWS] of simulated servers whose documents' rates have this mean and correlation."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    rates = document_rates(rng, limit, correlation, shape, (DRAWS, len(sizes)))
    hits = rng.binomial(np.asarray(sizes), rates)
    return np.asarray(hits.sum(axis=1) / sum(sizes), np.float64)


def document_rates(
    rng: np.random.Generator, mean: float, correlation: float, shape: str, size: tuple[int, int]
) -> Floats:
    """True rates of documents, of a mean and an intra-document correlation (variance over mean * (1 - mean))."""
    if correlation == 0:
        return np.full(size, mean)
    if shape == "beta":
        strength = 1 / correlation - 1
        return rng.beta(mean * strength, (1 - mean) * strength, size)
    middle, spread = logit_normal(mean, correlation)
    return np.asarray(1 / (1 + np.exp(-(middle + spread * rng.normal(size=size)))), np.float64)


@lru_cache(maxsize=256)
def logit_normal(mean: float, correlation: float) -> tuple[float, float]:
    """Middle and spread of the normal whose logistic has this mean and variance correlation * mean * (1 - mean)."""
    from scipy.optimize import brentq

    nodes, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()

    def rates(middle: float, spread: float) -> Floats:
        return np.asarray(1 / (1 + np.exp(-np.clip(middle + spread * nodes, -700, 700))), np.float64)

    def middle_of(spread: float) -> float:
        return float(brentq(lambda m: (weights * rates(m, spread)).sum() - mean, -80, 80))

    def excess(log_spread: float) -> float:
        spread = exp(log_spread)
        found = (weights * np.square(rates(middle_of(spread), spread))).sum() - mean * mean
        return float(found - correlation * mean * (1 - mean))

    spread = exp(brentq(excess, -6, 3))
    return middle_of(spread), spread
