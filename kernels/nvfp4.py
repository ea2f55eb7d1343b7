"""NVFP4 weights: E2M1 codes, one E4M3 scale for 16 neighbours in a row, one f32 scale for the tensor.

Value = E2M1 code * (E4M3 group scale * f32 tensor scale), both products in f32. Stored as ModelOpt stores it:
`weight` u8 [R, C/2], two codes a byte, the lower column in the lower nibble; `weight_scale` E4M3 [R, C/16];
`weight_scale_2` f32, which is the tensor's amax / (6 * 448), so that the largest group's scale is 448.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX, E4M3_VALUES, F32, U8, nearest_codes

GROUP: Final = 16  # columns that share a scale (NVIDIA's format)
_SMALLEST_SCALE_CODE: Final = 1  # 2^-9: no group has the scale 0, so that every scale can be divided by


def encode(weights: F32, tensor_scale: np.float32 | None = None) -> tuple[U8, U8, np.float32]:
    """weights f32 [R, C], C % 16 == 0 -> packed u8 [R, C/2], group scales as E4M3 codes u8 [R, C/16], tensor scale.

    A tensor_scale that is given is used, as fused halves must share one; group scales then saturate at 448. The
    code is the nearest to w / scale, ties to even. A tensor of zeros gets the tensor scale 1.
    """
    R, C = weights.shape
    assert C % GROUP == 0, f"{C} columns are not groups of {GROUP}"
    groups = weights.reshape(R, C // GROUP, GROUP)
    amax = np.abs(groups).max(axis=2)  # [R, C/16]
    if tensor_scale is None:
        largest = np.float32(amax.max(initial=0))
        tensor_scale = largest / np.float32(E2M1_MAX * E4M3_MAX) if largest else np.float32(1)
    wanted = np.minimum(amax / np.float32(E2M1_MAX) / tensor_scale, np.float32(E4M3_MAX))
    group_scales = np.maximum(nearest_codes(wanted, E4M3_VALUES), _SMALLEST_SCALE_CODE).astype(np.uint8)
    scales = E4M3_VALUES[group_scales] * tensor_scale
    codes = nearest_codes(groups / scales[:, :, None], E2M1_VALUES).reshape(R, C)
    return pack(codes), group_scales, tensor_scale


def decode(packed: U8, group_scales: U8, tensor_scale: np.float32) -> F32:
    """packed u8 [R, C/2], group scales as E4M3 codes u8 [R, C/16], tensor scale f32 -> f32 [R, C]."""
    scales = E4M3_VALUES[group_scales] * np.float32(tensor_scale)
    return E2M1_VALUES[unpack(packed)] * np.repeat(scales, GROUP, axis=1)


def rescale(group_scales: U8, own: np.float32, other: np.float32) -> tuple[U8, NDArray[np.bool_]]:
    """Group scales, as E4M3 codes of any shape, that stood under the tensor scale `own`, for the scale `other` >= own.

    Each becomes the nearest E4M3 to value * (own / other), ties to even, in f32. Returns the new codes and, of the
    same shape, which of them vanish: not zero before, zero now.
    """
    assert other >= own, f"{other} < {own}: a group scale could leave E4M3's range"
    shrunk = nearest_codes(E4M3_VALUES * (own / other), E4M3_VALUES)  # one product a code: there are 256
    shrunk[np.isnan(E4M3_VALUES)] = np.flatnonzero(np.isnan(E4M3_VALUES))
    codes = shrunk[group_scales]
    return codes, (codes & 0x7F == 0) & (group_scales & 0x7F != 0)


def code_energy(packed: U8, groups: int) -> NDArray[np.float64]:
    """Sum of the squares of a group's E2M1 values, f64 [groups], of packed codes u8 with 16 codes a group."""
    squares = E2M1_VALUES.astype(np.float64) ** 2
    pairs = squares[np.arange(256) & 15] + squares[np.arange(256) >> 4]  # a byte holds two codes
    energy: NDArray[np.float64] = pairs[packed.reshape(groups, GROUP // 2)].sum(axis=1)
    return energy


def pack(codes: U8) -> U8:
    """E2M1 codes u8 [R, C] in 0..15 -> u8 [R, C/2], the even column in the lower nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def unpack(packed: U8) -> U8:
    """The inverse of `pack`: u8 [R, C/2] -> u8 [R, C]."""
    R, half = packed.shape
    return np.stack([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=2).reshape(R, 2 * half)
