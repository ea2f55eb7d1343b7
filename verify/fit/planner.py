"""vLLM 0.33.0's KV-cache planner as arithmetic: block size, groups, bytes a block, blocks a request.

All layers share one pool of equal blocks. A group of layers takes block ids together, so a request costs the sum of
its groups' blocks, each of the width of the widest group. Source: vLLM 0.33.0, `v1/core/kv_cache_planning.py`
(grouping, packing) and `v1/kv_cache_interface.py` (blocks a request); compared with the real planner by
`make vllm-test`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer asks of the planner.

    kind: "paged" pays a page per `block_tokens` tokens, up to `tokens_max` where a window bounds it; "state" and
    "ring" hold `fixed_blocks` pages a request, whatever its length. Blocks start at multiples of `stride_bytes`.
    """

    kind: Literal["paged", "state", "ring"]
    page_bytes: int
    block_tokens: int
    fixed_blocks: int = 0
    stride_bytes: int = 1
    tokens_max: int | None = None

    def blocks(self, tokens: int) -> int:
        """Pages that a request of `tokens` tokens holds."""
        if self.kind != "paged":
            return self.fixed_blocks
        if self.tokens_max is None:
            return ceil_div(tokens, self.block_tokens)
        return ceil_div(min(tokens, self.tokens_max), self.block_tokens) + 1


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The pool's unit and what a request takes of it. One block of any pool is the null block, never given out."""

    block_bytes: int
    groups: tuple[tuple[LayerCache, ...], ...]

    def request_blocks(self, tokens: int) -> int:
        return sum(max(layer.blocks(tokens) for layer in group) for group in self.groups)

    def need_bytes(self, tokens: int) -> int:
        """Bytes of one request, the null block not counted: what vLLM compares with the pool less one block."""
        return self.request_blocks(tokens) * self.block_bytes

    def pin_bytes(self, tokens: int, sequences: int = 1) -> int:
        """The smallest pool that admits `sequences` requests of this length."""
        return (sequences * self.request_blocks(tokens) + 1) * self.block_bytes

    def pool_blocks(self, pool_bytes: int) -> int:
        return pool_bytes // self.block_bytes

    def bytes_per_token(self, max_len: int) -> float:
        return self.need_bytes(max_len) / max_len

    def pool_tokens(self, pool_bytes: int, max_len: int) -> int:
        """The figure that vLLM logs as the cache's size: concurrency times max_len, the null block included."""
        return self.pool_blocks(pool_bytes) * max_len // self.request_blocks(max_len)

    def concurrency(self, pool_bytes: int, max_len: int) -> float:
        return self.pool_blocks(pool_bytes) / self.request_blocks(max_len)

    def sequences(self, pool_bytes: int, max_len: int) -> int:
        """Whole requests of this length that the pool holds at once."""
        return max(self.pool_blocks(pool_bytes) - 1, 0) // self.request_blocks(max_len)

    def max_context(self, pool_bytes: int, limit: int) -> int:
        """The longest request that the pool admits, at most `limit`; 0 where none does."""
        blocks = self.pool_blocks(pool_bytes) - 1
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.request_blocks(middle) <= blocks else (low, middle - 1)
        return low


def plan_blocks(layers: Sequence[LayerCache]) -> KvPlan:
    """Group the layers as vLLM does: all alike, mixed page sizes packed side by side, or equal pages in columns."""
    buckets = _buckets(layers)
    if len(buckets) == 1:
        stride = lcm(*(layer.stride_bytes for layer in layers))
        return KvPlan(ceil_div(sum(layer.page_bytes for layer in layers), stride) * stride, (tuple(layers),))
    if len({layer.page_bytes for layer in layers}) > 1:
        return _packed(layers, buckets)
    return _columns(layers, buckets)


def _padded(layer: LayerCache) -> int:
    """A page in a region of its own, as one group has it: padded to its own stride."""
    return ceil_div(layer.page_bytes, layer.stride_bytes) * layer.stride_bytes


def _buckets(layers: Sequence[LayerCache]) -> list[list[LayerCache]]:
    """Layers whose blocks move together: same kind, same tokens a block, same window; states also the same page."""
    buckets: dict[tuple[object, ...], list[LayerCache]] = {}
    for layer in layers:
        page = layer.page_bytes if layer.kind == "state" else None
        key = (layer.kind, layer.block_tokens, layer.tokens_max, layer.fixed_blocks, page)
        buckets.setdefault(key, []).append(layer)
    return list(buckets.values())


def _packed(layers: Sequence[LayerCache], buckets: Sequence[list[LayerCache]]) -> KvPlan:
    """Block-outermost packing of mixed page sizes.

    A bucket with equally many layers of each page size repeats a pattern; the largest such bucket sets how many
    repeats a group holds. State buckets are cut to what fits beside the widest group, never widening the block.
    """
    counts = [Counter(layer.page_bytes for layer in bucket) for bucket in buckets]
    balanced = [len(set(count.values())) == 1 for count in counts]
    repeats = [max(count.values()) for count in counts]
    floor = max((r for r, b, c in zip(repeats, balanced, counts, strict=True) if b and len(c) > 1), default=0)
    per_group = (
        _least_padding([r for r, b in zip(repeats, balanced, strict=True) if b], floor) if floor else None
    )

    def wanted(i: int) -> int:
        return ceil_div(repeats[i], per_group) if per_group and balanced[i] else 1

    def is_state(i: int) -> bool:
        first = buckets[i][0]
        return first.kind != "paged" or (per_group is None and first.tokens_max is not None)

    def widest(i: int, groups: int) -> int:
        return sum(ceil_div(n, groups) * page for page, n in counts[i].items())

    anchor = max(widest(i, len(bucket) if is_state(i) else wanted(i)) for i, bucket in enumerate(buckets))
    groups: list[tuple[LayerCache, ...]] = []
    for i, bucket in enumerate(buckets):
        n = wanted(i)
        if is_state(i):
            n = max(n, ceil_div(len(bucket), max(anchor // bucket[0].page_bytes, 1)))
        groups += [tuple(_repeats(bucket, n, j)) for j in range(n)]
    width = max(sum(layer.page_bytes for layer in group) for group in groups)
    stride = lcm(*(layer.stride_bytes for layer in layers))
    return KvPlan(ceil_div(width, stride) * stride, tuple(groups))


def _repeats(bucket: Sequence[LayerCache], groups: int, index: int) -> list[LayerCache]:
    """Every `groups`-th repeat of the bucket's pattern, starting at `index`."""
    by_page: dict[int, list[LayerCache]] = {}
    for layer in bucket:
        by_page.setdefault(layer.page_bytes, []).append(layer)
    return [layer for column in by_page.values() for layer in column[index::groups]]


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size >= floor that rounds all counts up with the least padding; the larger one of equals."""
    return min(range(floor, max(counts) + 1), key=lambda size: (sum(-n % size for n in counts), -size))


def _columns(layers: Sequence[LayerCache], buckets: Sequence[list[LayerCache]]) -> KvPlan:
    """Equal pages: buckets are cut into groups of one size, the smallest bucket's unless all are nearly as large."""
    page = max(_padded(layer) for layer in layers)
    sizes = [len(bucket) for bucket in buckets]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[tuple[LayerCache, ...]] = []
    for bucket in buckets:
        n = ceil_div(len(bucket), size)
        groups += [tuple(bucket[j::n]) for j in range(n)]
    return KvPlan(max(len(group) for group in groups) * page, tuple(groups))
