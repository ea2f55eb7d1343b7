"""MXFP4: E2M1 codes, two a byte [R, C/2], and one power of two for 32 neighbours of a row, as E8M0 codes [R, C/32].

Of the two powers of two that could serve, the smallest >= amax / 6 and its half, which clips, the law takes the one
with the less squared error; of equal ones the larger. So its error is never above that of ModelOpt (the first), of
compressed-tensors and of OCP's floor law (one or the other by amax alone). Errors are summed as whole numbers, so
that their order is free. Scales stay in 2^-100 .. 2^127.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E2M1_VALUES, F32, U32
from shardmill.kernels.group_codes import SMALLEST_SCALE, unpack_nibbles
from shardmill.pipeline.formats.base import (
    Arrays,
    Format,
    Params,
    Part,
    Setting,
    Shape,
    Spelling,
    columns_of,
    compressed,
)
from shardmill.pipeline.formats.scales import e8m0_codes, e8m0_values

GROUP: Final = 32
_MANTISSA: Final = np.uint32(0x7FFFFF)


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    return Part("codes", "U8", (R, C // 2)), Part("scales", "U8", (R, C // GROUP))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    amax = setting.codes.maxima(strip, GROUP)
    whole = _power_of_two(amax / np.float32(6))
    half = np.maximum(whole / np.float32(2), np.float32(SMALLEST_SCALE))
    codes = setting.codes.e2m1(strip, whole, GROUP)
    halved = setting.codes.e2m1(strip, half, GROUP)
    errors = setting.codes.e2m1_errors
    nearer = (half < whole) & (errors(strip, halved, half, GROUP) < 4 * errors(strip, codes, whole, GROUP))
    by_byte = np.repeat(nearer, GROUP // 2, axis=1)
    exponents = e8m0_codes(np.where(nearer, half, whole))
    exponents[amax == 0] = 0  # as ModelOpt writes a block of zeros
    return {"codes": np.where(by_byte, halved, codes), "scales": exponents}


def _power_of_two(wanted: F32) -> F32:
    """The smallest power of two >= wanted f32, and >= 2^-100."""
    bits: U32 = (np.maximum(wanted, np.float32(SMALLEST_SCALE)).view(np.uint32) + _MANTISSA) & ~_MANTISSA
    return bits.view(np.float32)


def _decode(arrays: Arrays, setting: Setting) -> F32:
    packed = np.ascontiguousarray(arrays["codes"].view(np.uint8))
    packed = packed.reshape(len(packed), -1)  # some store a row as [C/32, 16]
    scales = e8m0_values(arrays["scales"].view(np.uint8))
    return E2M1_VALUES[unpack_nibbles(packed)] * np.repeat(scales, GROUP, axis=1)


def _declared(params: Params) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP}
    return compressed({**weights, "scale_dtype": "torch.uint8"}, None, "mxfp4-pack-quantized")


def _blocks(shape: Shape) -> Shape:
    return shape[0], shape[1] * 2 // GROUP, GROUP // 2


def _weight_shape(stored: Shape, spelling: Spelling) -> Shape:
    if "codes" in spelling.shapes:
        return *stored[:-2], GROUP * stored[-2]
    return *stored[:-1], 2 * stored[-1]


FORMAT: Final = Format(
    name="mxfp4",
    title="MXFP4, a power of two for 32",
    laws={"mxfp4/1": "the better by squared error of the smallest power of two >= amax / 6 and its half"},
    spellings=(
        Spelling(
            "compressed-tensors", {"codes": ".weight_packed", "scales": ".weight_scale"}, entry=_declared
        ),
        Spelling("gpt-oss", {"codes": "_blocks", "scales": "_scales"}, shapes={"codes": _blocks}),
        Spelling(
            "deepseek-v4", {"codes": ".weight", "scales": ".scale"}, {"codes": "I8", "scales": "F8_E8M0"}
        ),
    ),
    parts=_parts,
    unfit=columns_of(GROUP),
    unit=lambda shape, params: (1, GROUP),
    weight_shape=_weight_shape,
    encode=_encode,
    decode=_decode,
)
