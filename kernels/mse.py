"""`mse/1`: of eight scales from amax / 448 upwards to nearly its double, the one with the least squared error.

E4M3 rounds alike in every octave, so scales beyond the double bring nothing new, and scales below amax / 448 clip
the largest weights, which costs more than it gains. Within the octave, which numbers happen to lie near to a code
is luck, and a block may choose its luck: the more, the fewer elements it has. Relative to amax/1 the error falls by
about 1 % in [128, 128] blocks and 4 % in [32, 32] blocks, of fresh weights; a native FP8 block keeps amax / 448.
`python -m bench.recipes` gives the figures.

The choice is exact enough to be the same everywhere: errors are summed as integers, so their order is free.
"""

from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_scales import amax_scales
from shardmill.kernels.block_fp8_tiny import is_tiny
from shardmill.kernels.formats import F32, U32

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
    plain = amax_scales(maxima)
    searched = (maxima != 0) & ~is_tiny(plain)
    base = np.where(searched, plain, np.float32(1))
    best, least = plain, np.full(plain.shape, np.inf)
    for step in range(STEPS if searched.any() else 0):
        trial = base * np.float32(1 + step / STEPS)
        error = rows.squared_errors(source, trial, block) * trial.astype(np.float64) ** 2
        better = searched & (error < least)
        best, least = np.where(better, trial, best), np.where(better, error, least)
    return best, best != plain
