"""From a block's amax to its scale: the recipes that need nothing else of the block.

maxima: u32, the f32 bits of each block's largest magnitude, finite, any shape. Scales: f32 of the same shape,
positive and finite always. A block of zeros gets the scale 1.
"""

import numpy as np

from shardmill.kernels.block_fp8_tiny import mend_subnormal_scales
from shardmill.kernels.formats import E4M3_MAX, F32, U32

_MANTISSA = np.uint32(0x7FFFFF)
_SMALLEST_BF16_BITS = np.uint32(1 << 16)  # 2^-133
_SMALLEST_UE8M0_BITS = np.uint32(1 << 22)  # 2^-127, the code 0 of UE8M0


def amax_scales(maxima: U32) -> F32:
    """amax / 448, one IEEE f32 division, whatever the processor's flush-to-zero flags say."""
    scales = maxima.view(np.float32) / np.float32(E4M3_MAX)
    scales[maxima == 0] = 1.0
    mend_subnormal_scales(maxima, scales)
    return scales


def bf16_scales(maxima: U32) -> F32:
    """amax / 448 in f32, rounded to BF16, ties to even, and >= 2^-133, the smallest BF16.

    A loader that keeps scales in the model's dtype has the very number, and code times scale needs 12 bits.
    """
    bits = amax_scales(maxima).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)) & ~np.uint32(0xFFFF)
    scales: F32 = np.maximum(rounded, _SMALLEST_BF16_BITS).view(np.float32)
    return scales


def ue8m0_scales(maxima: U32) -> F32:
    """The smallest power of two that is >= amax / 448 and >= 2^-127, as DeepGEMM rounds scales at load.

    Rounded to f32 or not, amax / 448 lies on the same side of every power of two.
    """
    bits = amax_scales(maxima).view(np.uint32)
    rounded = (bits + _MANTISSA) & ~_MANTISSA  # the next power of two, for normal f32 numbers
    subnormal = bits <= _MANTISSA
    rounded[subnormal] = np.where(
        bits[subnormal] <= _SMALLEST_UE8M0_BITS, _SMALLEST_UE8M0_BITS, _MANTISSA + 1
    )
    return rounded.view(np.float32)
