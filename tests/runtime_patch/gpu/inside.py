"""What the harness changes inside a vLLM process, and why. A server and its workers get it by an entry point.

**mHC** runs by vLLM's own torch reference where tilelang is not installed.

**Order.** vLLM's top-k kernels write the selected rows in whatever order their threads finish, and attention sums in
that order: two runs of one prompt beyond 2,048 tokens differ in last bits. With GPU_FORWARD_ORDERED=1 the selection,
still vLLM's own, is sorted before it is expanded to tokens.

**BF16 rows** prefill short contexts by FlashAttention, whose extension is too large to pack: torch's attention stands
in where it is missing.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from typing import Any

ORDERED = "GPU_FORWARD_ORDERED"


def prepare() -> None:
    """The entry point: once a process, before a model is built."""
    use_reference_mhc()
    use_torch_prefill()
    if os.environ.get(ORDERED) == "1":
        order_selection()


def use_reference_mhc() -> None:
    import vllm.model_executor.layers.mhc as mhc

    if mhc.HAS_TILELANG_MHC:
        return
    for cls in (mhc.MHCPreOp, mhc.MHCPreDelayedOp, mhc.MHCPostOp, mhc.MHCFusedPostPreOp):
        cls.forward_cuda = cls.forward_hip


def order_selection() -> None:
    import torch
    from vllm.models.glm5next.nvidia.ops import kpool_compress

    original = kpool_compress.expand_pools_and_append_tail

    def ordered(pools: Any, lengths: Any, kpool: int) -> Any:
        last = torch.iinfo(pools.dtype).max
        found = torch.where(pools < 0, last, pools).sort(dim=-1).values
        return original(torch.where(found == last, -1, found), lengths, kpool)

    kpool_compress.expand_pools_and_append_tail = ordered


def use_torch_prefill() -> None:
    spec = importlib.util.find_spec("vllm.vllm_flash_attn._vllm_fa3_C")
    if spec is not None and (spec.origin or "").endswith(".so"):
        return
    from vllm.v1.attention.backends.mla.prefill import flash_attn

    flash_attn.FlashAttnPrefillBackend._flash_attn_varlen_diff_headdims = torch_varlen


def torch_varlen(
    self: Any,
    q: Any,
    k: Any,
    v: Any,
    return_softmax_lse: bool = False,
    softmax_scale: float | None = None,
    out: Any = None,
    output_scale: Any = None,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    causal: bool,
    **_: Any,
) -> Any:
    """Attention of each sequence by itself, in f32: q [T, heads, d], k [S, heads, d], v [S, heads, e]."""
    import torch

    assert output_scale is None
    result = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
    sums = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row, (begin, end) in enumerate(pairwise(ends_q)):
        keys = slice(ends_k[row], ends_k[row + 1])
        scores = torch.einsum("thd,shd->hts", q[begin:end].float(), k[keys].float()) * softmax_scale
        if causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(
                1 + scores.shape[2] - scores.shape[1]
            )
            scores.masked_fill_(later, float("-inf"))
        sums[:, begin:end] = scores.logsumexp(-1)
        result[begin:end] = torch.einsum("hts,she->the", scores.softmax(-1), v[keys].float()).to(q.dtype)
    if out is not None:
        out.copy_(result.view_as(out))
        result = out
    return (result, sums) if return_softmax_lse else result
