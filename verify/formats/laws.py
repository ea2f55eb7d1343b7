"""What the pipeline's numerics make of floats, block by block: the judge's own slow code, from the written laws alone.

A law gives of one block, f32 [r, c], the scale that is stored for it, as a number, and a code for each element. All is
f32 arithmetic, an operation at a time. `total` is the number that the whole weight shares, with its fused group.

amax/1, amax-bf16/1, ue8m0/1, mse/1, recover/1   see verify.formats.encode; of an FP8 tensor amax is its group's
mxfp8/1     ue8m0/1 of [1, 32]; a block of zeros has the exponent 0
mxfp4/1     of the smallest power of two >= amax / 6 and its half the one of less squared error, of equals the larger;
            never below 2^-100; an error is counted as 32 at most, in whole units of 2^-30; zeros have the exponent 0
nvfp4/1     total = amax / 2688, at least 2^-100; scale = E4M3 of amax16 / (6 total), at least 2^-9, 1 for zeros
nvfp4-ct/1  total = 1 / amax * 2688, at most 2^100; scale = E4M3 of total * (amax16 / 6), 1/8 where that is 0
int8/1      scale = amax / 127.5, at least 2^-100, 1 for zeros; int8-bf16/1 rounds it to BF16 before codes are chosen
int4/1      scale = amax / 7.5, the same, rounded to BF16 before codes are chosen; a code is the number plus 8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES
from shardmill.verify.formats.encode import (
    RECIPES,
    SMALLEST_F32,
    bf16_at_least,
    encode_block,
    nearest,
    quotients,
)
from shardmill.verify.formats.linear import F32, U8

Made = tuple[np.float32, U8]  # a block's scale, and its codes, one a byte
Encode = Callable[[F32, np.float32], Made]

_LEAST = np.float32(2.0**-100)  # no scale of the formats of four and eight bits is below
_ZEROS = np.float32(2.0**-127)  # the exponent 0
_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between neighbours of E2M1
_SIX, _TOP, _WHOLE = np.float32(6), np.float32(448), np.float32(2688)


@dataclass(frozen=True, slots=True)
class Law:
    """How one kind of blocks is made by one numerics."""

    encode: Encode
    scale_dtypes: tuple[str, ...]
    total: Callable[[np.float32], np.float32] | None = None  # of the largest magnitude of the fused group
    by_row: bool = False  # one scale for the whole weight: a row is what is compared at once


def e2m1(numbers: F32) -> U8:
    """Nearest E2M1 codes of f32, ties to the even code; the sign of zero is kept."""
    magnitude = np.abs(numbers).astype(np.float64)
    below = np.searchsorted(_MIDDLES, magnitude, side="left")
    above = np.searchsorted(_MIDDLES, magnitude, side="right")
    even = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return np.asarray(even | (np.signbit(numbers).astype(np.uint8) << 3), np.uint8)


def _amax(block: F32) -> np.float32:
    return np.float32(np.abs(block).max(initial=0))


def _block_fp8(numerics: str) -> Encode:
    return lambda block, total: encode_block(block, numerics)


def tensor_scale(amax: np.float32) -> np.float32:
    """amax / 448 of FP8 with one scale; 1 for zeros."""
    return np.maximum(amax / _TOP, SMALLEST_F32) if amax else np.float32(1)


def tensor_scale_bf16(amax: np.float32) -> np.float32:
    """amax / 448 rounded to BF16; 1 for zeros."""
    return bf16_at_least(tensor_scale(amax)) if amax else np.float32(1)


def _tensor_fp8(block: F32, total: np.float32) -> Made:
    return total, nearest(quotients(block, total))


def _mxfp8(block: F32, total: np.float32) -> Made:
    scale, codes = encode_block(block, "ue8m0/1")
    return (scale if block.any() else _ZEROS), codes


def _mxfp4(block: F32, total: np.float32) -> Made:
    amax = _amax(block)
    mantissa, exponent = np.frexp(np.maximum(amax / _SIX, _LEAST))
    whole = np.float32(2.0 ** int(exponent - (mantissa == 0.5)))
    half = np.maximum(whole / np.float32(2), _LEAST)
    codes, halved = e2m1(block / whole), e2m1(block / half)
    nearer = half < whole and _units(block, half, halved) < 4 * _units(block, whole, codes)
    scale = half if nearer else whole
    return (scale if amax else _ZEROS), (halved if nearer else codes)


def _units(block: F32, scale: np.float32, codes: U8) -> int:
    """The squared error of E2M1 codes in whole units of 2^-30 of the scale squared."""
    errors = np.minimum(np.abs(E2M1_VALUES[codes] - block / scale), np.float32(32)).astype(np.float64)
    return int(np.floor(errors * errors * 2.0**30 + 0.5).astype(np.int64).sum())


def _e4m3(number: np.float32) -> np.float32:
    return np.float32(E4M3_VALUES[nearest(np.array([number], np.float64))[0]])


def _nvfp4_total(amax: np.float32) -> np.float32:
    return np.maximum(amax / _WHOLE, _LEAST) if amax else np.float32(1)


def _nvfp4(block: F32, total: np.float32) -> Made:
    amax = _amax(block)
    wanted = _e4m3(np.clip(amax / (_SIX * total), np.float32(2.0**-9), _TOP))
    scale = wanted if amax else np.float32(1)
    return scale, e2m1(block / (scale * total))


def _ct_nvfp4_total(amax: np.float32) -> np.float32:
    return np.minimum(np.float32(1) / amax * _WHOLE, np.float32(2.0**100)) if amax else np.float32(1)


def _ct_nvfp4(block: F32, total: np.float32) -> Made:
    scale = _e4m3(np.minimum(total * (_amax(block) / _SIX), _TOP)) or np.float32(0.125)
    return scale, e2m1(block / (scale / total))


def nvfp4_of_mxfp4(pair: F32, total: np.float32) -> Made:
    """Of 32 neighbours whose power of two E4M3 does not hold under `total`: both halves get one scale."""
    scale = _e4m3(np.clip(_amax(pair) / (_SIX * total), np.float32(2.0**-9), _TOP))
    return scale, e2m1(pair / (scale * total))


def _integer_scale(block: F32, half: float) -> np.float32:
    amax = _amax(block)
    return np.maximum(amax / np.float32(half), _LEAST) if amax else np.float32(1)


def _int8(block: F32, total: np.float32) -> Made:
    scale = _integer_scale(block, 127.5)
    return scale, np.clip(np.rint(block / scale), -128, 127).astype(np.int8).view(np.uint8)


def _int8_bf16(block: F32, total: np.float32) -> Made:
    scale = bf16(np.array([_integer_scale(block, 127.5)], np.float32))[0]
    return scale, np.clip(np.rint(block / scale), -128, 127).astype(np.int8).view(np.uint8)


def _int4(block: F32, total: np.float32) -> Made:
    scale = bf16(np.array([_integer_scale(block, 7.5)], np.float32))[0]
    return scale, (np.clip(np.rint(block / scale), -8, 7) + 8).astype(np.uint8)


def bf16(values: F32) -> F32:
    """f32 rounded to BF16, ties to even, as f32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded: NDArray[np.uint32] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return rounded.view(np.float32)


_POWERS = ("U8", "F8_E8M0")
LAWS: Mapping[tuple[str, str], Law] = {
    **{
        (kind, numerics): Law(_block_fp8(numerics), ("F32",))
        for kind in ("fp8-block", "fp8-grid", "fp8-channel", "fp8-tensor", "fp8-pbwo")
        for numerics in RECIPES
    },
    ("mxfp8", "mxfp8/1"): Law(_mxfp8, _POWERS),
    ("mxfp4", "mxfp4/1"): Law(_mxfp4, _POWERS),
    ("nvfp4", "nvfp4/1"): Law(_nvfp4, ("F8_E4M3",), _nvfp4_total),
    ("ct-nvfp4", "nvfp4-ct/1"): Law(_ct_nvfp4, ("F8_E4M3",), _ct_nvfp4_total),
    ("int8", "int8/1"): Law(_int8, ("F32",)),
    ("int8", "int8-bf16/1"): Law(_int8_bf16, ("F32",)),
    ("int-pack", "int4/1"): Law(_int4, ("BF16",)),
}
OF_A_TENSOR: Mapping[str, Law] = {  # FP8 with one scale of fewer than two axes
    "amax/1": Law(_tensor_fp8, ("F32",), tensor_scale, by_row=True),
    "amax-bf16/1": Law(_tensor_fp8, ("F32",), tensor_scale_bf16, by_row=True),
}
DECODED = (
    "dequantize/1",
    "dequantise/1",
    "bf16/1",
)  # codes, or floats, as BF16; the second is format 1's word
REBLOCK, RECONCILE = "reblock/1", "reconcile/1"
RECAST = "recast/1"  # codes kept under other scales where a block can; the others encoded anew
_ENCODED_ANEW: Mapping[str, Law] = {  # by the dtype of the scales
    "F32": Law(_block_fp8("amax/1"), ("F32",)),
    **{dtype: Law(_block_fp8("ue8m0/1"), (dtype,)) for dtype in _POWERS},
}
KEPT_IN_BLOCKS: Mapping[str, Mapping[str, Law]] = dict.fromkeys(
    ("fp8-block", "fp8-grid", "fp8-pbwo"), _ENCODED_ANEW
)
NUMERICS = frozenset((*(numerics for _, numerics in LAWS), *DECODED, REBLOCK, RECONCILE))
