"""Codes of four and eight bits under one divisor for g neighbours of a row: E2M1 pairs and signed integers.

A group is [1, g], so scales are [R, C/g]; the group of a whole row gives one scale a channel. Sources are BF16 bits
(u16), f16 or f32. Every divisor is at least 2^-109, a normal f32 number: a quotient that matters is then normal too,
and the bytes do not depend on the processor's flush-to-zero flags. The codes are nearest, ties to even; both kernels,
numpy and numba, give the same bytes.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite, Rows, known_kernels, rows_of
from shardmill.kernels.formats import E2M1_MAX, E2M1_VALUES, F32, U8, U32, bf16_to_f32

I8 = NDArray[np.int8]
SMALLEST_SCALE: Final = 2.0**-100
"""Scales of these formats never fall below it, so that nothing here is a subnormal f32 number."""

CHUNK_ELEMENTS: Final = 131_072
_INFINITY_BITS: Final = 0x7F800000
_ERROR_UNITS: Final = 2.0**30
_LARGEST_ERROR: Final = np.float32(32)  # so that sums of errors stay whole numbers of 64 bits
# E2M1 steps by 2^(e-1) between 2^e and 2^(e+1), and by 1/2 below 1: an f32 of 2^(e+22) steps by just that. The anchor
# holds 2e in its lowest bits, what the exponent adds to the code; e is the f32's exponent field less 127.
_LOWEST_EXPONENT: Final = np.uint32(127)
_EXPONENT_AND_CODE: Final = np.uint32((1 << 23) + 2)
_ANCHOR: Final = np.uint32((22 << 23) - 2 * 127)


class GroupCodes:
    """Maxima and codes of matrices [rows, C] with buffers that are reused: one object per thread."""

    def __init__(self, kernel: str = "auto") -> None:
        self.name = known_kernels()[-1] if kernel == "auto" else kernel
        self.rows: Rows = rows_of(self.name)

    def maxima(self, source: NDArray[Any], group: int) -> F32:
        """Largest magnitude of each group: f32 [rows, C/g]. Raises NonFinite where a source holds NaN or Inf."""
        bits: U32 = self.rows.maxima(source, (1, group))
        if bits.max(initial=0) >= _INFINITY_BITS:
            raise first_non_finite(source)
        return bits.view(np.float32)

    def e2m1(self, source: NDArray[Any], divisors: F32, group: int) -> U8:
        """E2M1 codes of source [rows, C] / divisors [rows, C/g], at most 6 in magnitude, sign kept: u8 [rows, C/2].

        Two codes a byte, the lower column in the lower nibble.
        """
        if self.name == "numba":
            from shardmill.kernels.group_codes_numba import e2m1_packed

            packed: U8 = e2m1_packed(*_bits(source), divisors, group)
            return packed
        out = np.empty((source.shape[0], source.shape[1] // 2), np.uint8)
        for rows in _chunks(source):
            quotients = np.divide(widened(source[rows]), np.repeat(divisors[rows], group, axis=1))
            codes = e2m1_codes(quotients)
            out[rows] = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        return out

    def e2m1_errors(self, source: NDArray[Any], packed: U8, scales: F32, group: int) -> NDArray[np.int64]:
        """Squared error of each group in units of 2^-30 of its scale squared: i64 [rows, C/g], summed exactly.

        packed u8 [rows, C/2]; scales f32 [rows, C/g]. An error is counted as 32 at most.
        """
        if self.name == "numba":
            from shardmill.kernels.group_codes_numba import e2m1_errors

            sums: NDArray[np.int64] = e2m1_errors(*_bits(source), packed, scales, group, E2M1_VALUES)
            return sums
        quotients = np.divide(widened(source), np.repeat(scales, group, axis=1))
        errors = np.minimum(np.abs(E2M1_VALUES[unpack_nibbles(packed)] - quotients), _LARGEST_ERROR)
        wide = errors.astype(np.float64)
        units = (wide * wide * _ERROR_UNITS + 0.5).astype(np.int64)
        counted: NDArray[np.int64] = units.reshape(len(source), -1, group).sum(axis=2)
        return counted

    def integers(self, source: NDArray[Any], divisors: F32, group: int, bits: int) -> I8:
        """Nearest whole numbers to source [rows, C] / divisors [rows, ceil(C/g)], within `bits` bits: i8 [rows, C]."""
        low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
        if self.name == "numba":
            from shardmill.kernels.group_codes_numba import integer_codes

            codes: I8 = integer_codes(*_bits(source), divisors, group, low, high)
            return codes
        out = np.empty(source.shape, np.int8)
        for rows in _chunks(source):
            wide = np.repeat(divisors[rows], group, axis=1)[:, : source.shape[1]]
            out[rows] = np.clip(np.rint(widened(source[rows]) / wide), low, high)
        return out


def e2m1_codes(quotients: F32) -> U8:
    """E2M1 codes, nearest and ties to even, of finite f32 of any shape; beyond 6 the code of 6; the sign is kept."""
    magnitudes = np.minimum(np.abs(quotients), np.float32(E2M1_MAX))
    exponents = np.maximum(magnitudes.view(np.uint32) >> np.uint32(23), _LOWEST_EXPONENT)
    anchors = (exponents * _EXPONENT_AND_CODE + _ANCHOR).view(np.float32)
    low_bits = (magnitudes + anchors).view(np.uint32).astype(np.uint8) & np.uint8(7)
    signs = (quotients.view(np.uint32) >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    codes: U8 = low_bits | signs
    return codes


def widened(source: NDArray[Any]) -> F32:
    """BF16 bits, f16 or f32 of any shape as f32, exactly."""
    return bf16_to_f32(source) if source.dtype == np.uint16 else source.astype(np.float32, copy=False)


def first_non_finite(source: NDArray[Any]) -> NonFinite:
    """The first NaN or Inf of a strip [rows, C] that holds one."""
    values = widened(source)
    row, col = np.argwhere(~np.isfinite(values))[0]
    return NonFinite(int(row), int(col), float(values[row, col]))


def pack_nibbles(codes: U8) -> U8:
    """Codes 0..15, u8 [..., C] -> u8 [..., C/2], the even column in the lower nibble."""
    packed: U8 = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: U8) -> U8:
    """The inverse: u8 [..., C/2] -> u8 [..., C]."""
    halves = np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _bits(source: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """The source as bits that compiled loops compute with, and whether they are of BF16."""
    if source.dtype == np.float16:
        return source.astype(np.float32).view(np.uint32), False
    return source.view(f"u{source.itemsize}"), source.itemsize == 2


def _chunks(source: NDArray[Any]) -> list[slice]:
    """Runs of whole rows that stay in cache."""
    rows, C = source.shape
    step = max(1, CHUNK_ELEMENTS // max(1, C))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
