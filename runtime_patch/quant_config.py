"""MIXED_PRECISION with block-FP8 linears: one block per layer, the rest as vLLM does it.

Made by runtime_patch.naming for manifests with FP8_BLOCK entries alone. It travels from the server to the workers by
pickle, and takes the ledger with it: a process that receives one applies the patches before it builds a layer.

embed_tokens stays BF16 in our checkpoints, so the embedding needs no method of its own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from shardmill.runtime_patch import plugin, tuned_configs
from shardmill.runtime_patch.block_linear import BlockLinearMethod
from shardmill.runtime_patch.entries import Entries
from shardmill.runtime_patch.errors import PatchError


class MixedPrecisionConfig(ModelOptMixedPrecisionConfig):
    """vLLM's MIXED_PRECISION config that also understands FP8_BLOCK entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tuned_configs.serve_ours()

    def __setstate__(self, state: dict[str, Any]) -> None:
        plugin.activate()
        tuned_configs.serve_ours()
        self.__dict__.update(state)

    @cached_property
    def entries(self) -> Entries | None:
        """The manifest's entries, or None where none is block FP8: then everything is the parent's.

        Canonical names are the same before and after `apply_vllm_mapper`, so that the cache never goes stale.
        """
        entries = Entries.read(self.quantized_layers)
        return entries if entries.has_blocks else None

    def has_blocked_weights(self) -> bool:
        return self.entries is not None or super().has_blocked_weights()

    def _resolve_quant_algo(self, prefix: str) -> str | None:
        entry = self.entries.find(prefix) if self.entries else None
        return entry.algorithm if entry else super()._resolve_quant_algo(prefix)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        block = self._block(prefix) if isinstance(layer, LinearBase | ParallelLMHead) else None
        return super().get_quant_method(layer, prefix) if block is None else BlockLinearMethod(block)

    def _block(self, prefix: str) -> int | None:
        entry = self.entries.find(prefix) if self.entries else None
        if entry is None or entry.block is None:
            return None
        if self.is_layer_excluded(prefix):
            raise PatchError(f"the manifest both excludes {prefix} and lists it as {entry.algorithm}")
        return entry.block


def serves_blocks(quant_config: object) -> bool:
    """Whether a model built with this quant_config is one of our checkpoints."""
    return isinstance(quant_config, MixedPrecisionConfig) and quant_config.entries is not None
