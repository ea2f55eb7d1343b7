"""Gates as one-sided bounds: PASS and FAIL are both claims; between them lies INCONCLUSIVE, with the n that decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmill.verify.accept.stats import positions_to_decide, wilson_bounds

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT MEASURED"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit on one metric: `at_least` or `at_most`, with the confidence of the bound."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    confidence: float = 0.95

    def __str__(self) -> str:
        sign, limit = (">=", self.at_least) if self.at_least is not None else ("<=", self.at_most)
        return f"{self.metric} {sign} {limit:g}"


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate judged: the value, the bounds it was judged by, and the positions that would decide it."""

    gate: Gate
    outcome: Outcome
    value: float | None
    low: float | None = None
    high: float | None = None
    positions: int | None = None
    n: int | None = None

    @property
    def sentence(self) -> str:
        """The ruling in words, for the report."""
        if self.value is None:
            return f"{self.outcome}: {self.gate}: nothing was measured"
        text = f"{self.outcome}: {self.gate}: {self.value:.4f}"
        if self.low is not None and self.high is not None:
            text += f" (bounds {self.low:.4f} to {self.high:.4f} at {self.gate.confidence:.0%} each)"
        if self.outcome == "INCONCLUSIVE":
            text += (
                f"; about {self.positions:,} positions would decide"
                if self.positions
                else "; it sits on the limit"
            )
        return text


def judge_proportion(gate: Gate, hits: int, n: int, effect: float = 1.0) -> GateResult:
    """A proportion against its limit, by Wilson's bounds at n / effect independent positions."""
    if n == 0:
        return GateResult(gate, "NOT MEASURED", None)
    bounds = wilson_bounds(hits / effect, n / effect, gate.confidence)
    outcome = _outcome(gate, bounds.low, bounds.high)
    limit = gate.at_least if gate.at_least is not None else gate.at_most
    assert limit is not None
    positions = (
        positions_to_decide(hits / n, limit, gate.confidence, effect) if outcome == "INCONCLUSIVE" else None
    )
    return GateResult(gate, outcome, hits / n, bounds.low, bounds.high, positions, n)


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
        return "PASS" if low >= gate.at_least else "FAIL" if high < gate.at_least else "INCONCLUSIVE"
    assert gate.at_most is not None
    return "PASS" if high <= gate.at_most else "FAIL" if low > gate.at_most else "INCONCLUSIVE"
