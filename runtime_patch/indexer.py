"""vLLM's sparse indexer for GLM-5.3 with a prefill whose memory does not grow with the context.

Stock gathers the keys of the whole context and scores a block of rows against all of them. Here vLLM's own code
still writes the cache, fills short prefills and serves decode; only the scoring of long prefills is done tile by
tile (runtime_patch.tiling) with a two-level top-k (kernels.torch_topk). The pools selected have the same scores. Of
equal scores at the edge the lower pools are taken, whatever the tiles, and pools are written in rising order; stock
leaves both to chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.sparse_attn_indexer import (
    PrefillRowShard,
    _reserve_row_shard_exchange_transient,
    as_fp32_logits,
)
from vllm.models.glm5next.common.sparse_indexer import RADIX_TOPK_WORKSPACE_SIZE
from vllm.models.glm5next.nvidia.ops import kpool_compress
from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool
from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, mqa_logits_use_mx_scales
from vllm.v1.worker.workspace import current_workspace_manager

from shardmill.kernels import torch_topk, triton_topk
from shardmill.runtime_patch import settings, tiling
from shardmill.runtime_patch.quant_config import serves_blocks

REGISTERED = "SparseAttnIndexerKpool"


def register_indexer() -> None:
    """Puts the class below in the place of vLLM's; a second call does nothing."""
    if REGISTERED not in op_registry_oot:
        CustomOp.register_oot(name=REGISTERED)(BoundedIndexer)


class BoundedIndexer(SparseAttnIndexerKpool):
    """SparseAttnIndexerKpool, bounded for our checkpoints and for compact rows; elsewhere stock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        chosen = settings.current()
        parallel = config.parallel_config
        asked = serves_blocks(config.quant_config) or chosen.rung is not None
        alone = parallel.decode_context_parallel_size == 1 == parallel.prefill_context_parallel_size
        alone = alone and not parallel.use_ubatching  # two half batches at once were never tried
        plain = not self.use_fp4_cache and not mqa_logits_use_mx_scales()  # SM100 packs its scales otherwise
        self.bounded = asked and alone and plain
        self.budget_bytes = chosen.indexer_bytes
        self.requests_max = config.scheduler_config.max_num_seqs
        drafts = config.speculative_config
        step = 1 + (drafts.num_speculative_tokens if drafts else 0)
        self.decode_tokens_max = min(self.requests_max * step, config.scheduler_config.max_num_batched_tokens)

    @property
    def pools_max(self) -> int:
        """Pools whose keys are gathered at a time, whatever the context: the size of the workspace."""
        page = self.k_cache.cache_config.block_size
        return tiling.gathered_most(self.requests_max, page, self.budget_bytes)

    def forward_cuda(
        self,
        hidden_states: torch.Tensor,
        q_quant: Any,
        k: torch.Tensor,
        weights: torch.Tensor,
        **pooling: Any,
    ) -> torch.Tensor:
        if not self.bounded:
            return super().forward_cuda(hidden_states, q_quant, k, weights, **pooling)
        bounded_forward(self, hidden_states, q_quant, k, weights, **pooling)
        return self.topk_indices_buffer

    def stock_forward(self, *args: Any, **pooling: Any) -> None:
        """vLLM's own code, which takes its workspace of gathered keys even where it has nothing to gather."""
        self.max_total_seq_len = self.pools_max
        super().forward_cuda(*args, **pooling)

    def reserve(self, device: torch.device) -> None:
        """The profiling run: takes what a step can take at most, so that the planner leaves room for it.

        That is the prefill's budget or a decode step's logits, which are vLLM's own and grow with the context, one
        after the other; and what the exchange of shared-out rows takes.
        """
        current_workspace_manager().get_simultaneous(
            *self.workspace(), ((RADIX_TOPK_WORKSPACE_SIZE,), torch.uint8)
        )
        decode_bytes = self.decode_tokens_max * self.max_pool_len * tiling.LOGIT_BYTES
        torch.empty(max(self.budget_bytes, decode_bytes), dtype=torch.uint8, device=device)
        _reserve_row_shard_exchange_transient(self.topk_indices_buffer, device)

    def workspace(self) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
        """Gathered keys and their scales: u8 views of e4m3 [pools, 128] and f32 [pools, 1]."""
        return (
            ((self.pools_max, self.head_dim), torch.float8_e4m3fn),
            ((self.pools_max, 4), torch.uint8),
        )


@eager_break_during_capture
def bounded_forward(
    op: BoundedIndexer,
    hidden_states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    **pooling: Any,
) -> None:
    """Fills op.topk_indices_buffer: vLLM's code without the prefill's chunks, then those chunks tile by tile.

    Whether there is metadata is asked in here, not by the caller: a PIECEWISE graph is captured without, and what the
    caller decided then would be decided for every replay. Tensors come as arguments of their own: the decorator keeps
    weak references to those.
    """
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        op.reserve(hidden_states.device)
        return
    name = op.k_cache.prefix
    full = metadata[name]
    prefill = full.prefill if full.num_prefills else None
    if prefill is None or pooling["positions"] is None:
        op.stock_forward(hidden_states, q, k, weights, **pooling)
        return
    metadata[name] = replace(full, prefill=replace(prefill, chunks=[], row_shard_sizes=None))
    try:
        op.stock_forward(hidden_states, q, k, weights, **pooling)
    finally:
        metadata[name] = full
    if not 0 <= prefill.max_prefill_seq_len <= op.topk_tokens:
        _select_prefill(op, full, prefill, q, weights, pooling["positions"], pooling["index_kpool"])


def _select_prefill(
    op: BoundedIndexer,
    full: Any,
    prefill: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: Any,
    kpool: int,
) -> None:
    """The top-k tokens of each prefill row of this rank, exchanged with the others where rows are shared out."""
    shard = PrefillRowShard.from_metadata(prefill, full.num_decode_tokens)
    for chunk in prefill.chunks:
        window = (chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
        window = window if shard is None else shard.narrow(chunk)
        if window is None:
            continue
        begin, end, starts, ends = window
        pools = select_pools(
            op, chunk, q[begin:end], weights[begin:end], starts, ends, op.topk_tokens // kpool
        )
        seen = positions[begin:end].to(torch.int32) + 1
        tokens = kpool_compress.expand_pools_and_append_tail(pools, seen, kpool)
        op.topk_indices_buffer[begin:end, : tokens.shape[-1]] = tokens
    if shard is not None:
        shard.exchange_topk(op.topk_indices_buffer, op.topk_tokens + kpool - 1)


def select_pools(
    op: BoundedIndexer,
    chunk: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """The k best pools, int32 [rows, k] counted from each row's request, -1 where there are fewer.

    q e4m3 [rows, heads, 128]; weights f32 [rows, heads]; starts and ends int32 [rows]: the pools that a row may
    see, counted through the chunk's requests.
    """
    rows = q.shape[0]
    plan = tiling.plan(
        rows=rows,
        requests=chunk.num_reqs,
        longest=chunk.max_seqlen_k,
        selected=k,
        page=op.k_cache.kv_cache.shape[1],
        gathered=op.pools_max,
        budget_bytes=op.budget_bytes,
    )
    request = torch.searchsorted(chunk.local_cu_seq_lens[1:], starts, right=True).clamp_max(
        chunk.num_reqs - 1
    )
    parts = [slice(begin, min(begin + plan.rows, rows)) for begin in range(0, rows, plan.rows)]
    found = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    for part in parts:
        running = torch_topk.Running(part.stop - part.start, k, tiling.WINNERS, q.device, _best_of)
        for first, keys, scales, offsets in _gathered_tiles(op, chunk, plan):
            lengths = (ends[part] - starts[part] - first).clamp(0, plan.pools)
            begins = offsets[request[part]]
            running.add(
                first, _logits(q[part], keys, scales, weights[part], begins, lengths, plan.pools), lengths
            )
        found[part] = running.best()
    return found


def _gathered_tiles(
    op: BoundedIndexer, chunk: Any, plan: tiling.Tiling
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(first pool, keys, scales, offsets of the requests) of each tile; keys and scales are overwritten by the next."""
    cache = op.k_cache.kv_cache
    values, scales = current_workspace_manager().get_simultaneous(*op.workspace())
    values, scales = values[: plan.gathered], scales[: plan.gathered]
    lengths = torch.diff(chunk.local_cu_seq_lens)
    for first in range(0, chunk.max_seqlen_k, plan.pools):
        offsets = torch.zeros_like(chunk.local_cu_seq_lens)
        torch.cumsum((lengths - first).clamp(0, plan.pools), 0, dtype=offsets.dtype, out=offsets[1:])
        pages = chunk.block_table[:, first // cache.shape[1] :].contiguous()
        ops.cp_gather_indexer_k_quant_cache(cache, values, scales, pages, offsets)
        yield first, values, scales.view(torch.float32).squeeze(-1), offsets


def _logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    begins: torch.Tensor,
    lengths: torch.Tensor,
    pools: int,
) -> torch.Tensor:
    """f32 [rows, pools]: a row's first lengths[row] columns are its scores in this tile, the rest is garbage."""
    scores = fp8_fp4_mqa_logits((q, None), (keys, scales), weights, begins, begins + lengths, pools)
    return as_fp32_logits(scores, lengths)


def _best_of(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Columns int32 [rows, k] of the best, by vLLM's kernel, made definite: rising, -1 where there are fewer."""
    chosen = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    torch.ops._C.top_k_per_row_prefill(
        scores,
        torch.zeros_like(lengths),
        lengths,
        chosen,
        scores.shape[0],
        scores.stride(0),
        scores.stride(1),
        k,
    )
    return triton_topk.lowest_of_equals(scores, lengths, chosen)
