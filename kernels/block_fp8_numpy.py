"""The row form of block FP8 in pure numpy: whole rows at a time, whatever the block's shape.

A block at a time, numpy pays for strides and for small calls. Seen by rows instead, a block's amax is a
column-wise maximum of integer bits, and its scale is one stretch of a row of scales as wide as the matrix. So
every operation runs over contiguous memory, ragged edges need no padding, and a chunk of rows stays in cache.

Only max, IEEE division and rounding to nearest even occur, the last two on normal f32 numbers alone, so the
bytes depend neither on the processor nor on its flush-to-zero flags, nor on how rows are grouped.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kernels.formats import F32, U8, U32

CHUNK_ELEMENTS: Final = 32_768  # 128 KiB of f32: the buffers of a chunk stay in a core's second-level cache

# Operands are arrays, [1] or 0-d: numpy converts a scalar anew at every call.
_LOWEST_EXPONENT: Final = np.full(1, 127 - 6, np.uint32)  # that of E4M3's smallest normal number 2^-6, in f32
_EXPONENT_AND_CODE: Final = np.array(
    (1 << 23) + 8, np.uint32
)  # an exponent step is 2^23 in f32 bits, 8 in codes
_ANCHOR: Final = np.array((20 << 23) - 8 * (127 - 6), np.uint32)
_MANTISSA_BITS: Final = np.array(23, np.uint32)
_BF16_SHIFT: Final = np.array(16, np.uint32)
_BF16_MAGNITUDE: Final = np.array(0x7FFF, np.uint16)
_F32_MAGNITUDE: Final = np.array(0x7FFFFFFF, np.uint32)
_SIGN: Final = np.array(0x80, np.uint8)


class NumpyRows:
    """Block maxima and codes of matrices [rows, C], with buffers that are reused: one object per thread."""

    name: Final = "numpy"

    def __init__(self) -> None:
        self._chunk = Chunk(CHUNK_ELEMENTS)

    def maxima(self, source: NDArray[Any], block: tuple[int, int]) -> U32:
        """Largest magnitude of each block as f32 bits: u32 [ceil(rows/r), ceil(C/c)].

        A block that holds NaN or Inf yields at least the bits of infinity, 0x7F800000.
        """
        r, c = block
        rows, C = source.shape
        unsigned = source.view(np.uint16 if source.itemsize == 2 else np.uint32)
        whole = rows // r * r
        columns = [_column_maxima(unsigned[:whole].reshape(-1, r, C))]
        if whole < rows:
            columns.append(_column_maxima(unsigned[None, whole:]))
        per_block = np.maximum.reduceat(np.concatenate(columns), np.arange(0, C, c), axis=1)
        return _magnitude_bits_f32(per_block, source.dtype)

    def codes(self, source: NDArray[Any], scales: F32, block: tuple[int, int], out: U8) -> None:
        """out[i, j] = E4M3 code of source[i, j] / scales[i // r, j // c], sign kept, zeros included.

        source [rows, C] u16 (BF16 bits), f16 or f32; scales f32 [ceil(rows/r), ceil(C/c)]; out u8 [rows, C].
        Every quotient must stay below 464, where E4M3 ends, and every scale must be at least
        block_fp8.SMALLEST_ROW_SCALE, so that quotients that matter are normal numbers.
        """
        r, c = block
        rows, C = source.shape
        chunk_rows = max(1, CHUNK_ELEMENTS // C)
        if self._chunk.elements < C:
            self._chunk = Chunk(C)
        scale_rows = np.repeat(scales, c, axis=1)[:, :C]  # [ceil(rows/r), C]
        block_row = np.arange(rows) // r
        for begin in range(0, rows, chunk_rows):
            chunk = slice(begin, min(begin + chunk_rows, rows))
            divisors = self._chunk.divisors[: source[chunk].size]
            np.take(scale_rows, block_row[chunk], axis=0, out=divisors.reshape(-1, C), mode="clip")
            self._chunk.codes(source[chunk].reshape(-1), out[chunk].reshape(-1))


class Chunk:
    """The buffers of a few whole rows, and the arithmetic on them: all flat and contiguous."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.divisors = np.empty(elements, np.float32)  # the scale of every element
        self._magnitudes = np.empty(elements, np.uint32)  # f32 bits of |w|, then of |w| / scale
        self._anchors = np.empty(elements, np.uint32)
        self._floor = np.repeat(_LOWEST_EXPONENT, elements)  # an array: maximum is slow with a scalar
        self._shifted = np.empty(elements, np.uint32)
        self._signs = np.empty(elements, np.uint8)

    def codes(self, source: NDArray[Any], out: U8) -> None:
        """out u8 [n] = E4M3 code of source [n] / divisors[:n], sign kept."""
        n = source.size
        magnitudes, anchors, signs = self._magnitudes[:n], self._anchors[:n], self._signs[:n]
        shifted = self._shifted[:n] if source.itemsize == 4 else self._shifted.view(np.uint16)[:n]
        load_magnitudes(source, magnitudes, shifted)
        quotients = magnitudes.view(np.float32)
        np.divide(quotients, self.divisors[:n], out=quotients)
        round_to_e4m3(quotients, anchors, self._floor[:n], out)
        np.right_shift(source.view(shifted.dtype), shifted.dtype.type(8 * source.itemsize - 8), out=shifted)
        np.copyto(signs, shifted, casting="unsafe")
        np.bitwise_and(signs, _SIGN, out=signs)
        np.bitwise_or(out, signs, out=out)


def round_to_e4m3(magnitudes: F32, anchors: U32, floor: U32, out: U8) -> None:
    """out = E4M3 code, nearest and ties to even, of magnitudes f32 in [0, 464), which are overwritten.

    All are [n]; anchors is scratch; floor holds the exponent field of 2^-6, 121.

    E4M3 steps by 2^(e-3) between 2^e and 2^(e+1), and by 2^-9 below 2^-6. An f32 of 2^(e+20) steps by just
    that; so adding this anchor rounds the magnitude as E4M3 does, in hardware, and leaves the mantissa in the
    lowest bits of the sum. The anchor's own lowest bits hold what the exponent adds to the code, so that the
    lowest byte of the sum is the code.
    """
    bits = magnitudes.view(np.uint32)
    np.right_shift(bits, _MANTISSA_BITS, out=anchors)
    np.maximum(anchors, floor, out=anchors)
    np.multiply(anchors, _EXPONENT_AND_CODE, out=anchors)
    np.add(anchors, _ANCHOR, out=anchors)
    np.add(magnitudes, anchors.view(np.float32), out=magnitudes)
    np.copyto(out, bits, casting="unsafe")


def load_magnitudes(source: NDArray[Any], out: U32, scratch: NDArray[Any]) -> None:
    """out u32 [n] = f32 bits of |source|, source [n]; scratch [n] has the source's item size."""
    if source.dtype == np.uint16:
        np.bitwise_and(source, _BF16_MAGNITUDE, out=scratch)
        np.copyto(out, scratch)
        np.left_shift(out, _BF16_SHIFT, out=out)
        return
    if source.dtype == np.float16:
        np.copyto(out.view(np.float32), source)
        source = out.view(np.float32)
    np.bitwise_and(source.view(np.uint32), _F32_MAGNITUDE, out=out)


def _column_maxima(unsigned: NDArray[Any]) -> NDArray[Any]:
    """[n, r, C] bits of numbers with a sign -> [n, C], the largest magnitude's bits.

    Read as unsigned, negative numbers lead, by magnitude; read as signed, positive ones do. So two maxima,
    neither of which writes more than a row, replace one that must first clear every sign.
    """
    sign = unsigned.dtype.type(1 << (8 * unsigned.itemsize - 1))
    negative = np.maximum.reduce(unsigned, axis=1)
    positive = np.maximum.reduce(unsigned.view(f"i{unsigned.itemsize}"), axis=1).view(unsigned.dtype)
    return np.maximum(np.where(negative & sign, negative ^ sign, 0), np.where(positive & sign, 0, positive))


def _magnitude_bits_f32(bits: NDArray[Any], dtype: np.dtype[Any]) -> U32:
    """Bits of magnitudes in the source's format -> f32 bits of the same numbers. Exact; Inf and NaN kept."""
    if dtype == np.uint16:
        return bits.astype(np.uint32) << np.uint32(16)
    if dtype == np.float16:
        return bits.view(np.float16).astype(np.float32).view(np.uint32)
    return bits


def e4m3_codes(magnitudes: F32) -> U8:
    """E4M3 codes, nearest and ties to even, of magnitudes f32 [n] in [0, 464): u8 [n]."""
    out = np.empty(magnitudes.size, np.uint8)
    floor = np.repeat(_LOWEST_EXPONENT, magnitudes.size)
    round_to_e4m3(magnitudes.copy(), np.empty_like(floor), floor, out)
    return out
