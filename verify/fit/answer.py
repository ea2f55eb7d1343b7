"""The verdict on a checkpoint, a preset and a card, and the numbers an owner asks for next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardmill.verify.fit.cards import Card
from shardmill.verify.fit.layers import plan_layers, served
from shardmill.verify.fit.planner import KvPlan, plan_blocks
from shardmill.verify.fit.preset import ROW_BYTES, Preset
from shardmill.verify.fit.scratch import MIB, Term, scratch_terms
from shardmill.verify.fit.shape import Shape
from shardmill.verify.fit.weights import WeightBytes

Verdict = Literal["fits", "does not fit", "too close to call"]

# The thinnest free memory that the published system was seen to serve with, without a failed request.
GUARD_BYTES = 110 * MIB


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that `verify fit` says. `free_*` is what is left of the card when every term is high, or low."""

    verdict: Verdict
    reasons: tuple[str, ...]
    preset: Preset
    card: Card
    plan: KvPlan
    weights: WeightBytes
    terms: tuple[Term, ...]
    pool_low: int
    pool_high: int
    free_low: int
    free_high: int
    pin_needed: int
    max_context: int
    sequences: int
    best_rung: str | None

    @property
    def need_bytes(self) -> int:
        return self.plan.need_bytes(self.preset.max_model_len)

    @property
    def pool_tokens(self) -> int:
        return self.plan.pool_tokens(self.pool_low, self.preset.max_model_len)


@dataclass(frozen=True, slots=True)
class Rung:
    """One line of the ladder: a row format under the same preset, each with the pin that it needs."""

    rung: str
    row_bytes: int
    bytes_per_token: float
    pin_needed: int
    max_context: int
    verdict: Verdict
    free_low: int


def judge(
    shape: Shape, preset: Preset, weights: WeightBytes, card: Card, *, block_fp8: bool = True
) -> Answer:
    """Whether the preset serves. Without a pin the pool is what vLLM's profiler would leave under the utilisation."""
    preset = served(shape, preset)
    plan = plan_blocks(plan_layers(shape, preset))
    terms = tuple(scratch_terms(shape, preset, block_fp8=block_fp8))
    room_low, room_high = _room(card, weights, terms)
    pool_low, pool_high = _pool(preset, card, weights, terms)
    free_low, free_high = room_low - pool_low, room_high - pool_high
    verdict, reasons = _verdict(preset, card, plan, (pool_low, pool_high), (free_low, free_high))
    rungs = ladder(shape, preset, weights, card, block_fp8=block_fp8) if shape.has_rungs else ()
    best = next((r.rung for r in rungs if r.verdict == "fits"), None)
    return Answer(
        verdict,
        tuple(reasons),
        preset,
        card,
        plan,
        weights,
        terms,
        pool_low,
        pool_high,
        free_low,
        free_high,
        plan.pin_bytes(preset.max_model_len, 1),
        plan.max_context(pool_low, shape.max_position),
        plan.sequences(pool_low, preset.max_model_len),
        best,
    )


def ladder(
    shape: Shape, preset: Preset, weights: WeightBytes, card: Card, *, block_fp8: bool = True
) -> Sequence[Rung]:
    """Every rung from the widest row to the narrowest, each pinned at just what the preset's context needs."""
    rungs = []
    for rung in sorted(ROW_BYTES, key=lambda name: -ROW_BYTES[name]):
        unpinned = replace(preset, rung=rung)
        plan = plan_blocks(plan_layers(shape, unpinned))
        pin = plan.pin_bytes(preset.max_model_len)
        terms = scratch_terms(shape, unpinned, block_fp8=block_fp8)
        low, high = _room(card, weights, terms)
        at_lane_pin = plan.max_context(preset.pin or pin, shape.max_position)
        verdict, _ = _verdict(replace(unpinned, pin=pin), card, plan, (pin, pin), (low - pin, high - pin))
        rungs.append(
            Rung(
                rung,
                ROW_BYTES[rung],
                plan.bytes_per_token(preset.max_model_len),
                pin,
                at_lane_pin,
                verdict,
                low - pin,
            )
        )
    return rungs


def _room(card: Card, weights: WeightBytes, terms: Sequence[Term]) -> tuple[int, int]:
    """Bytes left for the cache when every term is high, and when every term is low."""
    fixed = card.free_at_boot - weights.total
    return fixed - sum(term.high for term in terms), fixed - sum(term.low for term in terms)


def _pool(preset: Preset, card: Card, weights: WeightBytes, terms: Sequence[Term]) -> tuple[int, int]:
    """The pool: the pin, or what utilisation leaves after weights and scratch (the context is not counted)."""
    if preset.pin is not None:
        return preset.pin, preset.pin
    budget = int(card.total_bytes * preset.utilization) - weights.total
    return max(budget - sum(t.high for t in terms), 0), max(budget - sum(t.low for t in terms), 0)


def _verdict(
    preset: Preset, card: Card, plan: KvPlan, pool: tuple[int, int], free: tuple[int, int]
) -> tuple[Verdict, list[str]]:
    blocks = plan.request_blocks(preset.max_model_len)
    reasons = []
    if not card.boots(preset.utilization):
        limit = card.free_at_boot / card.total_bytes
        reasons.append(
            f"utilisation {preset.utilization:g} never boots: a worker's context leaves {limit:.4f} of the card free"
        )
    if plan.pool_blocks(pool[1]) <= blocks:
        reasons.append(
            f"{preset.max_model_len:,} tokens take {blocks} blocks and the null block; "
            f"the pool has {plan.pool_blocks(pool[1])}: {plan.pin_bytes(preset.max_model_len):,} B are needed"
        )
    if free[1] < 0:
        reasons.append(f"the card is short by {-free[1] / MIB:,.0f} MiB even with every term at its low end")
    if reasons:
        return "does not fit", reasons
    if plan.pool_blocks(pool[0]) <= blocks:
        return "too close to call", ["the profiler may leave too little: pin the pool"]
    if free[0] < GUARD_BYTES:
        least = f"{GUARD_BYTES // MIB} MiB is the least that was ever seen to serve"
        return "too close to call", [f"{_worst(free[0])}; {least}"]
    return "fits", [_worst(free[0])]


def _worst(free: int) -> str:
    """What stays of the card when every term is at its high end."""
    if free < 0:
        return f"with every term at its high end the card is short by {-free / MIB:,.0f} MiB"
    return f"with every term at its high end {free / MIB:,.0f} MiB stay free"
