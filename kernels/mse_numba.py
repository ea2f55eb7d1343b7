"""The pass of `mse/1` over the elements, compiled by numba: what NumpyRows.squared_errors does, faster."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_numpy import ERROR_UNITS
from shardmill.kernels.e4m3_numba import anchor_of, compiled, f32_bits, spread
from shardmill.kernels.formats import F32

_UNITS = np.float64(ERROR_UNITS)


@compiled
def squared_errors(bits: NDArray[Any], scales: F32, r: int, c: int, narrow: bool) -> NDArray[np.int64]:
    """i64 [n, m]; see NumpyRows.squared_errors."""
    rows, C = bits.shape
    divisors, columns = np.empty(C, np.float32), np.empty(C, np.int64)
    sums = np.empty(scales.shape, np.int64)
    for i in range(scales.shape[0]):
        spread(scales[i], c, divisors)
        columns[:] = 0
        for row in range(i * r, min((i + 1) * r, rows)):
            for j in range(C):
                magnitude = np.uint32(f32_bits(bits[row, j], narrow) & np.uint32(0x7FFFFFFF)).view(np.float32)
                columns[j] += _units(magnitude, divisors[j])
        for k in range(scales.shape[1]):
            sums[i, k] = columns[k * c : (k + 1) * c].sum()
    return sums


@compiled
def _units(magnitude: Any, divisor: Any) -> Any:
    """(quotient - code's value)^2 in units of 2^-30, i64."""
    quotient = np.float32(magnitude / divisor)
    anchor = anchor_of(quotient)
    error = np.float64(np.float32(np.float32(np.float32(quotient + anchor) - anchor) - quotient))
    return np.int64(error * error * _UNITS + 0.5)
