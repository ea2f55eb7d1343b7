"""The published fit ladder, by this model: each attempt predicted to fit or not, beside what happened.

Facts of the published card (two 96 GB cards, its own fork, 524,288 tokens). The fork's scratch is not derivable; two
attempts calibrate it: C2 for its unbounded indexer, D2 for the bounded one. A, B, B3, C1, D and E2 are predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardmill.verify.fit.cards import CARDS
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.published.fork import plan_fork
from shardmill.verify.fit.scratch import BLOCK_FP8_PATH_BYTES
from shardmill.verify.fit.shape import Shape

GIB = 1 << 30
CARD = CARDS["rtx-pro-6000"]
CONTEXT = 524_288

# Weights a rank by headers at TP 2, GiB: the text model alone; with draft and BF16 vision; with draft and FP8 vision.
TEXT_GIB, DRAFT_VISION_GIB, DRAFT_FP8_VISION_GIB = 84.675, 87.272, 87.018
# Scratch that calibrates: card less context, weights, pin and the published free memory (290 and 270 MiB).
UNBOUNDED_GIB = 93.89 - TEXT_GIB - 4_241_026_048 / GIB - 290 / 1024
BOUNDED_GIB = 93.89 - DRAFT_VISION_GIB - 3_300_000_000 / GIB - 270 / 1024
# Twice the batch at least doubles the unbounded indexer's logits, 1,024 rows x 131,072 pools x 4 B.
SECOND_BATCH_GIB = 0.5
# Published size of the part that grows with context, at 500k; short prompts do not take it.
CONTEXT_PART_GIB = 4.0
# Not published: the pool of 552,543 tokens at the published 8,050 B a token.
B3_PIN = 4_448_000_000

Outcome = Literal["fits", "does not fit", "never boots"]
Figure = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the published ladder. `pin` in bytes, None where vLLM's profiler sized the pool."""

    name: str
    what: str
    outcome: Outcome
    weights_gib: float
    scratch_gib: float
    preset: Preset
    calibrates: bool = False
    pool_tokens: int | None = None
    free_mib: tuple[int, int] | None = None
    available_gib: float | None = None
    need_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """An attempt as predicted: outcome, and pairs (figure, predicted, published)."""

    attempt: Attempt
    outcome: Outcome
    figures: tuple[Figure, ...]

    @property
    def agrees(self) -> bool:
        return self.outcome == self.attempt.outcome


def _preset(rung: str, draft: int, pin: int | None, utilization: float = 0.95) -> Preset:
    return Preset(
        "published",
        tensor_parallel=2,
        max_model_len=CONTEXT,
        utilization=utilization,
        pin=pin,
        kv_dtype="fp8",
        draft_tokens=draft,
        rung=rung,
    )


ATTEMPTS: tuple[Attempt, ...] = (
    Attempt(
        "A",
        "util 0.985, 2 sequences, batch 2,048, text only",
        "does not fit",
        TEXT_GIB,
        UNBOUNDED_GIB + SECOND_BATCH_GIB,
        _preset("stock", 0, None, 0.985),
        available_gib=3.08,
        need_gib=3.92,
    ),
    Attempt("B", "util 0.99", "never boots", TEXT_GIB, UNBOUNDED_GIB, _preset("stock", 0, None, 0.99)),
    Attempt(
        "B3",
        "pinned pool, boots and serves short prompts",
        "fits",
        TEXT_GIB,
        UNBOUNDED_GIB - CONTEXT_PART_GIB,
        _preset("stock", 0, B3_PIN),
    ),
    Attempt(
        "C1",
        "the same pool, batch 2,048, a real 503k prefill",
        "does not fit",
        TEXT_GIB,
        UNBOUNDED_GIB + SECOND_BATCH_GIB,
        _preset("stock", 0, B3_PIN),
    ),
    Attempt(
        "C2",
        "1 sequence, batch 1,024, pin 3.95 GiB",
        "fits",
        TEXT_GIB,
        UNBOUNDED_GIB,
        _preset("stock", 0, 4_241_026_048),
        calibrates=True,
        pool_tokens=526_825,
        free_mib=(290, 290),
    ),
    Attempt(
        "D",
        "with draft and vision, stock rows",
        "does not fit",
        DRAFT_VISION_GIB,
        BOUNDED_GIB,
        _preset("stock", 1, 4_680_000_000),
    ),
    Attempt(
        "D2",
        "rung 6666, pin 3.07 GiB",
        "fits",
        DRAFT_VISION_GIB,
        BOUNDED_GIB,
        _preset("6666", 1, 3_300_000_000),
        calibrates=True,
        pool_tokens=548_560,
        free_mib=(270, 270),
    ),
    Attempt(
        "E2",
        "rung 8666, FP8 vision, pin 3.16 GiB",
        "fits",
        DRAFT_FP8_VISION_GIB,
        BOUNDED_GIB,
        _preset("8666", 1, 3_390_000_000),
        pool_tokens=532_684,
        free_mib=(110, 290),
    ),
)


def tell(shape: Shape) -> Sequence[Told]:
    """Every attempt by the fork's arithmetic."""
    return [_tell(attempt, shape) for attempt in ATTEMPTS]


def _tell(attempt: Attempt, shape: Shape) -> Told:
    preset, plan = attempt.preset, plan_fork(shape, attempt.preset)
    need = plan.need_bytes(CONTEXT) / GIB
    budget = CARD.total_bytes * preset.utilization / GIB - attempt.weights_gib
    available = preset.pin / GIB if preset.pin else budget - attempt.scratch_gib
    free = CARD.free_at_boot / GIB - attempt.weights_gib - attempt.scratch_gib - (preset.pin or 0) / GIB
    outcome: Outcome = "fits" if available >= need and free >= 0 else "does not fit"
    if not CARD.boots(preset.utilization):
        outcome = "never boots"
    pool_tokens = plan.pool_tokens(int(available * GIB), CONTEXT)
    return Told(attempt, outcome, tuple(_figures(attempt, need, available, free * 1024, pool_tokens)))


def _figures(
    attempt: Attempt, need: float, available: float, free: float, pool_tokens: int
) -> Iterator[Figure]:
    if attempt.need_gib is not None:
        yield "GiB needed", need, attempt.need_gib
    if attempt.available_gib is not None:
        yield "GiB available", available, attempt.available_gib
    if attempt.pool_tokens is not None:
        yield "pool tokens", pool_tokens, attempt.pool_tokens
    if attempt.free_mib is not None:
        low, high = attempt.free_mib
        yield "MiB free", free, min(max(free, low), high)


@dataclass(frozen=True, slots=True)
class Partial:
    """FP8 for one family of weights alone: bytes saved, fixed cost of the FP8 path, change of the pool."""

    saved_bytes: int
    cost_bytes: int
    pool_bytes: float

    @property
    def pool_change(self) -> float:
        return (self.saved_bytes - self.cost_bytes) / self.pool_bytes


def mlp_alone(shape: Shape) -> Partial:
    """The published negative: FP8 for the shared and dense MLP alone saved 0.71 GiB and cost 0.80 (pool -2.8 %).

    Its pool held 340,163 tokens at a maximum of 315,392, with stock rows and the draft on.
    """
    before, codes, scales = 3_070_230_528, 1_535_115_264, 374_784
    plan = plan_fork(shape, _preset("stock", 1, None))
    pool = 340_163 * plan.bytes_per_token(315_392)
    return Partial((before - codes - scales) // 2, BLOCK_FP8_PATH_BYTES, pool)
