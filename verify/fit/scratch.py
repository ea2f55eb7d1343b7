"""Memory that is neither weights nor cache, term by term: each a range with its source and its standing.

"derived" follows from the source code and the flags; "measured by others" was printed by the published system (an
older fork, two 96 GB cards); "guess" is neither, and has the widest range. The ranges are what keeps the answer from
being a bare yes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmill.verify.fit.layers import row_bytes
from shardmill.verify.fit.planner import ceil_div
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import Linear, Shape

MIB = 1 << 20
GIB = 1 << 30
Standing = Literal["derived", "measured by others", "guess"]

INDEX_ENTRY_SCALE_BYTES = 4
CANONICAL_ROW_BYTES = 656
TOPK_ROWS = 2176  # 2,048 chosen tokens and the open pool, rounded up to 128
BLOCK_FP8_PATH_BYTES = int(0.80 * GIB)
REMAINDER_BYTES = int(1.795 * GIB)
NON_TORCH_BYTES = (int(0.05 * GIB), int(0.15 * GIB))


@dataclass(frozen=True, slots=True)
class Term:
    """One use of memory on a rank: between `low` and `high` bytes."""

    name: str
    low: int
    high: int
    standing: Standing
    source: str


def scratch_terms(shape: Shape, preset: Preset, *, block_fp8: bool) -> list[Term]:
    """All scratch of a preset. `block_fp8`: whether any weight takes the block-FP8 GEMM path."""
    terms = [
        *_indexer(shape, preset),
        *_restage(shape, preset),
        *_flash_kda(shape, preset),
        _experts(shape, preset),
        _activations(shape, preset),
        _sampler(shape, preset),
        _graphs(preset),
        _remainder(shape, preset),
        Term(
            "outside torch (NCCL, cuBLAS)",
            *NON_TORCH_BYTES,
            "measured by others",
            "published ledger 84.77 GiB of weights and non-torch, less 84.67 GiB by headers",
        ),
    ]
    if block_fp8:
        terms.append(
            Term(
                "block-FP8 activation path",
                BLOCK_FP8_PATH_BYTES - 5 * MIB,
                BLOCK_FP8_PATH_BYTES + 5 * MIB,
                "measured by others",
                "published: a fixed 0.80 GiB a rank once any layer takes it",
            )
        )
    if preset.images:
        terms.append(
            Term(
                "vision encoder", 64 * MIB, 384 * MIB, "guess", "one image; the profiler runs the largest one"
            )
        )
    return [term for term in terms if term.high]


def _indexer(shape: Shape, preset: Preset) -> list[Term]:
    """The plugin's indexer has a budget. vLLM's own caps its logits [rows, pools] f32 and gathers keys by context."""
    sparse = shape.sparse
    if sparse is None:
        return []
    if preset.indexer_mib:
        budget = preset.indexer_mib * MIB
        return [
            Term("indexer scratch", budget, budget, "derived", "VLLM_KVQ_INDEXER_MIB, whatever the context")
        ]
    cap = preset.logits_mib * MIB
    logits = min(preset.batched_tokens * ceil_div(preset.max_model_len, sparse.pool) * 4, cap)
    factor = 5 if preset.max_model_len <= 256 * 1024 else 2
    entries = preset.max_model_len * 8 * factor // sparse.pool
    gather = entries * (sparse.index_dim + INDEX_ENTRY_SCALE_BYTES)
    return [
        Term("indexer logits", logits, cap, "derived", "rows x pools x 4 B; the profiler reserves the cap"),
        Term(
            "indexer gather", gather, gather, "derived", "max_model_len x 8 x factor / pool entries of 132 B"
        ),
    ]


def _restage(shape: Shape, preset: Preset) -> list[Term]:
    """Packed rows are restored to canonical ones for the kernel. Stock rows and, on SM120, 8888 need none."""
    sparse = shape.sparse
    if sparse is None or preset.rung in ("stock", "8888") or row_bytes(sparse, preset) == CANONICAL_ROW_BYTES:
        return []
    decode = preset.decode_tokens * TOPK_ROWS * CANONICAL_ROW_BYTES
    high = max(decode, preset.stage_mib * MIB)
    return [
        Term("rows restaged", decode, high, "derived", "decode tokens x 2,176 x 656 B; prefill in chunks")
    ]


def _flash_kda(shape: Shape, preset: Preset) -> list[Term]:
    """FlashKDA's static buffers: final and checkpoint states, its output; the kernel's own workspace is a guess."""
    linear = next((layer for layer in shape.layers if isinstance(layer, Linear)), None)
    if linear is None or preset.kda_backend != "flashkda" or shape.sparse is None:
        return []
    heads = linear.value_heads // preset.tensor_parallel
    states = 2 * preset.max_sequences * heads * linear.value_dim * linear.key_dim * 4
    output = preset.batched_tokens * heads * linear.value_dim * 2
    low = states + output
    return [
        Term(
            "FlashKDA buffers",
            low,
            low + 8 * output,
            "derived",
            "states, output, and its workspace (a guess)",
        )
    ]


def _experts(shape: Shape, preset: Preset) -> Term:
    """Gathered inputs and intermediate of the routed experts for one batch, BF16."""
    rows = preset.batched_tokens * shape.experts_per_token
    width = max(2 * shape.moe_inter // preset.tensor_parallel, shape.hidden)
    low = rows * (width + shape.moe_inter // preset.tensor_parallel) * 2
    return Term(
        "expert workspace",
        low,
        2 * low,
        "guess",
        "tokens x experts x widest side x 2 B, once or twice",
    )


def _activations(shape: Shape, preset: Preset) -> Term:
    """Residual streams and the widest projections of one batch."""
    stream = preset.batched_tokens * shape.hidden * shape.residual_streams * 4
    return Term("activations", stream, 2 * stream, "guess", "residual streams in F32, once or twice")


def _sampler(shape: Shape, preset: Preset) -> Term:
    """Logits of a decode step in F32, twice: raw and processed."""
    size = preset.decode_tokens * shape.vocab * 4 * 2
    return Term("logits and sampler", size, 2 * size, "derived", "decode tokens x vocabulary x 4 B, twice")


def _graphs(preset: Preset) -> Term:
    """CUDA graphs share one pool, sized by the largest capture; each adds its own nodes."""
    sizes = len(preset.captures)
    source = f"{sizes} capture sizes of 24-48 MiB"
    return Term("CUDA graphs", sizes * 24 * MIB, sizes * 48 * MIB, "guess", source)


def _remainder(shape: Shape, preset: Preset) -> Term:
    """What the published system used beyond the terms above, left as the upper end: allocator slack and copies.

    At 524,288 tokens with a bounded indexer it used 90.63 GiB but the context and the pin at its deepest dip (110 MiB
    free); by headers 87.02 GiB of that are weights, and the terms above reach 1.84 at their high ends. It also served
    262,144 tokens with four times the batch under the same pin, so the rest is taken as growing with context alone.
    """
    high = int(REMAINDER_BYTES * preset.max_model_len / 524_288) if shape.sparse else GIB // 4
    source = "published watermark less the terms above"
    return Term("unexplained remainder", 0, high, "measured by others", source)
