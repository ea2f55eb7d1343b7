"""Two servers' next-token distributions at the same positions: agreement, divergence, flips.

A server answers its top K tokens. Of a token that it does not show it says one thing: no more than its Kth choice.
What is reported is the least divergence that fits both answers, so a lower bound of the true one, tight where the
top K hold nearly all mass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

TINY = 1e-12  # mass below which a bin counts as this much, so that no logarithm is infinite
MASS_MAX = 1.01  # probabilities of one position may add to this, by rounding


@dataclass(frozen=True, slots=True)
class Position:
    """One position as one server saw it: what it shows, its top K among it, and the token that came.

    logprobs: token -> log probability in nats. top: the tokens of rank 1 to K. best: the one of rank 1.
    """

    logprobs: Mapping[int, float]
    best: int
    actual: float
    top: frozenset[int]

    @property
    def confidence(self) -> float:
        return exp(self.logprobs[self.best])

    @property
    def unseen_max(self) -> float:
        """The most probability that a token not shown can have."""
        return exp(min(self.logprobs[token] for token in self.top))


@dataclass(frozen=True, slots=True)
class Pair:
    """One position seen by two servers; `identical` if all that they show of it is, to the bit.

    outside: a first choice is not among the other's top K. unseen: the baseline's mass on tokens that not both show.
    """

    document: str
    agrees: bool
    kl: float
    base_confidence: float
    actual_delta: float
    identical: bool
    outside: bool = False
    unseen: float = 0.0


def entries_of(answer: Mapping[str, Any] | None) -> list[Any] | None:
    """The prompt's log probabilities in a completion's answer; None where there are none."""
    choices = (answer or {}).get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return None
    entries = choices[0].get("prompt_logprobs")
    return entries if isinstance(entries, list) else None


def read_positions(
    prompt: Sequence[int], entries: Sequence[Mapping[str, Any] | None], skip: int, top_k: int = 1
) -> list[Position]:
    """Positions `skip` and on of one answer, the first token's never. Raises ValueError, nothing else, where entries
    do not match the prompt, hold no log probabilities, or fewer than the `top_k` asked for."""
    if len(entries) != len(prompt):
        raise ValueError(f"{len(entries)} entries for {len(prompt)} tokens")
    first = max(skip, 1)
    return [_position(place, prompt[place], entries[place], top_k) for place in range(first, len(prompt))]


def _position(place: int, token: int, entry: Any, top_k: int) -> Position:
    if not isinstance(entry, Mapping) or str(token) not in entry:
        raise ValueError(f"entry {place} lacks the prompt's own token {token}")
    shown = {_token(place, key): _choice(place, value) for key, value in entry.items()}
    if len(shown) < len(entry):
        raise ValueError(f"entry {place} shows one token twice")
    logprobs = {key: logprob for key, (logprob, _) in shown.items()}
    top = frozenset(key for key, (_, rank) in shown.items() if rank <= top_k)
    if len(top) < top_k:
        raise ValueError(f"entry {place} shows {len(top)} of the {top_k} likeliest tokens")
    best = min(top, key=lambda key: (shown[key][1], -shown[key][0]))
    if logprobs[best] < max(logprobs.values()) - 1e-6:
        raise ValueError(f"entry {place}: the token of rank 1 is not the likeliest")
    if sum(map(exp, logprobs.values())) > MASS_MAX:
        raise ValueError(f"entry {place}: the probabilities add to more than 1")
    return Position(logprobs, best, logprobs[token], top)


def _token(place: int, key: Any) -> int:
    if not (isinstance(key, str) and key.isascii() and key.isdigit()):
        raise ValueError(f"entry {place}: {key!r:.40} is no token id")
    return int(key)


def _choice(place: int, value: Any) -> tuple[float, int]:
    """Log probability and rank of one shown token."""
    shown: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    logprob, rank = shown.get("logprob"), shown.get("rank")
    if (
        not isinstance(logprob, int | float)
        or isinstance(logprob, bool)
        or not (isfinite(logprob) and -1e4 < logprob <= 1e-3)
    ):
        raise ValueError(f"entry {place}: expected a log probability, got {logprob!r:.40}")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"entry {place}: expected a rank from 1 on, got {rank!r:.40}")
    return float(logprob), rank


def pair(document: str, base: Position, test: Position) -> Pair:
    shared = base.logprobs.keys() & test.logprobs.keys()
    return Pair(
        document,
        base.best == test.best,
        divergence(base.logprobs, test.logprobs, test.unseen_max),
        base.confidence,
        test.actual - base.actual,
        base.logprobs == test.logprobs,
        base.best not in test.top or test.best not in base.top,
        max(1 - sum(exp(base.logprobs[token]) for token in shared), 0.0),
    )


def divergence(base: Mapping[int, float], test: Mapping[int, float], unseen_max: float = 1.0) -> float:
    """The least KL(base || test) in nats that fits what both show; never below 0.

    Three bins beside the tokens that both show: those that only the baseline shows (the test gives each at most
    `unseen_max`, and together no more than it leaves over), and all others.
    """
    shared = base.keys() & test.keys()
    p = {token: exp(value) for token, value in base.items()}
    q = {token: exp(value) for token, value in test.items()}
    total = sum(p[token] * (base[token] - test[token]) for token in shared)
    only_base = sum(p[token] for token in base.keys() - shared)
    rest = max(1 - sum(p.values()), TINY)
    left = max(1 - sum(q.values()), TINY)
    others = left + sum(q[token] for token in test.keys() - shared)
    if not only_base:
        return max(total + rest * log(rest / others), 0.0)
    most = min(len(base.keys() - shared) * unseen_max, left, others - TINY / 2)
    given = max(min(others * only_base / (only_base + rest), most), TINY / 4)
    return max(total + only_base * log(only_base / given) + rest * log(rest / (others - given)), 0.0)
