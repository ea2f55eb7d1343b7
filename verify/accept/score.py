"""Two servers' next-token distributions at the same positions: agreement, divergence, flips.

A server answers its top K tokens; what it does not show is one bin, the tail. Merging outcomes can only lower a
KL divergence, so what is reported is a lower bound of the true one, tight where the top K hold nearly all mass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

TINY = 1e-12  # mass below which a bin counts as this much, so that no logarithm is infinite


@dataclass(frozen=True, slots=True)
class Position:
    """One position as one server saw it: its top tokens, and the log probability of the token that came."""

    logprobs: Mapping[int, float]
    best: int
    actual: float

    @property
    def confidence(self) -> float:
        return exp(self.logprobs[self.best])


@dataclass(frozen=True, slots=True)
class Pair:
    """One position seen by two servers; `identical` if all that they show of it is, to the bit."""

    document: str
    agrees: bool
    kl: float
    base_confidence: float
    actual_delta: float
    identical: bool


def read_positions(
    prompt: Sequence[int], entries: Sequence[Mapping[str, Any] | None], skip: int
) -> list[Position]:
    """Positions `skip` and on of one answer. Raises ValueError where entries do not match the prompt."""
    if len(entries) != len(prompt):
        raise ValueError(f"{len(entries)} entries for {len(prompt)} tokens")
    positions = []
    for token, entry in list(zip(prompt, entries, strict=True))[max(skip, 1) :]:
        if not entry or str(token) not in entry:
            raise ValueError("an entry lacks the prompt's own token")
        best = min(entry, key=lambda key: (entry[key]["rank"], -entry[key]["logprob"]))
        logprobs = {int(key): float(value["logprob"]) for key, value in entry.items()}
        if not all(-1e4 < logprob <= 1e-3 for logprob in logprobs.values()):
            raise ValueError("a log probability is not one")
        positions.append(Position(logprobs, int(best), logprobs[token]))
    return positions


def pair(document: str, base: Position, test: Position) -> Pair:
    return Pair(
        document,
        base.best == test.best,
        divergence(base.logprobs, test.logprobs),
        base.confidence,
        test.actual - base.actual,
        base.logprobs == test.logprobs,
    )


def divergence(base: Mapping[int, float], test: Mapping[int, float]) -> float:
    """KL(base || test) in nats over the tokens that both show and one bin for all others; never below 0."""
    shared = base.keys() & test.keys()
    p = {token: exp(base[token]) for token in shared}
    q = {token: exp(test[token]) for token in shared}
    total = sum(p[token] * (base[token] - test[token]) for token in shared)
    p_tail, q_tail = max(1 - sum(p.values()), TINY), max(1 - sum(q.values()), TINY)
    return max(total + p_tail * log(p_tail / q_tail), 0.0)
