"""`mse/1`: of eight scales from amax / 448 upwards to nearly its double, the one with the least squared error.

E4M3 rounds alike in every octave, so scales beyond the double bring nothing new, and scales below amax / 448 clip
the largest weights, which costs more than it gains. Within the octave, which numbers happen to lie near to a code
is luck, and a block may choose its luck: the more, the fewer elements it has. Relative to amax/1 the error falls by
about 1 % in [128, 128] blocks and 4 % in [32, 32] blocks, of fresh weights; a native FP8 block keeps amax / 448.
`python -m bench.recipes` gives the figures.

The choice is exact enough to be the same everywhere: errors are summed as integers, so their order is free.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_scales import amax_scales
from shardmill.kernels.block_fp8_tiny import is_tiny
from shardmill.kernels.formats import F32, U32
from shardmill.kernels.pieces import Pieces, blocks_of

Block = tuple[int, int]

STEPS: Final = 8
"""Scales tried in the octave: amax / 448 times 1, 9/8, ... 15/8."""


class Rows(Protocol):
    """The part of block_fp8.Rows that is needed here."""

    def squared_errors(self, source: NDArray[Any], scales: F32, block: Block) -> NDArray[np.int64]: ...


def mse_scales(rows: Rows, source: NDArray[Any], maxima: U32, block: Block) -> tuple[F32, NDArray[np.bool_]]:
    """Scales f32 and which of them are not amax / 448, both [ceil(rows/r), ceil(C/c)] as maxima is.

    Of equal errors the smaller scale wins. Blocks of zeros, and those too tiny for the row form, keep amax / 448.
    """
    return _best(maxima, lambda step, trial: rows.squared_errors(source, trial, block))


def mse_in_pieces(rows: Rows, pieces: Pieces, maxima: U32, block: Block) -> tuple[F32, NDArray[np.bool_]]:
    """The same for one row of blocks, maxima u32 [1, m], with one pass over its pieces.

    Sums are kept in two words, as a block may have more elements than one word can count errors of.
    """
    base, _ = _base(maxima)
    high, low = np.zeros((2, STEPS, maxima.shape[1]), np.int64)
    for _, col, part in pieces():
        at, own = blocks_of(col, part, block[1]), (len(part), block[1])
        for step in range(STEPS):
            units = rows.squared_errors(part, _trial(base, step)[:, at], own)[0]
            high[step, at] += units >> 32
            low[step, at] += units & 0xFFFFFFFF
    sums = high.astype(np.float64) * 2.0**32 + low  # both exact, so rounded once
    return _best(maxima, lambda step, trial: sums[step][None])


def _base(maxima: U32) -> tuple[F32, NDArray[np.bool_]]:
    """The first scale tried of each block, and in which blocks any is."""
    plain = amax_scales(maxima)
    searched = (maxima != 0) & ~is_tiny(plain)
    return np.where(searched, plain, np.float32(1)), searched


def _trial(base: F32, step: int) -> F32:
    return base * np.float32(1 + step / STEPS)


def _best(maxima: U32, errors: Callable[[int, F32], NDArray[Any]]) -> tuple[F32, NDArray[np.bool_]]:
    """errors(step, trial): the squared errors of each block under its trial scale, in units of that squared."""
    plain = amax_scales(maxima)
    base, searched = _base(maxima)
    best, least = plain, np.full(plain.shape, np.inf)
    for step in range(STEPS if searched.any() else 0):
        trial = _trial(base, step)
        error = errors(step, trial) * trial.astype(np.float64) ** 2
        better = searched & (error < least)
        best, least = np.where(better, trial, best), np.where(better, error, least)
    return best, best != plain
