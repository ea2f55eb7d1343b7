"""Compact rows under FlashInfer's sparse MLA on SM120 (RTX PRO 6000).

FlashInfer takes rows of 528 B and more for a model without rotary part, so rung 8888 goes to it as it lies. The
narrower rungs are restaged. Decode, extends and prefill all come through one hook with physical row numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseSM120Backend
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import FlashInferMLASparseSM120Impl
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from shardmill.kernels.kv_row import RowLayout
from shardmill.runtime_patch import rows, settings

NATIVE_ROW_BYTES = 528  # FlashInfer's payload of a row without rotary part


class CompactSm120Backend(FlashInferMLASparseSM120Backend):
    """FLASHINFER_MLA_SPARSE_SM120 with the row of the environment's rung."""

    @classmethod
    def row_layout(cls) -> RowLayout:
        return rows.required_layout()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Pages of our rows; the parent aligns blocks to 64 of them."""
        return super().customize_spec(replace(spec, state_content_bytes=cls.row_layout().row_bytes))

    @staticmethod
    def get_impl_cls() -> type[CompactSm120Impl]:
        return CompactSm120Impl


class CompactSm120Impl(FlashInferMLASparseSM120Impl):
    """Packs rows when they are written, restages them where FlashInfer cannot read them as they lie."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        rows.refuse_unserved(self, config)
        self.layout = rows.required_layout()
        self.stage: rows.RowStage | None = None
        if self.layout.row_bytes < NATIVE_ROW_BYTES:
            self.stage = rows.RowStage(
                self.layout,
                self.topk_indices_buffer.shape[1],
                config.scheduler_config.max_num_batched_tokens,
                settings.current().stage_bytes,
            )
            current_workspace_manager().get_simultaneous(*self.stage.specs)

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

    def _run_mqa_kernel(
        self, q: torch.Tensor, kv_cache: torch.Tensor, topk_indices_physical: torch.Tensor
    ) -> torch.Tensor:
        if self.stage is None:
            return super()._run_mqa_kernel(q, kv_cache, topk_indices_physical)
        scratch, places = current_workspace_manager().get_simultaneous(*self.stage.specs)
        outputs = []
        for part in self.stage.chunks(q.shape[0]):
            staged, found = self.stage.restage(kv_cache, topk_indices_physical[part], scratch, places)
            outputs.append(super()._run_mqa_kernel(q[part], staged, found))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
