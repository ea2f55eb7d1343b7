"""INT4 by group, rounded to nearest (W4A16): -8..7 in eight nibbles of an I32, and a BF16 scale for g neighbours.

`pack-quantized` of compressed-tensors: `weight_packed` I32 [R, C/8], column 8k + i in bits 4i of word k, each number
plus 8; `weight_scale` BF16 [R, C/g]; `weight_shape` I64 [2]. The scale is amax / 7.5 in f32, rounded to BF16 before
codes are chosen, since that is what a runtime multiplies with; code = the nearest whole number to w / scale.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32, bf16_to_f32, f32_to_bf16
from shardmill.kernels.group_codes import pack_nibbles, unpack_nibbles
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling, compressed
from shardmill.pipeline.formats.integers import scales_of
from shardmill.pipeline.formats.scales import stored_scales

BITS: Final = 4
_OFFSET: Final = 8
_IN_WORD: Final = 8  # nibbles


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    return (
        Part("codes", "I32", (R, C // _IN_WORD)),
        Part("scales", "BF16", (R, C // params.group)),
        Part("shape", "I64", (2,), per=0),
    )


def _unfit(shape: Shape, params: Params) -> str | None:
    if shape[-1] % params.group or params.group % _IN_WORD:
        return f"has {shape[-1]} columns, which are not whole groups of {params.group}"
    return None


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    group = setting.params.group
    stored = f32_to_bf16(scales_of(setting.codes.maxima(strip, group), BITS))
    codes = setting.codes.integers(strip, bf16_to_f32(stored), group, BITS)
    nibbles = (codes + np.int8(_OFFSET)).view(np.uint8)
    return {"codes": pack_nibbles(nibbles).view("<i4"), "scales": stored}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    packed = np.ascontiguousarray(arrays["codes"]).view(np.uint8)
    codes = unpack_nibbles(packed).astype(np.float32) - np.float32(_OFFSET)
    scales = stored_scales(arrays["scales"])
    return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def _declared(params: Params) -> dict[str, Any]:
    weights = {"num_bits": BITS, "type": "int", "strategy": "group", "group_size": params.group}
    return compressed(weights, None, "pack-quantized")


_NAMES: Final = {"codes": ".weight_packed", "scales": ".weight_scale", "shape": ".weight_shape"}

FORMAT: Final = Format(
    name="int4-group",
    title="INT4, a scale for a group",
    laws={"int4/1": "amax / 7.5 as BF16, rounded to nearest"},
    spellings=(Spelling("compressed-tensors", _NAMES, entry=_declared),),
    parts=_parts,
    unfit=_unfit,
    unit=lambda shape, params: (1, params.group),
    weight_shape=lambda stored, spelling: (*stored[:-1], _IN_WORD * stored[-1]),
    group_of=lambda weight, scales: weight[-1] // scales[-1],
    encode=_encode,
    decode=_decode,
)
