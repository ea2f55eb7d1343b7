"""Scales that explain the mantissas of a block: the search of `recover/1` in numpy. See shardmill.kernels.recover."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32, U16, U32

U64 = NDArray[np.uint64]
Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]  # see recover.intervals
_SET_ELEMENTS = 1 << 19  # numbers looked at together: each takes four words on the way


def candidates(sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32:
    """f32 [n, m, wanted], NaN where no scale explains the sample's mantissas; see recover.candidates."""
    first = with_maxima(mantissas(sample[:, :1], c), maxima)
    if not ((maxima != 0) & (_count(first) <= bounds[0].shape[1])).any():
        # Fresh weights, mostly: a single row has given them away.
        return np.full((*maxima.shape, wanted), np.nan, np.float32)
    return explained(with_maxima(mantissas(sample, c), maxima), maxima, wanted, bounds)


def explained(present: U64, maxima: U32, wanted: int, bounds: Bounds) -> F32:
    """The first scales that explain the sets u64 [n, m, 2] of mantissas: f32 [n, m, wanted], filled up with NaN."""
    found = np.full((*maxima.shape, wanted), np.nan, np.float32)
    few = (maxima != 0) & (_count(present) <= bounds[0].shape[1])
    if few.any():
        scales = _solve(present[few], maxima[few], bounds)
        numbers_first = np.argsort(np.isnan(scales), axis=1, kind="stable")[:, :wanted]
        found[few] = np.take_along_axis(scales, numbers_first, axis=1)
    return found


def mantissas(sample: U16, c: int) -> U64:
    """Which mantissas the numbers other than zero of each block have: bit sets, u64 [n, m, 2].

    sample: u16 [n, k, C]. Mantissas 0..63 are the bits of the first word, 64..127 those of the second.
    """
    n, k, C = sample.shape
    edges = np.arange(0, C, c)
    sets = np.zeros((n, edges.size, 2), np.uint64)
    step = max(1, _SET_ELEMENTS // (n * C))
    for begin in range(0, k, step):
        rows = sample[:, begin : begin + step]
        bit = np.left_shift(np.uint64(1), (rows & np.uint16(63)).astype(np.uint64))
        bit *= (rows & np.uint16(0x7FFF)) != 0
        upper = bit * ((rows & np.uint16(64)) != 0)
        columns = np.stack([np.bitwise_or.reduce(words, axis=1) for words in (bit ^ upper, upper)], axis=2)
        sets |= np.bitwise_or.reduceat(columns, edges, axis=1)
    return sets


def with_maxima(sets: U64, maxima: U32) -> U64:
    """The sets u64 [n, m, 2] with the mantissa of each block's maximum, u32 [n, m]."""
    of_maximum = (maxima[:, :, None] >> 22 & 1) == np.arange(2)
    shifts = (maxima >> 16 & 63).astype(np.uint64)[:, :, None]
    found: U64 = sets | np.left_shift(of_maximum.astype(np.uint64), shifts)
    return found


def _count(sets: U64) -> NDArray[Any]:
    counts: NDArray[Any] = np.bitwise_count(sets).sum(axis=2)
    return counts


def _members(sets: U64, most: int) -> NDArray[np.int64]:
    """The members of each set of 1 to `most`, the last one repeated to fill the row: i64 [k, most]."""
    low, high = sets[:, 0].copy(), sets[:, 1].copy()
    members = np.empty((len(sets), most), np.int64)
    for place in range(most):
        word = np.where(low != 0, low, high)
        lowest = word & -word
        index = np.bitwise_count(lowest - np.uint64(1)) + np.where(low != 0, 0, 64)
        members[:, place] = np.where(word != 0, index, members[:, place - 1])
        high = np.where(low != 0, high, high & ~lowest)
        low &= ~lowest
    return members


def _solve(present: U64, maxima: U32, bounds: Bounds) -> F32:
    """The scale that each top code allows, or NaN: f32 [k, 8], from bit sets u64 [k, 2] and maxima u32 [k]."""
    mantissa, exponent = (maxima >> 16) & 0x7F, (maxima >> 23).astype(np.int64) - 127 - 7
    tops = np.arange(bounds[0].shape[1])
    at = mantissa[:, None, None], tops[:, None], _members(present, tops.size)[:, None, :]
    low, high = bounds[0][at].max(axis=2), bounds[1][at].min(axis=2)
    power_of_two = np.ldexp(1.0, np.frexp(low)[1])  # the next one above low
    chosen = np.where(power_of_two < high, power_of_two, (low + high) / 2)
    return np.where(low <= high, np.ldexp(chosen, exponent[:, None]), np.nan).astype(np.float32)
