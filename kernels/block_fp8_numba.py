"""The row form of block FP8, compiled by numba: the same bytes as NumpyRows, several times as fast.

The loops run over whole rows, so that LLVM turns them into vector code whatever the block's width. fastmath
stays off: it would trade the division for a reciprocal. Machine code is cached beside this file, or in the
user's cache folder where that is not writable.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kernels.formats import F32, U8, U16, U32
from kernels.recover_numpy import Bounds

# error_model: a division must be an instruction, not a test for zero and a jump, or nothing is vectorised.
_compiled = njit(cache=True, nogil=True, error_model="numpy")


class NumbaRows:
    """Block maxima and codes of matrices [rows, C]; the laws are those of NumpyRows. One object per thread."""

    name: Final = "numba"

    def __init__(self) -> None:
        self._widened: F32 = np.empty(0, np.float32)

    def maxima(self, source: NDArray[Any], block: tuple[int, int]) -> U32:
        """Largest magnitude of each block as f32 bits: u32 [ceil(rows/r), ceil(C/c)]."""
        r, c = block
        rows, C = source.shape
        bits = self._bits(source)
        out = np.empty((-(-rows // r), -(-C // c)), np.uint32)
        if bits.dtype == np.uint16:
            _maxima_bf16(bits, r, c, np.empty(C, np.uint16), out)
        else:
            _maxima_f32(bits, r, c, np.empty(C, np.uint32), out)
        return out

    def codes(self, source: NDArray[Any], scales: F32, block: tuple[int, int], out: U8) -> None:
        """out[i, j] = E4M3 code of source[i, j] / scales[i // r, j // c], sign kept, zeros included."""
        r, c = block
        bits = self._bits(source)
        divisors = np.empty(source.shape[1], np.float32)
        if bits.dtype == np.uint16:
            _codes_bf16(bits, scales, r, c, divisors, out)
        else:
            _codes_f32(bits, scales, r, c, divisors, out)

    def lossless(self, source: U16, scales: F32, block: tuple[int, int]) -> NDArray[np.bool_]:
        """Which blocks' codes, times their scale, round to the very BF16 they came from: bool [n, m]."""
        from kernels.recover_numba import lossless

        same: NDArray[np.bool_] = lossless(source, scales, *block)
        return same

    def candidates(self, sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32:
        """See recover.candidates."""
        from kernels.recover_numba import candidates

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


@_compiled
def anchor_of(quotient: Any) -> Any:
    """The f32 that rounds a quotient as E4M3 does when added; see block_fp8_numpy.round_to_e4m3."""
    exponent = np.uint32(
        max(np.uint32(np.float32(quotient).view(np.uint32) >> np.uint32(23)), np.uint32(121))
    )
    return np.uint32(exponent * np.uint32((1 << 23) + 8) + np.uint32((20 << 23) - 8 * 121)).view(np.float32)


@_compiled
def _code(magnitude: Any, divisor: Any, sign: Any) -> Any:
    """E4M3 code of magnitude / divisor (f32), with sign 0 or 0x80."""
    quotient = np.float32(magnitude / divisor)
    return np.uint8(np.float32(quotient + anchor_of(quotient)).view(np.uint32)) | sign


@_compiled
def _codes_bf16(source: U16, scales: F32, r: int, c: int, divisors: F32, out: U8) -> None:
    for i in range(source.shape[0]):
        if i % r == 0:
            spread(scales[i // r], c, divisors)
        for j in range(source.shape[1]):
            magnitude = np.uint32(np.uint32(source[i, j] & np.uint16(0x7FFF)) << np.uint32(16)).view(
                np.float32
            )
            out[i, j] = _code(magnitude, divisors[j], np.uint8(source[i, j] >> np.uint16(8)) & np.uint8(0x80))


@_compiled
def _codes_f32(source: U32, scales: F32, r: int, c: int, divisors: F32, out: U8) -> None:
    for i in range(source.shape[0]):
        if i % r == 0:
            spread(scales[i // r], c, divisors)
        for j in range(source.shape[1]):
            magnitude = np.uint32(source[i, j] & np.uint32(0x7FFFFFFF)).view(np.float32)
            out[i, j] = _code(
                magnitude, divisors[j], np.uint8(source[i, j] >> np.uint32(24)) & np.uint8(0x80)
            )


@_compiled
def spread(scale_row: F32, c: int, divisors: F32) -> None:
    """divisors f32 [C] = each block's scale, c times."""
    for k in range(scale_row.size):
        divisors[k * c : (k + 1) * c] = scale_row[k]


@_compiled
def _maxima_bf16(source: U16, r: int, c: int, columns: U16, out: U32) -> None:
    for i in range(out.shape[0]):
        columns[:] = 0
        for row in range(i * r, min((i + 1) * r, source.shape[0])):
            for j in range(columns.size):
                columns[j] = max(columns[j], source[row, j] & np.uint16(0x7FFF))
        for k in range(out.shape[1]):
            out[i, k] = np.uint32(columns[k * c : (k + 1) * c].max()) << np.uint32(16)


@_compiled
def _maxima_f32(source: U32, r: int, c: int, columns: U32, out: U32) -> None:
    for i in range(out.shape[0]):
        columns[:] = 0
        for row in range(i * r, min((i + 1) * r, source.shape[0])):
            for j in range(columns.size):
                columns[j] = max(columns[j], source[row, j] & np.uint32(0x7FFFFFFF))
        for k in range(out.shape[1]):
            out[i, k] = columns[k * c : (k + 1) * c].max()
