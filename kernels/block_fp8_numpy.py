"""The row form of block FP8 in pure numpy: whole rows at a time, whatever the block's shape.

A block at a time, numpy pays for strides and for small calls. Seen by rows instead, a block's amax is a
column-wise maximum of integer bits, and its scale is one stretch of a row of scales as wide as the matrix. So
every operation runs over contiguous memory, ragged edges need no padding, and a chunk of rows stays in cache.

Only max, IEEE division and rounding to nearest even occur, the last two on normal f32 numbers alone, so the
bytes depend neither on the processor nor on its flush-to-zero flags, nor on how rows are grouped.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32, U8, U16, U32
from shardmill.kernels.recover_numpy import Bounds, candidates

Block = tuple[int, int]
# 512 KiB of f32. Smaller chunks stay in a core's own cache, but their calls are so short that two threads spend their
# time handing the interpreter's lock to each other: 0.9 GB/s on two cores with 32,768 elements, 2.0 with these.
CHUNK_ELEMENTS: Final = 131_072

ERROR_UNITS: Final = 2.0**30  # squared errors, at most 2^8, are counted in such parts

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
_LAST_BIT: Final = np.array(1, np.uint32)
_BELOW_HALF: Final = np.array(
    0x7FFF, np.uint32
)  # with the last kept bit, rounds f32 bits to BF16, ties to even


class NumpyRows:
    """Block maxima and codes of matrices [rows, C], with buffers that are reused: one object per thread."""

    name: Final = "numpy"

    def __init__(self) -> None:
        self._chunk = Chunk(CHUNK_ELEMENTS)
        self._differ: U8 = np.empty(0, np.uint8)

    def maxima(self, source: NDArray[Any], block: Block) -> U32:
        """Largest magnitude of each block as f32 bits: u32 [ceil(rows/r), ceil(C/c)].

        A block that holds NaN or Inf yields at least the bits of infinity, 0x7F800000.
        """
        unsigned = source.view(f"u{source.itemsize}")
        r, c = block
        if r == 1 and c & (c - 1) == 0 and source.shape[1] % c == 0:
            bits = _group_maxima(unsigned, c)
        else:
            bits = _over_blocks(unsigned, block, _column_maxima)
        return _magnitude_bits_f32(bits, source.dtype)

    def codes(self, source: NDArray[Any], scales: F32, block: Block, out: U8) -> None:
        """out[i, j] = E4M3 code of source[i, j] / scales[i // r, j // c], sign kept, zeros included.

        source [rows, C] u16 (BF16 bits), f16 or f32; scales f32 [ceil(rows/r), ceil(C/c)]; out u8 [rows, C].
        Every quotient must stay below 464, where E4M3 ends, and every scale must be at least
        block_fp8_tiny.SMALLEST_ROW_SCALE, so that quotients that matter are normal numbers.
        """
        for rows in self._chunks(source, scales, block):
            self._chunk.codes(source[rows].reshape(-1), out[rows].reshape(-1))

    def lossless(self, source: U16, scales: F32, block: Block) -> NDArray[np.bool_]:
        """Which blocks' codes, times their scale, round to the very BF16 they came from: bool [n, m].

        source [rows, C] u16, scales f32 [n, m]; the terms of `codes` hold.
        """
        if self._differ.size < source.size:
            self._differ = np.empty(source.size, np.uint8)
        differ = self._differ[: source.size].reshape(source.shape)
        for rows in self._chunks(source, scales, block):
            self._chunk.differ(source[rows].reshape(-1), differ[rows].reshape(-1))
        same: NDArray[np.bool_] = (
            _over_blocks(differ, block, lambda rows: np.maximum.reduce(rows, axis=1)) == 0
        )
        return same

    def squared_errors(self, source: NDArray[Any], scales: F32, block: Block) -> NDArray[np.int64]:
        """Sum over each block of (quotient - code's value)^2, in units of 2^-30: i64 [n, m].

        Each square is exact in f64, then rounded to a whole number of units: so the sum's order is free. A block
        of 2^25 elements cannot overflow. The terms of `codes` hold.
        """
        r, c = block
        C = source.shape[1]
        edges = np.arange(0, C, c)
        sums = np.zeros(scales.shape, np.int64)
        for chunk in self._chunks(source, scales, block):
            units = self._chunk.squared_errors(source[chunk].reshape(-1)).reshape(-1, C)
            first = chunk.start // r
            begins = [max(0, i * r - chunk.start) for i in range(first, -(-chunk.stop // r))]
            sums[first : first + len(begins)] += np.add.reduceat(
                np.add.reduceat(units, begins, axis=0), edges, axis=1
            )
        return sums

    def candidates(self, sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32:
        """See recover.candidates."""
        return candidates(sample, maxima, c, wanted, bounds)

    def _chunks(self, source: NDArray[Any], scales: F32, block: Block) -> Iterator[slice]:
        """Runs of whole rows that fill the chunk's buffers, each after its divisors are in place."""
        r, c = block
        rows, C = source.shape
        chunk_rows = max(1, CHUNK_ELEMENTS // C)
        if self._chunk.elements < C:
            self._chunk = Chunk(C)
        scale_rows = np.repeat(scales, min(c, C), axis=1)[:, :C]  # [ceil(rows/r), C]
        block_row = np.arange(rows) // r
        for begin in range(0, rows, chunk_rows):
            chunk = slice(begin, min(begin + chunk_rows, rows))
            divisors = self._chunk.divisors[: source[chunk].size]
            np.take(scale_rows, block_row[chunk], axis=0, out=divisors.reshape(-1, C), mode="clip")
            yield chunk


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
        self._squares: NDArray[np.float64] = np.empty(0)  # made where errors are asked for
        self._units: NDArray[np.int64] = np.empty(0, np.int64)

    def codes(self, source: NDArray[Any], out: U8) -> None:
        """out u8 [n] = E4M3 code of source [n] / divisors[:n], sign kept."""
        n = source.size
        signs, shifted = self._signs[:n], self._scratch(source)
        quotients = self._quotients(source)
        round_to_e4m3(quotients, self._anchors[:n], self._floor[:n])
        np.copyto(out, quotients.view(np.uint32), casting="unsafe")
        np.right_shift(source.view(shifted.dtype), shifted.dtype.type(8 * source.itemsize - 8), out=shifted)
        np.copyto(signs, shifted, casting="unsafe")
        np.bitwise_and(signs, _SIGN, out=signs)
        np.bitwise_or(out, signs, out=out)

    def differ(self, source: U16, out: U8) -> None:
        """out u8 [n] = 1 where the BF16 nearest to code * divisors[:n] is not the source [n], else 0."""
        n = source.size
        values, anchors, shifted = self._quotients(source), self._anchors[:n], self._scratch(source)
        bits = values.view(np.uint32)
        round_to_e4m3(values, anchors, self._floor[:n])
        np.subtract(
            values, anchors.view(np.float32), out=values
        )  # what the code stands for: the anchor is exact
        np.multiply(values, self.divisors[:n], out=values)
        np.right_shift(bits, _BF16_SHIFT, out=anchors)
        np.bitwise_and(anchors, _LAST_BIT, out=anchors)
        np.add(bits, anchors, out=bits)
        np.add(bits, _BELOW_HALF, out=bits)
        np.right_shift(bits, _BF16_SHIFT, out=bits)
        np.bitwise_and(source, _BF16_MAGNITUDE, out=shifted)
        np.not_equal(bits, shifted, out=out.view(np.bool_))

    def squared_errors(self, source: NDArray[Any]) -> NDArray[np.int64]:
        """(quotient - code's value)^2 in units of 2^-30, i64 [n], until the next call."""
        n = source.size
        if self._squares.size < n:
            self._squares, self._units = np.empty(n, np.float64), np.empty(n, np.int64)
        values, anchors = self._quotients(source), self._anchors[:n]
        squares, units = self._squares[:n], self._units[:n]
        quotients = units.view(np.float32)[:n]  # in the room that the result will take
        np.copyto(quotients, values)
        round_to_e4m3(values, anchors, self._floor[:n])
        np.subtract(values, anchors.view(np.float32), out=values)
        np.subtract(values, quotients, out=values)
        np.multiply(values, values, out=squares, dtype=np.float64)
        np.multiply(squares, ERROR_UNITS, out=squares)
        np.add(squares, 0.5, out=squares)
        np.copyto(units, squares, casting="unsafe")
        return units

    def _quotients(self, source: NDArray[Any]) -> F32:
        """|source| / divisors, f32 [n], in the buffer of magnitudes."""
        magnitudes = self._magnitudes[: source.size]
        load_magnitudes(source, magnitudes, self._scratch(source))
        quotients = magnitudes.view(np.float32)
        np.divide(quotients, self.divisors[: source.size], out=quotients)
        return quotients

    def _scratch(self, source: NDArray[Any]) -> NDArray[Any]:
        """Room for unsigned integers of the source's item size, [n]."""
        return self._shifted.view(np.uint16 if source.itemsize == 2 else np.uint32)[: source.size]


def round_to_e4m3(magnitudes: F32, anchors: U32, floor: U32) -> None:
    """Adds to magnitudes f32 [n] in [0, 464) their anchors, so that the lowest byte of each sum is its E4M3 code.

    The code is the nearest, ties to even. anchors u32 [n] is filled with f32 bits; floor u32 [n] holds 121, the
    exponent field of 2^-6. Sum less anchor is the code's value.

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


def _over_blocks(
    matrix: NDArray[Any], block: Block, over_rows: Callable[[NDArray[Any]], Any]
) -> NDArray[Any]:
    """Maxima over blocks: [rows, C] -> [n, m]. over_rows takes [k, r, C] to [k, C]."""
    r, c = block
    rows, C = matrix.shape
    whole = rows // r * r
    columns = [over_rows(matrix[:whole].reshape(-1, r, C))]
    if whole < rows:
        columns.append(over_rows(matrix[None, whole:]))
    return np.maximum.reduceat(np.concatenate(columns), np.arange(0, C, c), axis=1)


def _group_maxima(unsigned: NDArray[Any], group: int) -> NDArray[Any]:
    """[rows, C] bits of numbers with a sign -> [rows, C/g], the largest magnitude's bits; group is a power of two."""
    halves: NDArray[Any] = unsigned & unsigned.dtype.type(np.iinfo(unsigned.dtype).max // 2)
    while group > 1:
        halves, group = np.maximum(halves[:, 0::2], halves[:, 1::2]), group // 2
    return halves


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
    """E4M3 codes, nearest and ties to even, of magnitudes in [0, 464), f32 of any shape: u8 of that shape."""
    sums = magnitudes.reshape(-1).copy()
    floor = np.repeat(_LOWEST_EXPONENT, sums.size)
    round_to_e4m3(sums, np.empty_like(floor), floor)
    return sums.view(np.uint32).astype(np.uint8).reshape(magnitudes.shape)
