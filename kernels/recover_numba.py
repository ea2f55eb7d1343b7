"""The two passes of `recover/1` over the elements, compiled by numba: what shardmill.kernels.recover does, faster."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.e4m3_numba import anchor_of, compiled, spread
from shardmill.kernels.formats import F32, U16, U32

F64 = NDArray[np.float64]


@compiled
def candidates(sample: U16, maxima: U32, c: int, wanted: int, lower: F64, upper: F64) -> F32:
    """f32 [n, m, wanted], NaN where no scale explains the sample's mantissas; see recover.candidates."""
    n, m = maxima.shape
    tops = lower.shape[1]
    found = np.full((n, m, wanted), np.nan, np.float32)
    present = np.empty(tops, np.int64)
    for i in range(n):
        for k in range(m):
            if maxima[i, k] == 0:
                continue
            count = _mantissas(sample[i, :, k * c : (k + 1) * c], maxima[i, k], present)
            if count <= tops:
                _solve(present[:count], maxima[i, k], lower, upper, found[i, k])
    return found


@compiled
def _mantissas(numbers: U16, maximum: Any, present: Any) -> Any:
    """Lists the mantissas of the maximum and of the numbers [k, c] that are not zero; gives their count."""
    low, high = np.uint64(0), np.uint64(0)  # sets of the mantissas 0..63 and 64..127
    if maximum >> 22 & 1:
        high |= np.uint64(1) << np.uint64(maximum >> 16 & 63)
    else:
        low |= np.uint64(1) << np.uint64(maximum >> 16 & 63)
    for row in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            number = np.uint64(numbers[row, j])
            nonzero = np.uint64(number & np.uint64(0x7FFF) != np.uint64(0))
            bit = np.uint64(nonzero << (number & np.uint64(63)))
            is_high = np.uint64(0) - (number >> np.uint64(6) & np.uint64(1))
            high |= bit & is_high
            low |= bit & ~is_high
        if row == 0 and _list(low, high, present) > present.size:  # one row tells most fresh blocks apart
            break
    return _list(low, high, present)


@compiled
def _list(low: Any, high: Any, present: Any) -> Any:
    """Lists the members of a set in two words and counts them; counts no further than one above the room."""
    count = 0
    for first, members in ((0, low), (64, high)):
        while members and count <= present.size:
            lowest = members & (~members + np.uint64(1))
            if count < present.size:
                present[count] = (
                    first + (np.float64(lowest).view(np.int64) >> 52) - 1023
                )  # 2^n's exponent is n
            count += 1
            members ^= lowest
    return count


@compiled
def _solve(present: Any, maximum: Any, lower: F64, upper: F64, found: F32) -> None:
    """The first scales that the top codes allow a block with these mantissas; see recover_numpy."""
    mantissa, exponent = (maximum >> 16) & 0x7F, np.int64(maximum >> 23) - 127 - 7
    count = 0
    for top in range(lower.shape[1]):
        low, high = -np.inf, np.inf
        for other in present:
            if low > high:
                break
            low = max(low, lower[mantissa, top, other])
            high = min(high, upper[mantissa, top, other])
        if low <= high:
            power_of_two = math.ldexp(1.0, math.frexp(low)[1])
            chosen = power_of_two if power_of_two < high else (low + high) / 2
            found[count] = np.float32(math.ldexp(chosen, exponent))  # type: ignore[arg-type]
            count += 1
            if count == found.size:
                return


@compiled
def lossless(source: U16, scales: F32, r: int, c: int) -> NDArray[np.bool_]:
    """Which blocks decode to the very BF16 they came from: bool [n, m]; see NumpyRows.lossless."""
    rows, C = source.shape
    divisors, differ = np.empty(C, np.float32), np.empty(C, np.uint16)
    same = np.empty(scales.shape, np.bool_)
    for i in range(scales.shape[0]):
        spread(scales[i], c, divisors)
        differ[:] = 0
        for row in range(i * r, min((i + 1) * r, rows)):
            for j in range(C):
                magnitude = source[row, j] & np.uint16(0x7FFF)
                differ[j] |= _round_trip(magnitude, divisors[j]) ^ magnitude
        for k in range(scales.shape[1]):
            same[i, k] = differ[k * c : (k + 1) * c].max() == 0
    return same


@compiled
def _round_trip(magnitude: Any, scale: Any) -> Any:
    """BF16 bits of a magnitude -> BF16 bits of its code times the scale."""
    quotient = np.float32(np.uint32(np.uint32(magnitude) << np.uint32(16)).view(np.float32) / scale)
    anchor = anchor_of(quotient)
    value = np.float32(np.float32(quotient + anchor) - anchor)  # what the code stands for
    bits = np.float32(value * scale).view(np.uint32)
    return np.uint16(
        np.uint32(bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    )
