"""Greedy chains of two servers: after the first token that differs everything differs, so this is never a gate."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median

from shardmill.verify.accept.measure import generated_ids
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import Run


@dataclass(frozen=True, slots=True)
class Divergence:
    """Greedy chains of two runs: where they part, and how sure the baseline was there. Never a gate."""

    chains: int
    identical: int
    median_index: float | None
    margins: tuple[float, ...]


def diverge(base: Run, test: Run) -> Divergence | None:
    """Where greedy chains part, and the baseline's margin there between its first and second choice."""
    indices, margins, chains = [], [], 0
    for row in base.of("greedy", "before"):
        other = test.rows.get(row.id)
        if other is None or not row.ok or not other.ok:
            continue
        chains += 1
        mine, theirs = generated_ids(row), generated_ids(other)
        index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if index is not None:
            indices.append(index)
            margins.append(_margin(row, index))
    if not chains:
        return None
    known = tuple(m for m in margins if m is not None)
    return Divergence(chains, chains - len(indices), median(indices) if indices else None, known)


def _margin(row: Row, index: int) -> float | None:
    """The first choice's lead in nats at a position; None where the server did not say."""
    try:
        top = (row.answer or {})["choices"][0]["logprobs"]["top_logprobs"][index]
        first, second = sorted(map(float, top.values()), reverse=True)[:2]
        return first - second if isfinite(first - second) else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        return None
