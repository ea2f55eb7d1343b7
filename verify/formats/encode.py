"""The judge's own slow encoder of one block, from the written recipes; no line of it is shared with the pipeline.

amax/1     scale = amax / 448 in f32 (IEEE division; 1.0 for a block of zeros); code = the E4M3 value nearest to the
           f32 quotient w / scale clipped to +-448, ties to the even code; the sign of zero is kept.
amax-bf16/1
           scale = amax / 448 in f32, rounded to BF16 with ties to even, at least 2^-133; codes with that scale.
ue8m0/1    scale = the smallest power of two >= amax / 448 and >= 2^-127; codes with that scale.
mse/1      of amax / 448 times 1, 9/8 ... 15/8 (f32 products) the scale with the least squared error, the smaller of
           equals; codes with it. An error is the sum, over the block, of (quotient - value of its code)^2 in whole
           units of 2^-30, times the scale's square in f64. Blocks of zeros or of a scale below 2^-116 are amax/1's.
recover/1  a scale and codes that decode (f32 product, rounded to BF16) to the block bit for bit, or else amax/1.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E4M3_VALUES

F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]

MAX = np.float32(448)
RECIPES = ("amax/1", "amax-bf16/1", "ue8m0/1", "recover/1", "mse/1")
SMALLEST_F32 = np.float32(2.0**-149)  # no scale of a block that is not all zeros is zero
_SEARCHED_FROM = np.float32(2.0**-116)
_OCTAVE = 8  # scales that mse/1 tries

_MAGNITUDES = E4M3_VALUES[:0x7F].astype(np.float64)  # of the codes 0x00 to 0x7E, ascending
_MIDDLES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2  # exact: E4M3 has 4 significant bits, f64 has 53


def encode_block(block: F32, recipe: str) -> tuple[np.float32, U8]:
    """(scale, codes of the block's shape) of a finite block by amax/1, amax-bf16/1, ue8m0/1 or mse/1."""
    amax = np.abs(block).max()
    if amax == 0:
        scale = np.float32(1)
    elif recipe == "ue8m0/1":
        scale = _power_of_two(amax)
    elif recipe == "amax-bf16/1":
        scale = bf16_at_least(_divided(amax, MAX))
    else:
        scale = max(_divided(amax, MAX), SMALLEST_F32)
        if recipe == "mse/1" and scale >= _SEARCHED_FROM:
            scale = _least_error(block, scale)
    return scale, nearest(quotients(block, scale))


def _least_error(block: F32, plain: np.float32) -> np.float32:
    """The scale of mse/1, `plain` being amax / 448."""
    best, least = plain, np.inf
    for step in range(_OCTAVE):
        trial = plain * np.float32(1 + step / _OCTAVE)
        ratios = quotients(block, trial)
        values = np.copysign(_MAGNITUDES[nearest(ratios) & 0x7F], ratios)
        units = int(np.rint((ratios - values) ** 2 * 2.0**30).astype(np.int64).sum())
        error = float(units) * float(trial) ** 2
        if error < least:
            best, least = trial, error
    return best


def _divided(a: Any, b: Any) -> np.float32:
    """f32 division by f64: exact quotients of f32 numbers round to f32 the same from f64, and no flag flushes them."""
    return np.float32(np.float64(a) / np.float64(b))


def quotients(block: F32, scale: np.float32) -> NDArray[np.float64]:
    rounded: F32 = (block.astype(np.float64) / np.float64(scale)).astype(np.float32)
    return np.asarray(np.clip(rounded, -MAX, MAX), np.float64)


def bf16_at_least(scale: np.float32) -> np.float32:
    """The BF16 nearest to a scale, and no smaller than the smallest."""
    bits = max(int(_bf16_bits(np.array([scale], np.float32))[0]), 1)
    return np.float32(np.array([bits << 16], np.uint32).view(np.float32)[0])


def _power_of_two(amax: Any) -> np.float32:
    from fractions import Fraction  # with its decimals a tenth of what a question imports

    wanted = Fraction(float(amax)) / 448
    exponent = -127
    while Fraction(2) ** exponent < wanted:
        exponent += 1
    return np.float32(2.0**exponent)


def nearest(quotients: NDArray[np.float64]) -> U8:
    """Codes of the nearest E4M3 values, found by search among the middles between neighbours."""
    magnitude = np.abs(quotients)
    below = np.searchsorted(_MIDDLES, magnitude, side="left").astype(np.uint8)  # a tie goes to the lower code
    above = np.searchsorted(_MIDDLES, magnitude, side="right").astype(np.uint8)
    even = np.where(below % 2 == 0, below, above)  # below != above only at a tie
    return np.asarray(even | (np.signbit(quotients).astype(np.uint8) << 7), np.uint8)


def decodes_to(block: F32, scale: np.float32, codes: U8) -> bool:
    """Whether bf16(code * scale) equals a block of BF16 values bit for bit, the signs of zeros included."""
    product = E4M3_VALUES[codes] * np.float32(scale)
    return bool(np.array_equal(_bf16_bits(product), np.ascontiguousarray(block).view(np.uint32) >> 16))


def _bf16_bits(values: F32) -> NDArray[np.uint32]:
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)
