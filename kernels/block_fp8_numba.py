"""The row form of block FP8, compiled by numba: the same bytes as NumpyRows, several times as fast.

The loops run over whole rows, so that LLVM turns them into vector code whatever the block's width. fastmath
stays off: it would trade the division for a reciprocal. Machine code is cached beside this file, or in the
user's cache folder where that is not writable.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.e4m3_numba import anchor_of, compiled, f32_bits, spread
from shardmill.kernels.formats import F32, U8, U16, U32
from shardmill.kernels.recover_numpy import Bounds


class NumbaRows:
    """Block maxima and codes of matrices [rows, C]; the laws are those of NumpyRows. One object per thread."""

    name: Final = "numba"

    def __init__(self) -> None:
        self._widened: F32 = np.empty(0, np.float32)

    def maxima(self, source: NDArray[Any], block: tuple[int, int]) -> U32:
        """Largest magnitude of each block as f32 bits: u32 [ceil(rows/r), ceil(C/c)]."""
        bits = self._bits(source)
        mask = bits.dtype.type(np.iinfo(bits.dtype).max // 2)  # all but the sign
        r, c = block
        if r == 1 and c > 1 and c & (c - 1) == 0 and bits.shape[1] % c == 0:
            in_rows: U32 = group_maxima(bits, c, mask, bits.itemsize == 2)
            return in_rows
        maxima: U32 = _maxima(bits, *block, mask, bits.itemsize == 2)
        return maxima

    def codes(self, source: NDArray[Any], scales: F32, block: tuple[int, int], out: U8) -> None:
        """out[i, j] = E4M3 code of source[i, j] / scales[i // r, j // c], sign kept, zeros included."""
        bits = self._bits(source)
        _codes(bits, scales, *block, bits.itemsize == 2, out)

    def lossless(self, source: U16, scales: F32, block: tuple[int, int]) -> NDArray[np.bool_]:
        """Which blocks' codes, times their scale, round to the very BF16 they came from: bool [n, m]."""
        from shardmill.kernels.recover_numba import lossless

        same: NDArray[np.bool_] = lossless(source, scales, *block)
        return same

    def squared_errors(self, source: NDArray[Any], scales: F32, block: tuple[int, int]) -> NDArray[np.int64]:
        """Sum over each block of (quotient - code's value)^2, in units of 2^-30: i64 [n, m]."""
        from shardmill.kernels.mse_numba import squared_errors

        bits = self._bits(source)
        sums: NDArray[np.int64] = squared_errors(bits, scales, *block, bits.itemsize == 2)
        return sums

    def candidates(self, sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32:
        """See recover.candidates."""
        from shardmill.kernels.recover_numba import candidates

        found: F32 = candidates(sample, maxima, c, wanted, *bounds)
        return found

    def _bits(self, source: NDArray[Any]) -> NDArray[Any]:
        """BF16 and f32 as the integers they are; f16, which numba cannot compute with, as bits of f32."""
        if source.dtype != np.float16:
            return source.view(f"u{source.itemsize}")
        if self._widened.size < source.size:
            self._widened = np.empty(source.size, np.float32)
        widened = self._widened[: source.size].reshape(source.shape)
        np.copyto(widened, source)
        return widened.view(np.uint32)


@compiled
def _codes(bits: NDArray[Any], scales: F32, r: int, c: int, narrow: bool, out: U8) -> None:
    rows, C = bits.shape
    divisors = np.empty(C, np.float32)
    for i in range(rows):
        if i % r == 0:
            spread(scales[i // r], c, divisors)
        for j in range(C):
            wide = f32_bits(bits[i, j], narrow)
            magnitude = np.uint32(wide & np.uint32(0x7FFFFFFF)).view(np.float32)
            quotient = np.float32(magnitude / divisors[j])
            sign = np.uint8(np.uint8(wide >> np.uint32(24)) & np.uint8(0x80))
            out[i, j] = np.uint8(np.float32(quotient + anchor_of(quotient)).view(np.uint32)) | sign


@compiled
def group_maxima(bits: NDArray[Any], group: int, mask: Any, narrow: bool) -> U32:
    """u32 [rows, C/g], f32 bits of each group's largest magnitude; group is a power of two from 2 on."""
    rows, C = bits.shape
    out = np.empty((rows, C // group), np.uint32)
    halves = np.empty(C, bits.dtype)
    for i in range(rows):
        left = C // 2
        for j in range(left):
            halves[j] = max(bits[i, 2 * j] & mask, bits[i, 2 * j + 1] & mask)
        while left > out.shape[1]:
            left //= 2
            for j in range(left):  # in place: what is written lies before what is still to be read
                halves[j] = max(halves[2 * j], halves[2 * j + 1])
        for k in range(left):
            out[i, k] = f32_bits(halves[k], narrow)
    return out


@compiled
def _maxima(bits: NDArray[Any], r: int, c: int, mask: Any, narrow: bool) -> U32:
    rows, C = bits.shape
    columns = np.empty(C, bits.dtype)
    out = np.empty((-(-rows // r), -(-C // c)), np.uint32)
    for i in range(out.shape[0]):
        columns[:] = 0
        for row in range(i * r, min((i + 1) * r, rows)):
            for j in range(C):
                columns[j] = max(columns[j], bits[row, j] & mask)
        for k in range(out.shape[1]):
            out[i, k] = f32_bits(columns[k * c : (k + 1) * c].max(), narrow)
    return out
