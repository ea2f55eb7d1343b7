"""Servers at a gate's limit and better ones, drawn at random: how often does the gate pass them?

Each server answers documents whose positions are alike to a given degree: the correlation within documents. The gates
are the product's own functions. `coverage_page` runs the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.verify.accept.chance import document_rates
from shardmill.verify.accept.gates import Gate, judge_mean, judge_median, judge_proportion

DOCUMENTS = (2, 5, 10, 24, 80)
CORRELATIONS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6)
ALLOWED = 0.06
# Spread of positions within a document: a larger one could not reach a correlation of 0.6 when documents multiply.
WITHIN = 0.7
Draw = Callable[[np.random.Generator, int, float], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Claim:
    """A gate, servers at its limit and well inside it: each draws (sums, sizes), f64 [documents]."""

    name: str
    gate: Gate
    outcome: Callable[[np.ndarray, np.ndarray], str]
    at_limit: Draw
    inside: Draw


def sizes_of(documents: int, total: int, equal: bool) -> np.ndarray:
    """Positions of each document: all alike, or log-normal with the longest some ten times the shortest."""
    if equal:
        return np.full(documents, max(total // documents, 1))
    weights = np.random.default_rng(3).lognormal(0, 0.6, documents)
    return np.maximum((weights / weights.sum() * total).astype(int), 3)


def counts(rate: float, total: int, equal: bool, shape: str) -> Draw:
    """Agreeing positions of documents whose own rates vary around `rate`."""

    def draw(rng: np.random.Generator, documents: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
        sizes = sizes_of(documents, total, equal)
        rates = document_rates(rng, rate, correlation, shape, (1, documents))[0]
        return rng.binomial(sizes, rates), sizes

    return draw


def divergences(mean: float, total: int, equal: bool, shape: str) -> Draw:
    """Sums of values that are never negative (gamma within a document), each document with a mean of its own."""

    def draw(rng: np.random.Generator, documents: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
        sizes = sizes_of(documents, total, equal)
        square = correlation * WITHIN**2 / (1 - correlation * (1 + WITHIN**2))
        means = mean * positive(rng, square, documents, shape)
        return means * rng.gamma(sizes / WITHIN**2, WITHIN**2), sizes

    return draw


def positive(rng: np.random.Generator, square: float, count: int, shape: str) -> np.ndarray:
    """Numbers of mean 1 and variance `square`: log-normal, or gamma."""
    if square == 0:
        return np.ones(count)
    if shape == "gamma":
        return rng.gamma(1 / square, square, count)
    spread = np.sqrt(np.log1p(square))
    return np.exp(rng.normal(-spread * spread / 2, spread, count))


def differences(mean: float, total: int, shape: str) -> Draw:
    """Sums of signed values of spread 1 in all; `skewed`: the documents' part is a log-normal's lower tail."""

    def draw(rng: np.random.Generator, documents: int, correlation: float) -> tuple[np.ndarray, np.ndarray]:
        sizes = sizes_of(documents, total, True)
        part = rng.normal(size=documents) if shape == "normal" else 1 - positive(rng, 1.0, documents, "")
        means = mean + np.sqrt(correlation) * part
        return sizes * means + np.sqrt((1 - correlation) * sizes) * rng.normal(size=documents), sizes

    return draw


def proportion(gate: Gate) -> Callable[[np.ndarray, np.ndarray], str]:
    return lambda hits, sizes: judge_proportion(gate, hits.tolist(), sizes.tolist()).outcome


def mean(gate: Gate, positive_only: bool) -> Callable[[np.ndarray, np.ndarray], str]:
    return lambda sums, sizes: judge_mean(gate, sums.tolist(), sizes.tolist(), positive_only).outcome


@dataclass(frozen=True)
class Better:
    """A gate and servers better than its limit: `draw` is that of a true value."""

    name: str
    gate: Gate
    outcome: Callable[[np.ndarray, np.ndarray], str]
    truths: tuple[float, ...]
    draw: Callable[[float, int], Draw]  # of the true value and of positions in all
    positions: int  # of one document


def better() -> Iterator[Better]:
    """The gates that docs advise on, with as many positions a document as the default protocol's documents have."""
    agree, flips = Gate("top1_agreement", at_least=0.95), Gate("confident_flips", at_most=0.02)
    kl, draft = Gate("mean_kl", at_most=0.05), Gate("mtp_acceptance", at_least=0.6)

    def rates(rate: float, total: int) -> Draw:
        return counts(rate, total, True, "beta")

    def means(value: float, total: int) -> Draw:
        return divergences(value, total, True, "log-normal")

    yield Better(str(agree), agree, proportion(agree), (0.97, 0.98, 0.99), rates, 94)
    yield Better(str(flips), flips, proportion(flips), (0.01, 0.005, 0.002), rates, 56)
    yield Better(str(kl), kl, mean(kl, True), (0.03, 0.02, 0.01), means, 94)
    yield Better(str(draft), draft, proportion(draft), (0.65, 0.7, 0.8), rates, 60)


def claims() -> Iterator[Claim]:
    agree, flips = Gate("top1_agreement", at_least=0.95), Gate("confident_flips", at_most=0.02)
    for shape, equal in (("beta", True), ("beta", False), ("logit-normal", True)):
        form = f"{shape}, {'equal' if equal else 'unequal'} documents"
        inside = 0.99, 0.002
        for gate, total, good in ((agree, 2700, inside[0]), (flips, 1600, inside[1])):
            yield Claim(
                f"{gate}, {form}",
                gate,
                proportion(gate),
                counts(gate.limit, total, equal, shape),
                counts(good, total, equal, "beta"),
            )
    for gate, total, good in (
        (Gate("mtp_acceptance", at_least=0.6), 4000, 0.8),
        (Gate("needles", at_least=0.9), 240, 0.995),
    ):
        yield Claim(
            f"{gate}, beta",
            gate,
            proportion(gate),
            counts(gate.limit, total, True, "beta"),
            counts(good, total, True, "beta"),
        )
    kl = Gate("mean_kl", at_most=0.05)
    for shape, equal in (("log-normal", True), ("log-normal", False), ("gamma", True)):
        form = f"{shape}, {'equal' if equal else 'unequal'} documents"
        yield Claim(
            f"{kl}, {form}",
            kl,
            mean(kl, True),
            divergences(0.05, 2700, equal, shape),
            divergences(0.01, 2700, equal, shape),
        )
    delta = Gate("mean_logprob_delta", at_least=-0.5)
    for shape in ("normal", "skewed"):
        yield Claim(
            f"{delta}, {shape}",
            delta,
            mean(delta, False),
            differences(-0.5, 2700, shape),
            differences(2.0, 2700, shape),
        )


def share(
    claim: Claim | Better, draw: Draw, documents: int, correlation: float, runs: int, seed: int
) -> float:
    """Share of runs that pass. A run whose own figure misses the limit does not pass, and is not judged further."""
    rng = np.random.Generator(np.random.PCG64(seed))
    passed = 0
    for _ in range(runs):
        sums, sizes = draw(rng, documents, correlation)
        if meets(claim.gate, sums.sum() / sizes.sum()):
            passed += claim.outcome(sums, sizes) == "PASS"
    return passed / runs


def meets(gate: Gate, figure: float) -> bool:
    """Whether the figure itself is within the limit: no bound of it is further inside."""
    return figure >= gate.limit if gate.at_least is not None else figure <= gate.limit


def speed_share(rounds: int, runs: int, seed: int) -> float:
    """Passes of a server whose median speed is the limit."""
    rng, gate = np.random.Generator(np.random.PCG64(seed)), Gate("decode_c1", at_least=1.0)
    speeds = np.exp(rng.normal(0, 0.2, (runs, rounds)))
    return sum(judge_median(gate, row.tolist()).outcome == "PASS" for row in speeds) / runs
