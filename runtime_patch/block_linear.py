"""Linear layers with block-FP8 weights: parameters, scales and the kernel that runs them.

vLLM's DeepSeek-style method already holds a `weight` and a `weight_scale_inv` of any square block and shards both.
Ours are the scales of lm_head, which load by block rows; a check that every scale was loaded; and kernels: one that
can run [32,32], and f32 scales for [128,128] where the card's DeepGEMM kernel would need powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    init_fp8_linear_kernel,
)
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from shardmill.runtime_patch.block_kernel import BlockGemmKernel
from shardmill.runtime_patch.block_scales import check_filled, lm_head_loader
from shardmill.runtime_patch.errors import PatchError


@register_weight_loader_v2_supported_method
class BlockLinearMethod(Fp8LinearMethod):
    """vLLM's block-FP8 linear method with one block [block, block] and a kernel that is known to run it."""

    def __init__(self, block: int) -> None:
        super().__init__(
            Fp8Config(
                is_checkpoint_fp8_serialized=True,
                activation_scheme="dynamic",
                weight_block_size=[block, block],
            )
        )
        self.block = block

    def create_weights(self, layer: torch.nn.Module, *args: Any, **attributes: Any) -> None:
        if isinstance(layer, ParallelLMHead):
            attributes["weight_loader"] = lm_head_loader(layer, self.block, attributes["weight_loader"])
        super().create_weights(layer, *args, **attributes)
        self._choose_kernel(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        check_filled(layer)
        super().process_weights_after_loading(layer)

    def _choose_kernel(self, layer: torch.nn.Module) -> None:
        """Replaces vLLM's own choice, which the parent has just made, where that one cannot serve the block."""
        forced = forced_kernel(self.block, blackwell(), envs.VLLM_USE_DEEP_GEMM_E8M0)
        if forced is None:
            return
        self.fp8_linear = init_fp8_linear_kernel(
            activation_quant_key=self.activation_quant_key,
            weight_quant_key=self.weight_quant_key,
            weight_shape=layer.weight.shape,
            input_dtype=self.input_dtype,
            out_dtype=self.out_dtype,
            force_kernel=forced,
            module_name=f"{type(self).__name__} [{self.block},{self.block}]",
        )
        self.use_marlin = False
        if not isinstance(self.fp8_linear, forced):
            raise PatchError(
                f"[{self.block},{self.block}] weights need {forced.__name__}, which this card or this build of "
                "vLLM does not offer"
            )


def forced_kernel(block: int, is_blackwell: bool, power_of_two_scales: bool) -> type | None:
    """The kernel class for a block, or None to leave the choice to vLLM.

    [32,32]: vLLM would take Marlin (dies after load) or Humming. [128,128] on Blackwell: DeepGEMM's kernel
    multiplies by UE8M0 bytes, so it re-rounds f32 scales to powers of two at load; when that is switched off
    (VLLM_USE_DEEP_GEMM_E8M0=0) it cannot run at all, and CUTLASS, which takes f32 scales, must stand in.
    """
    if block == 32:
        return BlockGemmKernel
    return CutlassFp8BlockScaledMMKernel if is_blackwell and not power_of_two_scales else None


def blackwell() -> bool:
    """Whether the card's DeepGEMM kernels multiply by UE8M0 scale bytes (SM100 and SM120)."""
    return bool(current_platform.has_device_capability(100))
