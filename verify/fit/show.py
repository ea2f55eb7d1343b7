"""The answer for people and as JSON: verdict, the memory of a rank, the cache, the ladder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardmill.verify.fit.answer import Answer, Rung
from shardmill.verify.fit.bootlog import Compared
from shardmill.verify.fit.published.attempts import Told
from shardmill.verify.fit.published.boots import Boot
from shardmill.verify.fit.published.fork import ForkPlan
from shardmill.verify.fit.waterfall import steps

GIB = 1 << 30
MIB = 1 << 20


def as_json(answer: Answer, rungs: Sequence[Rung], fork: ForkPlan | None) -> dict[str, Any]:
    """One object; `kv`, `weights` and `verdict` hold the answer, the rest how it came about. Sizes in bytes."""
    plan, length = answer.plan, answer.preset.max_model_len
    return {
        "format": "shardmill/fit/1",
        "planner": "vllm-0.33.0",
        "preset": asdict(answer.preset),
        "verdict": answer.verdict,
        "reasons": list(answer.reasons),
        "kv": {
            "bytes_per_token": plan.bytes_per_token(length),
            "need_bytes": answer.need_bytes,
            "pool_bytes": answer.pool_low,
            "pool_tokens": answer.pool_tokens,
            "max_context": answer.max_context,
            "max_sequences": answer.sequences,
            "block_bytes": plan.block_bytes,
            "request_blocks": plan.request_blocks(length),
            "pool_blocks": plan.pool_blocks(answer.pool_low),
            "pin_bytes": answer.pin_needed,
        },
        "weights": {"bytes_per_rank": answer.weights.total, "families": dict(answer.weights.families)},
        "scratch": [asdict(term) for term in answer.terms],
        "card": {
            "name": answer.card.name,
            "bytes": answer.card.total_bytes,
            "free_at_boot": answer.card.free_at_boot,
        },
        "free_bytes": {"low": answer.free_low, "high": answer.free_high},
        "highest_rung": answer.best_rung,
        "ladder": [asdict(rung) for rung in rungs],
        "published_fork": _fork_json(answer, fork) if fork else None,
    }


def _fork_json(answer: Answer, fork: ForkPlan) -> dict[str, Any]:
    length = answer.preset.max_model_len
    return {
        "bytes_per_token": fork.bytes_per_token(length),
        "need_bytes": fork.need_bytes(length),
        "pool_tokens": fork.pool_tokens(answer.pool_low, length),
    }


def as_text(answer: Answer, rungs: Sequence[Rung], fork: ForkPlan | None) -> Iterator[str]:
    """The answer first, then memory, cache and ladder."""
    preset, plan = answer.preset, answer.plan
    yield f"{preset.name}: {answer.verdict}"
    yield from (f"  {reason}" for reason in answer.reasons)
    yield ""
    yield f"One rank of {preset.tensor_parallel}, {answer.card.name}, GiB (low to high):"
    for name, low, high, standing in steps(answer):
        yield f"  {name:<30} {_gib(low, high):>14}  {standing}"
    yield f"  {'free':<30} {_gib(answer.free_low, answer.free_high):>14}"
    yield ""
    yield f"KV cache by vLLM 0.33.0's planner, rung {preset.rung}, {preset.max_model_len:,} tokens:"
    yield f"  {plan.bytes_per_token(preset.max_model_len):,.1f} B a token: one request is {answer.need_bytes:,} B,"
    yield f"  {plan.request_blocks(preset.max_model_len)} blocks of {plan.block_bytes:,} B, of {_blocks(answer)}"
    yield f"  pin to set: {answer.pin_needed:,} B (the null block included)"
    yield f"  longest context in this pool: {answer.max_context:,}; logged size: {answer.pool_tokens:,} tokens"
    yield f"  requests of {preset.max_model_len:,} tokens at once: {answer.sequences}"
    if fork:
        yield f"  (the published fork's arithmetic: {fork.bytes_per_token(preset.max_model_len):,.1f} B a token)"
    if answer.best_rung:
        yield f"  highest rung that fits with its own pin: {answer.best_rung}"
    if rungs:
        yield ""
        yield from ladder_text(rungs)


def _blocks(answer: Answer) -> str:
    return f"{answer.plan.pool_blocks(answer.pool_low)} in the pool of {answer.pool_low:,} B"


def ladder_text(rungs: Sequence[Rung]) -> Iterator[str]:
    """The ladder: each rung pinned at what the preset's context needs."""
    yield f"  {'rung':<6} {'B a row':>7} {'B a token':>10} {'pin needed':>15} {'context here':>12}  with that pin"
    for rung in rungs:
        yield (
            f"  {rung.rung:<6} {rung.row_bytes:>7} {rung.bytes_per_token:>10,.1f} {rung.pin_needed:>15,} "
            f"{rung.max_context:>12,}  {rung.verdict} ({rung.free_low / MIB:,.0f} MiB free at worst)"
        )


def log_text(rows: Sequence[Compared]) -> Iterator[str]:
    """Predicted against logged."""
    yield f"  {'term':<14} {'predicted':>24} {'logged':>12} {'residual':>9}"
    for row in rows:
        low, high = f"{row.low:,.2f}", f"{row.high:,.2f}"
        predicted = low if low == high else f"{low} to {high}"
        yield f"  {row.term:<14} {predicted:>24} {row.logged:>12,.2f} {row.residual:>+9.2%}  {row.unit}"


def attempts_text(told: Sequence[Told]) -> Iterator[str]:
    """The published ladder as the fork's arithmetic tells it."""
    for row in told:
        a = row.attempt
        mark = "calibrates" if a.calibrates else "agrees" if row.agrees else "DIFFERS"
        yield f"  {a.name:<3} {a.what}: published {a.outcome}, predicted {row.outcome} ({mark})"
        for name, predicted, published in row.figures:
            residual = (predicted - published) / published
            yield f"        {name}: predicted {predicted:,.2f}, published {published:,.2f} ({residual:+.2%})"


def boots_text(boots: Sequence[Boot]) -> Iterator[str]:
    """Other models' published boot figures."""
    for boot in boots:
        low, high, residual = boot.residual()
        predicted = f"{low:,.10g}" if low == high else f"{low:,.10g} to {high:,.10g}"
        yield f"  {boot.model} ({boot.kind}), {boot.figure}: {boot.logged:,.10g} logged, {predicted} predicted,"
        yield f"      residual {residual:+.2%}  [{boot.source}]"


def _gib(low: int, high: int) -> str:
    return f"{low / GIB:.2f}" if low == high else f"{low / GIB:.2f} to {high / GIB:.2f}"
