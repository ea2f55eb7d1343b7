"""The GEMM of [32,32] block-FP8 weights inside vLLM: its own Triton kernel, and ours for a few tokens.

A decode step multiplies by one to eight rows, which vLLM's kernel pads to a tile of at least 16. Ours reads the
weights once, several rows of output a program. The order of sums differs, so it can be switched off
(VLLM_KVQ_DECODE_GEMM=0), and it stays off under VLLM_BATCH_INVARIANT. Both live in one custom operation, so that
torch.compile and CUDA graphs see one opaque call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm
from vllm.utils.torch_utils import direct_register_custom_op

from shardmill.runtime_patch import settings, tuned_configs


def block_mm(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    """A e4m3 [M, K] with As f32 [M, K/block], times B e4m3 [N, K] with Bs f32 [N/block, K/block] -> dtype [M, N]."""
    if decode_gemm_wanted():
        from shardmill.kernels import block_gemm

        M, (N, K), square = A.shape[0], B.shape, (block, block)
        if block_gemm.decodes(M, K, square, A.device):
            how = block_gemm.choose(M, N, K, square, A.device, _folder(N, K, block, A.device))
            out = block_mm_shape(A, B, As, Bs, block, dtype)
            return block_gemm.gemm(A, As, B, Bs, square, out=out, how=how)
    return w8a8_triton_block_scaled_mm(A, B, As, Bs, [block, block], dtype)


def block_mm_shape(
    A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    return A.new_empty((A.shape[0], B.shape[0]), dtype=dtype)


@cache
def decode_gemm_wanted() -> bool:
    """Asked once a process: the environment is read and checked before the first layer is built."""
    return settings.current().decode_gemm and not envs.VLLM_BATCH_INVARIANT


@cache
def _folder(N: int, K: int, block: int, device: torch.device) -> Path:
    """The folder whose decode table holds for a weight; the distribution's own where none has one."""
    from shardmill.kernels import block_gemm

    name = block_gemm.decode_config_name(N, K, (block, block), block_gemm.device_name(device))
    found = tuned_configs.find(name)
    return block_gemm.CONFIGS if found is None else found.parent


direct_register_custom_op("shardmill_block_mm", block_mm, fake_impl=block_mm_shape)


class BlockGemmKernel(TritonFp8BlockScaledMMKernel):
    """vLLM's Triton block kernel, with the decode kernel in front of it."""

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        block = int(self.weight_group_shape[0])
        return torch.ops.vllm.shardmill_block_mm(A, B, As, Bs, block, self.config.out_dtype)
