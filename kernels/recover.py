"""`recover/1`: the scale that a block had before it was decoded to BF16, so that nothing is lost again.

Some parents carry BF16 copies of weights that were block FP8 once: w = bf16(code * s). Rounding moved amax, so
amax / 448 is no longer s, and every code that is right is multiplied by a scale that is wrong. But s can be had:

- A code is m * 2^k with m in 8..15 (E4M3's subnormal codes are doublings of such numbers), and BF16 rounds alike
  at every power of two. So a block that is such a copy has at most eight different BF16 mantissas. That alone
  tells fresh weights apart, at a glance.
- Guess which code the largest magnitude came from. Its power of two is free: doubling every code and halving s
  gives the same weights, so the largest such code is as good as any. Eight guesses cover all, 448 the first.
- The guess gives s within a BF16 rounding, 2^-9, which is finer than the steps of E4M3: so every mantissa's m is
  known, and with it the interval of the s that m * s could have been rounded from. s lies in all of them.
- Take a power of two if the intersection holds one (UE8M0 scales; a runtime that rounds scales so then loses
  nothing), else its middle as f32. Then decode the block and compare: a block is called exact only if every
  bit of it is the parent's. All others get `amax/1`.

"Exact" is said of the weights rounded to BF16, as the parent holds them. Left in f32, code * s differs from them by
what BF16 rounding took away, 0.16 % on the whole. Of the original s, BF16 hides all but about 0.05 % (0.2 % at most);
amax / 448 errs by 0.12 %.

A block of zeros is exact. Blocks so tiny that their scale is below 2^-116 keep amax / 448, and are exact where that
happens to give every bit back; sources that are not BF16 are not tried.
"""

from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_scales import amax_scales
from shardmill.kernels.block_fp8_tiny import is_tiny, tiny_codes
from shardmill.kernels.formats import E4M3_VALUES, F32, U16, U32, f32_to_bf16
from shardmill.kernels.pieces import Pieces, blocks_of
from shardmill.kernels.recover_numpy import Bounds, explained, mantissas, with_maxima

Block = tuple[int, int]
Flags = NDArray[np.bool_]

TOP_CODES: Final = (448, 416, 384, 352, 320, 288, 256, 240)
"""For each m of 8..15 the largest E4M3 value with it, the likeliest first."""

SAMPLE_ELEMENTS: Final = 128
"""Elements of a block whose mantissas are looked up first; blocks that this misleads are looked through whole."""


class Rows(Protocol):
    """The part of block_fp8.Rows that is needed here."""

    def candidates(self, sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32: ...

    def lossless(self, source: U16, scales: F32, block: Block) -> Flags: ...


def recover_scales(rows: Rows, source: NDArray[Any], maxima: U32, block: Block) -> tuple[F32, Flags]:
    """Scales f32 and which of them are proven exact, both [ceil(rows/r), ceil(C/c)] as maxima is.

    source: [rows, C], of finite numbers; maxima: u32, f32 bits of each block's amax.
    """
    scales = amax_scales(maxima)
    if source.dtype != np.uint16:
        return scales, np.zeros(scales.shape, np.bool_)
    exact = maxima == 0
    for i, j in np.argwhere(is_tiny(scales) & ~exact):
        r, c = block
        exact[i, j] = _is_kept(source[i * r : (i + 1) * r, j * c : (j + 1) * c], scales[i, j])
    sampled = candidates(rows, _sample(source, block), maxima, block[1], wanted=1)[:, :, 0]
    hopeful = ~np.isnan(sampled)
    if not hopeful.any():
        return scales, exact
    trial = np.where(hopeful, sampled, np.where(is_tiny(scales), np.float32(1), scales))
    proven = hopeful & rows.lossless(source, trial, block)
    scales[proven] = trial[proven]
    exact |= proven
    for i, j in np.argwhere(hopeful & ~proven):
        r, c = block
        whole = np.ascontiguousarray(source[i * r : (i + 1) * r, j * c : (j + 1) * c])
        scales[i, j], exact[i, j] = _recover_block(rows, whole, maxima[i, j], scales[i, j])
    return scales, exact


def recover_in_pieces(rows: Rows, pieces: Pieces, maxima: U32, block: Block) -> tuple[F32, Flags]:
    """The same for one row of blocks, maxima u32 [1, m] and block (its own rows, c): one to four passes over it."""
    scales, exact = amax_scales(maxima), maxima == 0
    kept, sets, is_bf16 = _first_pass(pieces, scales, maxima, block)
    if not is_bf16:
        return scales, np.zeros(scales.shape, np.bool_)
    exact |= kept
    sampled = _none_tiny(explained(with_maxima(sets, maxima), maxima, 1, intervals()))[:, :, 0]
    hopeful = ~np.isnan(sampled)
    if not hopeful.any():
        return scales, exact
    otherwise = np.where(is_tiny(scales), np.float32(1), scales)
    trial = np.where(hopeful, sampled, otherwise)
    proven = hopeful & _lossless(rows, pieces, trial, block[1])
    scales[proven] = trial[proven]
    exact |= proven
    left = hopeful & ~proven
    if left.any():
        whole = np.zeros_like(sets)
        for _, col, part in pieces():
            whole[:, blocks_of(col, part, block[1])] |= mantissas(part[None], block[1])
        found = _none_tiny(explained(with_maxima(whole, maxima), maxima, len(TOP_CODES), intervals()))
        for place in range(len(TOP_CODES)):
            trial = found[:, :, place]
            tried = left & ~np.isnan(trial)
            if tried.any():
                proven = tried & _lossless(rows, pieces, np.where(tried, trial, otherwise), block[1])
                scales[proven] = trial[proven]
                exact |= proven
                left &= ~proven
    return scales, exact


def _first_pass(
    pieces: Pieces, scales: F32, maxima: U32, block: Block
) -> tuple[Flags, NDArray[np.uint64], bool]:
    """Which tiny blocks come back from their codes, the mantissas of the sampled rows, and whether it is BF16."""
    height, c = block
    sample, sets = _sampled_rows(height, c), np.zeros((*maxima.shape, 2), np.uint64)
    kept = is_tiny(scales) & (maxima != 0)
    for row, col, part in pieces():
        if part.dtype != np.uint16:
            return kept, sets, False
        at = blocks_of(col, part, c)
        wanted = sample[(row <= sample) & (sample < row + len(part))] - row
        if wanted.size:
            sets[:, at] |= mantissas(part[None, wanted], c)
        for j in at.start + np.flatnonzero(kept[0, at]):
            own = part[:, max(0, j * c - col) : (j + 1) * c - col]
            kept[0, j] = _is_kept(own, scales[0, j])
    return kept, sets, True


def _lossless(rows: Rows, pieces: Pieces, trial: F32, c: int) -> Flags:
    """Which blocks of one row decode under their trial scale to what they were: bool [1, m]."""
    same = np.ones(trial.shape, np.bool_)
    for _, col, part in pieces():
        at = blocks_of(col, part, c)
        same[:, at] &= rows.lossless(part, np.ascontiguousarray(trial[:, at]), (len(part), c))
    return same


def _none_tiny(found: F32) -> F32:
    found[is_tiny(found)] = np.nan
    return found


def _is_kept(source: U16, scale: np.float32) -> bool:
    """Whether a block too tiny for the row form happens to come back from its codes bit for bit."""
    return bool((f32_to_bf16(E4M3_VALUES[tiny_codes(source, scale)] * scale) == source).all())


def _recover_block(
    rows: Rows, source: U16, maximum: np.uint32, otherwise: np.float32
) -> tuple[np.float32, bool]:
    """One block [r, c], all of its elements looked at: the first candidate that is exact, or the other scale."""
    grid_of_one = np.full((1, 1), maximum, np.uint32)
    for scale in candidates(rows, source[None], grid_of_one, source.shape[1], wanted=len(TOP_CODES))[0, 0]:
        if not np.isnan(scale) and rows.lossless(source, np.full((1, 1), scale), source.shape)[0, 0]:
            return scale, True
    return otherwise, False


def candidates(rows: Rows, sample: U16, maxima: U32, c: int, wanted: int) -> F32:
    """The first `wanted` scales that explain a sample's mantissas, in the order of TOP_CODES.

    sample: u16 [n, k, C], some rows of each row of blocks; maxima: u32 [n, m] -> f32 [n, m, wanted], filled up
    with NaN.
    """
    return _none_tiny(rows.candidates(sample, maxima, c, wanted, intervals()))


@cache
def intervals() -> Bounds:
    """Lower and upper bounds of s / 2^E, f64 [128, 8, 128] by amax's mantissa, top code, and another mantissa.

    amax = (128 + its mantissa) * 2^E. A number 128 + mu stands for the reals from mu - 1/2 to mu + 1/2, but at
    a power of two the lower neighbour is but half as far. m may come out as 16, which is 8 one octave higher.
    """
    amax = np.arange(128, 256, dtype=np.float64)[:, None, None]
    other = np.arange(128, 256, dtype=np.float64)[None, None, :]
    guess = amax / np.array(TOP_CODES, dtype=np.float64)[None, :, None]
    fraction, exponent = np.frexp(other / guess)  # fraction in [1/2, 1), so that m = fraction * 16 in [8, 16)
    code = np.ldexp(np.rint(fraction * 16), exponent - 4)
    below = np.where(other == 128, 0.25, 0.5)
    return (other - below) / code, (other + 0.5) / code


def _sample(source: U16, block: Block) -> U16:
    """Some rows of each row of blocks, its first and its last among them: u16 [n, k, C]."""
    begins = np.arange(0, len(source), block[0])
    heights = np.minimum(block[0], len(source) - begins)
    sampled = {height: _sampled_rows(int(height), block[1]) for height in set(heights)}
    return source[begins[:, None] + np.stack([sampled[height] for height in heights])]


def _sampled_rows(height: int, c: int) -> NDArray[np.int64]:
    """Which of a block's `height` rows are looked at first, ascending; few columns want many."""
    count = max(2, -(-SAMPLE_ELEMENTS // c))
    return np.rint((height - 1) * (np.arange(count) / (count - 1))).astype(np.int64)
