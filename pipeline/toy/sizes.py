"""The sizes a toy parent comes in. Each keeps the real model's 46 layers, 24 vision blocks and 549 converting
tensors, so that the shipped recipe builds it unchanged.

Laws of every row, at tensor-parallel sizes 1 and 2: what a rank holds of a converting matrix is a multiple of
its block ([32,32] for KDA's q, k, v, b, f_a, g_a, else [128,128]), so KDA has 64 heads (b_proj: 64 rows, 32 a
rank) and what is split has 256 rows or columns at least. Where the text model's hidden size is 128, the vision
merger stays at 256 for that reason: such a toy can be built and loaded, not run on an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardmill.pipeline.toy.glm53 import REAL, SOURCE_SHARD_BYTES, Cut, Dimensions, cut, parent_bytes


@dataclass(frozen=True, slots=True)
class Size:
    """One size: what it is for, its dimensions, how its files are cut, and whether its data are left as holes."""

    name: str
    purpose: str
    dimensions: Dimensions
    cut: Callable[[], Cut]
    sparse: bool = False


_TINY = Dimensions(
    vocabulary=512,
    hidden=128,
    dense_width=256,
    experts=2,
    experts_per_token=2,
    expert_width=64,
    shared_experts=4,
    kda_head=32,
    heads=4,
    q_rank=128,
    kv_rank=128,
    qk_head=64,
    v_head=64,
    index_heads=4,
    index_head=32,
    vision_hidden=256,
    vision_heads=4,
    vision_width=256,
    vision_out=256,
    vision_merger_width=256,
    vision_patch=7,
)
_MANY = replace(_TINY, experts=288, experts_per_token=8, expert_width=32, shared_experts=8)
# vLLM's kernels fix the attention's sizes: KDA heads of 128, latents of 512, indexer heads of 128.
_VLLM = replace(
    _TINY,
    vocabulary=1024,
    hidden=256,
    dense_width=512,
    experts=4,
    expert_width=256,
    shared_experts=1,
    kda_head=128,
    kv_rank=512,
    qk_head=256,
    v_head=256,
    index_heads=32,
    index_head=128,
    vision_width=512,
    vision_merger_width=512,
    vision_patch=14,
)
_SMALL = Dimensions(
    vocabulary=65_536,
    hidden=1024,
    dense_width=2048,
    experts=24,
    experts_per_token=4,
    expert_width=1024,
    kda_head=64,
    heads=8,
    q_rank=512,
    kv_rank=256,
    index_heads=16,
    index_head=64,
    vision_hidden=512,
    vision_heads=8,
    vision_width=1024,
    vision_out=1024,
    vision_merger_width=1024,
)


def _real_cut() -> Cut:
    return cut(REAL, SOURCE_SHARD_BYTES)


SIZES: dict[str, Size] = {
    size.name: size
    for size in (
        Size("tiny", "every family and special name in 125 MB", _TINY, lambda: cut(_TINY, 32 << 20)),
        Size(
            "small",
            "for benchmarks: 8 shards of one size, 1.8 GB to convert and as much NVFP4",
            _SMALL,
            # Cut by the parent's bytes, so that the shards are alike whatever share of each is experts.
            lambda: cut(_SMALL, 490_000_000, parent_bytes),
        ),
        Size("many", "the real 150,226 names in the real 121 files, toy shapes, 230 MB", _MANY, _real_cut),
        Size(
            "headers", "the 121 real files with true headers and holes for data", REAL, _real_cut, sparse=True
        ),
        Size("vllm", "sizes that vLLM's kernels accept, 860 MB", _VLLM, lambda: cut(_VLLM, 128 << 20)),
    )
}
