"""As stored is not as served: what a runtime multiplies with after it made powers of two of a weight's scales.

vLLM 0.33.0 does so by default (VLLM_USE_DEEP_GEMM_E8M0=1) with every [128,128] weight that its DeepGEMM kernel takes:
`requant_weight_ue8m0_inplace` decodes the weight to f32 and encodes it anew, each block with
scale = 2^ceil(log2(max(amax, 1e-4) / 448)) and codes rounded to nearest even. Where a block's largest code is 448 that
is 2^ceil(log2 scale).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from shardmill.kernels.formats import E4M3_MAX, E4M3_VALUES, F32, U8

Block = tuple[int, int]

_REROUNDED_BLOCK: Block = (128, 128)
_ROWS_MULTIPLE, _COLS_MULTIPLE = 64, 128  # vllm.utils.deep_gemm.should_use_deepgemm_for_fp8_linear
_AMAX_MIN = np.float32(1e-4)


def is_rerounded(shape: tuple[int, ...], block: Block) -> bool:
    """Whether the runtime re-rounds a weight [R, C] of this block."""
    if len(shape) != 2 or block != _REROUNDED_BLOCK:
        return False
    return shape[0] % _ROWS_MULTIPLE == 0 and shape[1] % _COLS_MULTIPLE == 0


def reround(values: F32, block: Block) -> F32:
    """The values as served, of decoded `values` f32 [rows, C] that begin on a block row."""
    magnitudes = np.abs(values)
    amax = np.maximum.reduceat(magnitudes, range(0, values.shape[0], block[0]), axis=0)
    amax = np.maximum.reduceat(amax, range(0, values.shape[1], block[1]), axis=1)
    scales = power_of_two_above((np.maximum(amax, _AMAX_MIN) / np.float32(E4M3_MAX)).astype(np.float32))
    wide = np.repeat(scales, block[1], axis=1)[:, : values.shape[1]]
    scale = np.repeat(wide, block[0], axis=0)[: values.shape[0]]
    quotient = np.clip(values / scale, -E4M3_MAX, E4M3_MAX)
    codes: U8 = quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return E4M3_VALUES[codes] * scale


def power_of_two_above(values: F32) -> F32:
    """The smallest power of two that is not below each positive value; exact."""
    fraction, exponent = np.frexp(values)
    powers: F32 = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    return powers
