"""Blocks so small that their scale or their quotients would touch subnormal f32 numbers.

A process may have set its processor to flush subnormal numbers to zero (torch.set_flush_denormal, a library
built with -ffast-math), and float arithmetic on such a block then gives other bytes. So here numbers are read
as whole multiples of 2^-149, the smallest f32, and divided as integers or as f64, which are normal. The
result is the bits that IEEE f32 division gives where subnormal numbers are kept.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_numpy import e4m3_codes, load_magnitudes
from shardmill.kernels.formats import E4M3_MAX, F32, U8, U32

SMALLEST_ROW_SCALE: Final = 2.0**-116
"""From this scale on, |w| subnormal gives the code 0 whether flushed or not: 2^-126 / 2^-116 is E4M3's first tie."""

_SMALLEST_ROW_SCALE_BITS: Final = np.float32(SMALLEST_ROW_SCALE).view(np.uint32)
_LARGEST_SUBNORMAL_AMAX_BITS: Final = np.float32(E4M3_MAX * 2.0**-126).view(np.uint32)
_MAX: Final = int(E4M3_MAX)


def is_tiny(scales: F32) -> NDArray[np.bool_]:
    """Which scales (positive f32, any shape) lie below SMALLEST_ROW_SCALE, compared as integers."""
    return scales.view(np.uint32) < _SMALLEST_ROW_SCALE_BITS


def mend_subnormal_scales(maxima: U32, scales: F32) -> None:
    """Where 0 < amax < 448 * 2^-126, set scales to the f32 nearest amax / 448, but never to zero.

    maxima: u32, f32 bits of amax; scales: f32 of the same shape, in and out.
    """
    small = (maxima > 0) & (maxima < _LARGEST_SUBNORMAL_AMAX_BITS)
    if small.any():
        units, rest = np.divmod(_units(maxima[small]), _MAX)
        units += (2 * rest > _MAX) | ((2 * rest == _MAX) & (units % 2 == 1))
        scales.view(np.uint32)[small] = np.maximum(
            units, 1
        )  # below 2^-126 an f32's bits count units of 2^-149


def tiny_codes(source: NDArray[Any], scale: np.float32) -> U8:
    """E4M3 codes of one block: RNE of min(|w| / scale, 448), the quotient rounded to f32, sign kept.

    source: u16 (BF16 bits), f16 or f32 of any shape, |w| < 2^-100; scale below SMALLEST_ROW_SCALE.
    """
    flat = np.ascontiguousarray(source).reshape(-1)
    unsigned = flat.view(f"u{flat.itemsize}")
    bits = np.empty(flat.size, np.uint32)
    load_magnitudes(flat, bits, np.empty_like(unsigned))
    # Both operands have 24 significant bits and f64 has 53 >= 2 * 24 + 2, so rounding twice is rounding once.
    quotients = (_units(bits) / _units(np.asarray(scale).reshape(1).view(np.uint32))).astype(np.float32)
    codes = e4m3_codes(np.minimum(quotients, np.float32(E4M3_MAX)))
    signs = (unsigned >> (8 * flat.itemsize - 8)).astype(np.uint8) & np.uint8(0x80)
    return (codes | signs).reshape(source.shape)


def _units(bits: U32) -> NDArray[np.int64]:
    """f32 bits of magnitudes below 2^-100 -> the numbers in units of 2^-149, exact."""
    exponent, mantissa = (
        (bits >> np.uint32(23)).astype(np.int64),
        (bits & np.uint32(0x7FFFFF)).astype(np.int64),
    )
    return np.where(exponent == 0, mantissa, (mantissa | 1 << 23) << np.maximum(exponent - 1, 0))
