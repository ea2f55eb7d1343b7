"""NVFP4, weights only (W4A16): E2M1 codes, two a byte, an E4M3 scale for 16 neighbours, one F32 number for the tensor.

The tensor's number comes from its amax, or that of its whole fused group, so it is surveyed first: runtimes keep one
for gate and up. Two laws, as two families of tools write it:

nvfp4/1     ModelOpt 0.47: s2 = amax / 2688; s = E4M3 of amax16 / (6 * s2), at least 2^-9, 1 for zeros; code of
            w / (s * s2). Value = code * (s * s2).
nvfp4-ct/1  compressed-tensors 0.20: g = 1 / amax * 2688, as PyTorch divides a number by a tensor; s = E4M3 of
            g * (amax16 / 6), 1/8 where that is 0; code of w / (s / g). Value = code * (s / g).

All in f32. s2 is at least 2^-100 (g at most 2^100), so that no product is subnormal. From MXFP4 the cast is ModelOpt's
closed form: s2 = 2^(k - 8), k the largest exponent of a group that is not all zeros; then s = 2^(k_j - k + 8) is an
E4M3 number for 18 octaves, and codes stay as they are. What is out of the window is encoded anew.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_numpy import e4m3_codes
from shardmill.kernels.formats import E2M1_VALUES, E4M3_MAX, E4M3_VALUES, F32, U8
from shardmill.kernels.group_codes import SMALLEST_SCALE, unpack_nibbles
from shardmill.pipeline.formats import mxfp4
from shardmill.pipeline.formats.base import (
    Arrays,
    Coded,
    Format,
    Params,
    Part,
    Recast,
    Setting,
    Shape,
    Spelling,
    columns_of,
    compressed,
)
from shardmill.pipeline.formats.scales import e8m0_values

GROUP: Final = 16
COMPRESSED: Final = "nvfp4-ct/1"
_SIX: Final = np.float32(6)
_WHOLE: Final = np.float32(6 * E4M3_MAX)  # 2688
_FLOOR: Final = np.float32(SMALLEST_SCALE)
_SMALLEST: Final = np.float32(2.0**-9)  # of E4M3
_ONE: Final = np.uint8(0x38)  # 1 as E4M3
_EIGHTH: Final = np.uint8(0x20)  # 1/8 as E4M3
_WINDOW: Final = (np.float32(2.0**-9), np.float32(2.0**8))  # powers of two that E4M3 holds


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    return (
        Part("codes", "U8", (R, C // 2)),
        Part("scales", "F8_E4M3", (R, C // GROUP)),
        Part("global", "F32", (1,), per=0),
    )


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    assert setting.amax is not None, "NVFP4 is surveyed first"
    amax = setting.codes.maxima(strip, GROUP)
    if setting.law == COMPRESSED:
        number, scales, divisors = _reciprocal(amax, setting.amax)
    else:
        number, scales, divisors = _multiplied(amax, setting.amax)
    codes = setting.codes.e2m1(strip, divisors, GROUP)
    return {"codes": codes, "scales": scales, "global": np.array([number], np.float32)}


def _multiplied(amax: F32, largest: np.float32) -> tuple[np.float32, U8, F32]:
    """nvfp4/1: s2, the groups' E4M3 codes, and what weights are divided by, f32 like amax."""
    number = np.maximum(largest / _WHOLE, _FLOOR) if largest else np.float32(1)
    scales = e4m3_codes(np.clip(amax / (_SIX * number), _SMALLEST, np.float32(E4M3_MAX)))
    scales[amax == 0] = _ONE
    return number, scales, E4M3_VALUES[scales] * number


def _reciprocal(amax: F32, largest: np.float32) -> tuple[np.float32, U8, F32]:
    """nvfp4-ct/1: the same for g."""
    with np.errstate(over="ignore"):  # of the smallest numbers: the floor holds then
        number = (
            np.minimum(np.float32(1) / largest * _WHOLE, np.float32(1) / _FLOOR) if largest else np.float32(1)
        )
    scales = e4m3_codes(np.minimum(number * (amax / _SIX), np.float32(E4M3_MAX)))
    scales[scales == 0] = _EIGHTH
    return number, scales, E4M3_VALUES[scales] / number


def _decode(arrays: Arrays, setting: Setting) -> F32:
    number = np.float32(arrays["global"].reshape(-1)[0])
    steps = E4M3_VALUES[arrays["scales"].view(np.uint8)]
    scales = steps / number if "global_scale" in setting.spelling.ends["global"] else steps * number
    packed = np.ascontiguousarray(arrays["codes"].view(np.uint8))
    return E2M1_VALUES[unpack_nibbles(packed)] * np.repeat(scales, GROUP, axis=1)


def _survey_mxfp4(arrays: Arrays) -> np.float32:
    """The largest scale 2^k of an MXFP4 strip's groups that are not all zeros; 0 where all are."""
    scales = e8m0_values(arrays["scales"].view(np.uint8))
    return np.float32(np.where(_magnitudes(arrays).any(axis=2), scales, 0).max(initial=0))


def _magnitudes(arrays: Arrays) -> U8:
    """Magnitude codes of MXFP4's groups: u8 [rows, C/32, 32]."""
    packed = np.ascontiguousarray(arrays["codes"].view(np.uint8))
    return (unpack_nibbles(packed) & np.uint8(7)).reshape(len(packed), -1, mxfp4.GROUP)


def _from_mxfp4(coded: Coded, setting: Setting) -> dict[str, NDArray[Any]]:
    """The closed form, for a strip whose checkpoint has the largest scale setting.amax."""
    assert setting.amax is not None
    arrays = coded.arrays
    number = np.maximum(setting.amax / _WINDOW[1], _FLOOR) if setting.amax else np.float32(1)
    k = e8m0_values(arrays["scales"].view(np.uint8))
    magnitudes = _magnitudes(arrays)
    within = (k >= _WINDOW[0] * number) & (k <= _WINDOW[1] * number)
    data = E2M1_VALUES[magnitudes].max(axis=2) * k
    amax = np.where(within, _SIX * k, data)
    wanted: F32 = np.clip(amax / (_SIX * number), _SMALLEST, np.float32(E4M3_MAX)).astype(np.float32)
    scales = np.repeat(e4m3_codes(wanted), 2, axis=1)
    packed = np.ascontiguousarray(arrays["codes"].view(np.uint8))
    packed = packed.reshape(len(packed), -1)
    if not within.all():
        weights = E2M1_VALUES[unpack_nibbles(packed)] * np.repeat(k, mxfp4.GROUP, axis=1)
        again = setting.codes.e2m1(weights, E4M3_VALUES[scales] * number, GROUP)
        packed = np.where(np.repeat(within, mxfp4.GROUP // 2, axis=1), packed, again)
    stored = np.float32(1) / number if "global_scale" in setting.spelling.ends["global"] else number
    return {"codes": packed, "scales": scales, "global": np.array([stored], np.float32)}


def _declared(params: Params) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP}
    return compressed({**weights, "scale_dtype": "torch.float8_e4m3fn"}, None, "nvfp4-pack-quantized")


def _algo(params: Params) -> dict[str, Any]:
    return {"quant_algo": "W4A16_NVFP4", "group_size": GROUP}


def _scalar(shape: Shape) -> Shape:
    return ()


_MODELOPT: Final = {"codes": ".weight", "scales": ".weight_scale", "global": ".weight_scale_2"}
_PACKED: Final = {"codes": ".weight_packed", "scales": ".weight_scale", "global": ".weight_global_scale"}

FORMAT: Final = Format(
    name="nvfp4",
    title="NVFP4, weights only",
    laws={
        "nvfp4/1": "ModelOpt's: amax / 2688, and amax16 / 6 over that, as E4M3",
        COMPRESSED: "compressed-tensors': the tensor's number is stored as its reciprocal",
    },
    spellings=(
        Spelling("modelopt-mixed", _MODELOPT, shapes={"global": _scalar}, entry=_algo),
        Spelling("modelopt", _MODELOPT, shapes={"global": _scalar}, entry=_algo),
        Spelling(
            "compressed-tensors",
            _PACKED,
            entry=_declared,
            law=COMPRESSED,
            unread_expert="transformers unpacks an expert without its weight_global_scale: wrong numbers, unannounced",
        ),
    ),
    parts=_parts,
    unfit=columns_of(GROUP),
    unit=lambda shape, params: (1, GROUP),
    encode=_encode,
    decode=_decode,
    surveys=True,
    weight_shape=lambda stored, spelling: (*stored[:-1], 2 * stored[-1]),
    recasts={"mxfp4": Recast(_from_mxfp4, _survey_mxfp4, unit=(1, mxfp4.GROUP))},
)
