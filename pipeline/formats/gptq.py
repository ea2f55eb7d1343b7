"""GPTQ, as a source: unsigned 4- or 8-bit numbers packed along the transposed weight's columns, read to floats.

`qweight` I32 [C/8, R]: nibble i of word k is column 8k + i; `scales` F16 [C/g, R]; `qzeros` I32 [C/g, R/8], in
plain order, each stored less one (`gptq`; `gptq_v2` stores it as it is); `g_idx` I32 [C] names each column's
group. Value = (number - zero) * scale, in f32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling
from shardmill.pipeline.formats.scales import stored_scales

_IN_WORD: Final = 8
_SHIFTS: Final = np.arange(0, 32, 4, dtype=np.uint32)


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    groups = C // params.group
    return (
        Part("codes", "I32", (C // _IN_WORD, R), axis=1),
        Part("scales", "F16", (groups, R), axis=1),
        Part("zeros", "I32", (groups, R // _IN_WORD), _IN_WORD, axis=1),
        Part("groups", "I32", (C,), per=0),
    )


def _unfit(shape: Shape, params: Params) -> str | None:
    R, C = shape[-2:]
    if R % _IN_WORD or C % _IN_WORD or C % params.group:
        return (
            f"has shape [{R}, {C}]; GPTQ packs 8 columns a word, 8 zero points, and groups of {params.group}"
        )
    return None


def _decode(arrays: Arrays, setting: Setting) -> F32:
    words = np.ascontiguousarray(arrays["codes"]).view(np.uint32)
    codes = (words[:, None, :] >> _SHIFTS[None, :, None] & np.uint32(15)).reshape(
        -1, words.shape[1]
    )  # [C, R]
    zeros = _numbers(arrays["zeros"]) + np.float32(setting.law != "gptq_v2")
    groups = arrays["groups"].astype(np.intp)
    scales = stored_scales(arrays["scales"])
    values = (codes.astype(np.float32) - zeros[groups]) * scales[groups]
    return np.ascontiguousarray(values.T)


def _numbers(words: NDArray[Any]) -> F32:
    """I32 [n, R/8] -> f32 [n, R] of 0..15, the lowest nibble first."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    return (unsigned[:, :, None] >> _SHIFTS & np.uint32(15)).reshape(len(words), -1).astype(np.float32)


_NAMES: Final = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"}

FORMAT: Final = Format(
    name="gptq",
    title="GPTQ, 4 bits with zero points",
    laws={},
    spellings=(Spelling("gptq", _NAMES), Spelling("gptq_v2", _NAMES, law="gptq_v2")),
    parts=_parts,
    unfit=_unfit,
    unit=lambda shape, params: (1, params.group),
    weight_shape=lambda stored, spelling: (stored[1], _IN_WORD * stored[0]),
    group_of=lambda weight, scales: weight[1] // scales[0],
    encode=None,
    decode=_decode,
)
