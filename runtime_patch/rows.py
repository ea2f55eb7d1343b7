"""Compact KV rows between vLLM's cache and an attention kernel that knows canonical rows alone.

Writing packs each latent into its row. Reading restages: the rows that a kernel is about to touch, its top-k, are
unpacked into a static scratch as canonical 656 B rows, and the kernel gets the scratch and the rows' numbers in it.
The kernel itself is untouched. Tokens come in chunks that fit the scratch: a decode step is one chunk, so that it
can be captured in a CUDA graph; a prefill takes several. Indices of the caller are never changed, since layers
share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardmill.kernels.kv_row import CANONICAL_BYTES, RowLayout
from shardmill.runtime_patch import settings
from shardmill.runtime_patch.errors import PatchError

PAGE_ROWS = 64  # rows of a page, as both attention kernels view the scratch and the cache
LATENT = 512
KV_CACHE_DTYPE = "fp8_ds_mla"
SAFE_CONNECTORS = ("NixlConnector", "SimpleCPUOffloadConnector")


def required_layout() -> RowLayout:
    """The layout that the environment asks for. The backends are registered only where it asks for one."""
    layout = settings.current().layout
    if layout is None:
        raise PatchError(f"a compact KV backend was chosen although {settings.TILES} is unset")
    return layout


def tokens_per_chunk(stage_bytes: int, topk: int) -> int:
    """The largest power of two of tokens whose rows fit the scratch; at least one, whatever it takes."""
    return 1 << max(0, (stage_bytes // (topk * CANONICAL_BYTES)).bit_length() - 1)


class RowStage:
    """The scratch of one attention layer: its size, its chunks, and the restaging into it.

    It holds no tensor of its own: sleep mode at level 2 throws away everything that a model made while it loaded
    and gives back named parameters and buffers alone.
    """

    def __init__(self, layout: RowLayout, topk: int, tokens_max: int, stage_bytes: int) -> None:
        if topk % PAGE_ROWS:
            raise PatchError(
                f"the top-k buffer is {topk} wide; restaged pages need a multiple of {PAGE_ROWS}"
            )
        self.layout = layout
        self.tokens = min(tokens_per_chunk(stage_bytes, topk), tokens_max)
        self.specs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            ((self.tokens * topk, CANONICAL_BYTES), torch.uint8),
            ((self.tokens, topk), torch.int32),
        )

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of at most `self.tokens` tokens that cover `tokens`."""
        return (slice(begin, min(begin + self.tokens, tokens)) for begin in range(0, tokens, self.tokens))

    def restage(
        self, pages: torch.Tensor, wanted: torch.Tensor, scratch: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical rows of `wanted` and where they lie.

        pages: u8 [P, 64, row_bytes]; wanted: int32 [T, topk] row numbers in pages, -1 for none; scratch and places:
        workspace of `specs`. Returns u8 [T * topk / 64, 64, 656] and int32 [T, topk], -1 where wanted is.
        """
        from shardmill.kernels.triton_kv import number_rows, restage_gather

        rows = scratch[: wanted.numel()]
        found = places[: wanted.shape[0]]
        restage_gather(pages, wanted, rows.view(*wanted.shape, CANONICAL_BYTES), self.layout)
        number_rows(wanted, found)
        return rows.view(-1, PAGE_ROWS, CANONICAL_BYTES), found


def write_rows(
    latents: torch.Tensor, cache_pages: torch.Tensor, slots: torch.Tensor, layout: RowLayout
) -> None:
    """bf16 latents [T, 512] into u8 [blocks, block rows, row_bytes] at slots int64 [T]; a negative slot is skipped."""
    from shardmill.kernels.triton_kv import write

    write(latents[: slots.numel()], cache_pages.view(torch.uint8), slots.flatten(), layout)


def refuse_unserved(impl: Any, vllm_config: Any) -> None:
    """Raises PatchError for models and modes whose reads or writes would pass by our rows."""
    parallel = vllm_config.parallel_config
    dtype = impl.kv_cache_dtype
    problems = [
        (
            dtype != KV_CACHE_DTYPE,
            f"the KV cache's dtype is {dtype}; compact rows need --kv-cache-dtype {KV_CACHE_DTYPE} (fp8 on SM120)",
        ),
        (
            impl.qk_rope_head_dim != 0,
            f"qk_rope_head_dim is {impl.qk_rope_head_dim}; our rows hold no rotary part",
        ),
        (
            impl.kv_lora_rank != LATENT,
            f"kv_lora_rank is {impl.kv_lora_rank}, and a row holds {LATENT} elements",
        ),
        (vllm_config.attention_config.hisparse_config is not None, "HiSparse reads rows on its own"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism is on"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism is on"),
        (parallel.use_ubatching, "dual batch overlap runs two half batches at once, which was never tried"),
    ]
    found = [told for holds, told in problems if holds] + _connector_problems(vllm_config.kv_transfer_config)
    if found:
        raise PatchError(f"{settings.TILES} cannot be served here: {'; '.join(found)}")


def _connector_problems(transfer: Any) -> list[str]:
    """A store of KV blocks must not mix layouts: what one server wrote, another would read as its own rows.

    NIXL compares the blocks' lengths when two servers meet, and CPU offload stays within one process. No other
    connector is known to ask.
    """
    name = getattr(transfer, "kv_connector", None)
    if name is None or name in SAFE_CONNECTORS:
        return []
    safe = ", ".join(SAFE_CONNECTORS)
    return [
        f"the KV connector {name} may hand blocks to a server with another KV layout; ones that cannot: {safe}"
    ]


def require_compact(attention: Any) -> None:
    """Raises PatchError where a KV layout is asked for and the attention's backend would ignore it."""
    backend = attention.attn_backend
    if settings.current().rung and not hasattr(backend, "row_layout"):
        raise PatchError(
            f"{settings.TILES} is set, but the attention backend {backend.get_name()} stores vLLM's own rows; "
            "on an H100 or H200 pass --attention-backend FLASHMLA_SPARSE --kv-cache-dtype fp8_ds_mla, on an "
            "RTX PRO 6000 --kv-cache-dtype fp8"
        )
