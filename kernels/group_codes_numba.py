"""The loops of shardmill.kernels.group_codes, compiled by numba: the same bytes, several times as fast.

A row at a time, each pass over contiguous memory, so that LLVM makes vector code of it. fastmath stays off.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.e4m3_numba import compiled, f32_bits, spread
from shardmill.kernels.formats import F32, U8


@compiled
def e2m1_packed(bits: NDArray[Any], narrow: bool, divisors: F32, group: int) -> U8:
    """u8 [rows, C/2]; see GroupCodes.e2m1."""
    rows, C = bits.shape
    packed, codes = np.empty((rows, C // 2), np.uint8), np.empty(C, np.uint8)
    pairs, wide = codes.view(np.uint16), np.empty(C, np.float32)
    for i in range(rows):
        spread(divisors[i], group, wide)
        for j in range(C):
            codes[j] = _e2m1(f32_bits(bits[i, j], narrow), wide[j])
        for j in range(C // 2):  # a little-endian pair holds the even column below
            packed[i, j] = np.uint8((pairs[j] & np.uint16(0x0F)) | (pairs[j] >> np.uint16(4)))
    return packed


@compiled
def e2m1_errors(
    bits: NDArray[Any], narrow: bool, packed: U8, scales: F32, group: int, values: F32
) -> NDArray[np.int64]:
    """i64 [rows, C/g]; see GroupCodes.e2m1_errors."""
    sums = np.empty(scales.shape, np.int64)
    for i in range(bits.shape[0]):
        for k in range(scales.shape[1]):
            scale, total = scales[i, k], np.int64(0)
            for j in range(k * group, (k + 1) * group):
                code = (packed[i, j // 2] >> np.uint8(4 * (j & 1))) & np.uint8(15)
                value = np.uint32(f32_bits(bits[i, j], narrow)).view(np.float32)
                error = np.float32(values[code] - np.float32(value / scale))
                wide = np.float64(min(abs(error), np.float32(32)))
                total += np.int64(wide * wide * 2.0**30 + 0.5)
            sums[i, k] = total
    return sums


@compiled
def integer_codes(
    bits: NDArray[Any], narrow: bool, divisors: F32, group: int, low: Any, high: Any
) -> NDArray[np.int8]:
    """i8 [rows, C]; see GroupCodes.integers."""
    rows, C = bits.shape
    codes, wide = np.empty((rows, C), np.int8), np.empty(C, np.float32)
    for i in range(rows):
        spread(divisors[i], group, wide)
        for j in range(C):
            value = np.uint32(f32_bits(bits[i, j], narrow)).view(np.float32)
            quotient = np.float32(np.rint(np.float32(value / wide[j])))
            codes[i, j] = np.int8(min(max(quotient, low), high))
    return codes


@compiled
def _e2m1(number: Any, divisor: Any) -> Any:
    """The code, u8, of the f32 with these bits / divisor; see group_codes.e2m1_codes."""
    magnitude = np.uint32(number & np.uint32(0x7FFFFFFF)).view(np.float32)
    quotient = min(np.float32(magnitude / divisor), np.float32(6))
    exponent = max(np.uint32(np.float32(quotient).view(np.uint32) >> np.uint32(23)), np.uint32(127))
    anchor = np.uint32(exponent * np.uint32((1 << 23) + 2) + np.uint32((22 << 23) - 254)).view(np.float32)
    code = np.uint8(np.uint8(np.float32(quotient + anchor).view(np.uint32)) & np.uint8(7))
    return code | np.uint8(np.uint8(number >> np.uint32(28)) & np.uint8(8))
