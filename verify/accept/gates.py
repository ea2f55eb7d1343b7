"""Gates as one-sided bounds: PASS and FAIL are both claims; between them lies INCONCLUSIVE, and says what would decide.

A server exactly at the limit passes in at most one run of twenty, and fails in at most one, whatever the number of
documents and however alike the positions of one are: measured by tests/verify/accept/coverage.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from shardmill.verify.accept.chance import RESERVE, chance_of
from shardmill.verify.accept.clusters import (
    Floats,
    mean_bounds,
    median_bounds,
    proportion_bounds,
)
from shardmill.verify.accept.stats import DOCUMENTS_MIN, design_effect, positions_to_decide

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT MEASURED"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit on one metric: `at_least` or `at_most`, with the confidence of the bound."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    confidence: float = 0.95

    def __str__(self) -> str:
        sign = ">=" if self.at_least is not None else "<="
        return f"{self.metric} {sign} {self.limit:g}"

    @property
    def limit(self) -> float:
        limit = self.at_least if self.at_least is not None else self.at_most
        assert limit is not None
        return limit


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate judged: the value, the bounds it was judged by, and why it is not decided.

    `chance`: how often a server at the limit looks as good (or as bad). `n`, `documents`: what was counted.
    """

    gate: Gate
    outcome: Outcome
    value: float | None
    low: float | None = None
    high: float | None = None
    positions: int | None = None
    n: int | None = None
    documents: int | None = None
    chance: float | None = None
    why: str = ""

    @property
    def sentence(self) -> str:
        """The ruling in words, for the report."""
        if self.value is None:
            return f"{self.outcome}: {self.gate}: {self.why or 'nothing was measured'}"
        text = f"{self.outcome}: {self.gate}: {self.value:.4f}"
        if self.low is not None and self.high is not None and np.isfinite([self.low, self.high]).all():
            text += f" (bounds {self.low:.4f} to {self.high:.4f} at {self.gate.confidence:.0%} each)"
        return f"{text}; {self.why}" if self.why else text


def judge_proportion(
    gate: Gate, hits: Sequence[int] | int, sizes: Sequence[int] | int, effect: float = 1.0
) -> GateResult:
    """A proportion against its limit. hits, sizes: what came out right and what was scored, of each document.

    A bare count is one document. effect: the least design effect to assume. A limit of all (at least 1) or of none
    (at most 0) is no estimate: it is a statement on everything asked, and is checked.
    """
    h, m = (np.atleast_1d(np.asarray(a, np.float64)) for a in (hits, sizes))
    h, m = h[m > 0], m[m > 0]
    if not len(m):
        return GateResult(gate, "NOT MEASURED", None)
    rate, n = float(h.sum() / m.sum()), int(m.sum())
    if gate.at_least == 1 or gate.at_most == 0:
        return replace(judge_value(gate, rate), n=n)
    seen = GateResult(gate, "INCONCLUSIVE", rate, n=n, documents=len(m))
    if len(m) < DOCUMENTS_MIN:
        return replace(seen, why=too_few(len(m)))
    bounds = proportion_bounds(h, m, gate.confidence, effect)
    seen = replace(seen, low=bounds.low, high=bounds.high)
    claim = _outcome(gate, bounds.low, bounds.high)
    if claim == "INCONCLUSIVE":
        return _undecided(seen, max(design_effect(h.tolist(), m.tolist()), effect))
    return _against_chance(seen, claim, h, m)


def _against_chance(seen: GateResult, claim: Outcome, hits: Floats, sizes: Floats) -> GateResult:
    """The claim, if a server at the limit would hardly ever come out like this; else INCONCLUSIVE."""
    gate = seen.gate
    if not 0 < gate.limit < 1:
        return replace(seen, outcome=claim)
    above = (claim == "PASS") == (gate.at_least is not None)
    chance = chance_of(hits, sizes, gate.limit, above)
    allowed = (1 - gate.confidence) * RESERVE
    if chance <= allowed:
        return replace(seen, outcome=claim, chance=chance)
    why = (
        f"a server exactly at the limit comes out like this in {chance:.1%} of runs with {len(sizes)} documents "
        f"(allowed: {allowed:.0%}); add documents, longer ones do not help"
    )
    return replace(seen, chance=chance, why=why)


def _undecided(seen: GateResult, effect: float) -> GateResult:
    """Says how many positions would decide; a perfect score needs documents."""
    assert seen.value is not None
    if seen.value in (0.0, 1.0):
        return replace(seen, why="without any exception still too few; add documents")
    positions = positions_to_decide(seen.value, seen.gate.limit, seen.gate.confidence, effect)
    why = f"about {positions:,} positions would decide" if positions else "it sits on the limit"
    return replace(seen, positions=positions, why=why)


def too_few(documents: int) -> str:
    return f"{documents} documents say too little, at least {DOCUMENTS_MIN} are needed"


def judge_mean(
    gate: Gate, sums: Sequence[float], sizes: Sequence[float], positive: bool = False
) -> GateResult:
    """A mean over positions against its limit, by bounds over documents. sums, sizes: of each document."""
    if not sum(sizes):
        return GateResult(gate, "NOT MEASURED", None)
    bounds = mean_bounds(sums, sizes, gate.confidence, positive)
    ruling = judge_value(gate, sum(sums) / sum(sizes), bounds.low, bounds.high)
    why = too_few(len(sizes)) if len(sizes) < DOCUMENTS_MIN else ""
    if ruling.outcome == "INCONCLUSIVE" and not why:
        why = "the limit is within the bounds; add documents"
    return replace(ruling, n=int(sum(sizes)), documents=len(sizes), why=why)


def judge_median(gate: Gate, values: Sequence[float]) -> GateResult:
    """A median of repeated measurements against its limit, by order statistics."""
    if not values:
        return GateResult(gate, "NOT MEASURED", None)
    bounds = median_bounds(values, gate.confidence)
    ruling = judge_value(gate, median(values), bounds.low, bounds.high)
    why = f"{len(values)} rounds say too little" if ruling.outcome == "INCONCLUSIVE" else ""
    return replace(ruling, n=len(values), why=why)


def judge_value(
    gate: Gate, value: float | None, low: float | None = None, high: float | None = None
) -> GateResult:
    """A measured value: by its bounds where it has them, else exactly."""
    if value is None:
        return GateResult(gate, "NOT MEASURED", None)
    if low is None or high is None:
        return GateResult(gate, _outcome(gate, value, value), value)
    return GateResult(gate, _outcome(gate, low, high), value, low, high)


def _outcome(gate: Gate, low: float, high: float) -> Outcome:
    if gate.at_least is not None:
        return "PASS" if low >= gate.limit else "FAIL" if high < gate.limit else "INCONCLUSIVE"
    return "PASS" if high <= gate.limit else "FAIL" if low > gate.limit else "INCONCLUSIVE"
