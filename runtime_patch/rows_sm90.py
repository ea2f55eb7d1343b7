"""Compact rows under FlashMLA's sparse MLA on SM90 (H100, H200).

vLLM's separate prefill path reads the whole context inside one long method. Its own mixed-batch path, which
upstream uses for few heads, sends prefill tokens through the decode kernel instead: with it, one hook sees every
read. FlashMLA knows 656 B rows alone, so every rung is restaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.ops.flashmla import get_mla_metadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from shardmill.kernels.kv_row import RowLayout
from shardmill.runtime_patch import rows, settings


class CompactSm90Builder(FlashMLASparseMetadataBuilder):
    """Metadata of the mixed-batch path, whatever the number of heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8_use_mixed_batch = True


class CompactSm90Backend(FlashMLASparseBackend):
    """FLASHMLA_SPARSE with the row of the environment's rung."""

    @classmethod
    def row_layout(cls) -> RowLayout:
        return rows.required_layout()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages of our rows; blocks lie a multiple of 64 rows apart, since the hook sees flat pages of 64."""
        row_bytes = cls.row_layout().row_bytes
        return replace(spec, state_content_bytes=row_bytes, block_stride_alignment=rows.PAGE_ROWS * row_bytes)

    @staticmethod
    def get_builder_cls() -> type[CompactSm90Builder]:
        return CompactSm90Builder

    @staticmethod
    def get_impl_cls() -> type[CompactSm90Impl]:
        return CompactSm90Impl


@contextmanager
def without_prefill_workspace(attention_config: Any) -> Iterator[None]:
    """The parent reserves the whole context as BF16 rows (1.1 GiB at 524,288 tokens) for a prefill that we don't take.

    Its own factor scales that reservation; nothing else on the mixed-batch path asks for it.
    """
    factor = attention_config.sparse_mla_prefill_workspace_factor
    attention_config.sparse_mla_prefill_workspace_factor = 0
    try:
        yield
    finally:
        attention_config.sparse_mla_prefill_workspace_factor = factor


class CompactSm90Impl(FlashMLASparseImpl):
    """Packs rows when they are written and restages them for FlashMLA's decode kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        with without_prefill_workspace(config.attention_config):
            super().__init__(*args, **kwargs)
        rows.refuse_unserved(self, config)
        self.layout = rows.required_layout()
        self.stage = rows.RowStage(
            self.layout,
            self.topk_indices_buffer.shape[1],
            config.scheduler_config.max_num_batched_tokens,
            settings.current().stage_bytes,
        )
        # One workspace for the parent's query, which begins it, and our scratch behind it; what the parent lists
        # between them belongs to its separate prefill path.
        del self.workspace_specs[1:]
        self.workspace_specs.extend(self.stage.specs)
        current_workspace_manager().get_simultaneous(*self.workspace_specs)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        if kv_cache.numel():
            rows.write_rows(kv_c_normed, kv_cache, slot_mapping, self.layout)

    def _fp8_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        kernel_metadata: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [1, T, heads, 576] and topk_indices int32 [1, T, topk] -> output and LSE, chunk by chunk.

        FlashMLA's scheduler metadata belongs to a shape: the caller's serves where all tokens are one chunk.
        """
        *_, scratch, places = current_workspace_manager().get_simultaneous(*self.workspace_specs)
        whole = q.shape[1] <= self.stage.tokens
        outputs, lses = [], []
        for part in self.stage.chunks(q.shape[1]):
            staged, found = self.stage.restage(kv_c_and_k_pe_cache, topk_indices[0, part], scratch, places)
            metadata = (
                kernel_metadata
                if whole
                else replace(kernel_metadata, scheduler_metadata=get_mla_metadata()[0])
            )
            output, lse = super()._fp8_flash_mla_kernel(q[:, part], staged, found.unsqueeze(0), metadata)
            outputs.append(output)
            lses.append(lse)
        return (outputs[0], lses[0]) if whole else (torch.cat(outputs, 1), torch.cat(lses, -1))
