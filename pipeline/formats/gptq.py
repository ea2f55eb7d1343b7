"""GPTQ, as a source: unsigned 4- or 8-bit numbers packed along the transposed weight's columns, read to floats.

With n = 32 / bits numbers a word: `qweight` I32 [C/n, R], the i-th of word k is column nk + i; `scales` F16 [C/g, R];
`qzeros` I32 [C/g, R/n], in plain order, each stored less one (`gptq`; `gptq_v2` of config.json's `checkpoint_format`
stores it as it is); `g_idx` I32 [C] names each column's group, in any order. Value = (number - zero) * scale, in f32.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from shardmill.kernels.formats import F32
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling
from shardmill.pipeline.formats.scales import stored_scales

_WORD_BITS: Final = 32
_NAMES: Final = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"}


def _parts(bits: int, shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    groups, in_word = C // params.group, _WORD_BITS // bits
    return (
        Part("codes", "I32", (C // in_word, R), axis=1),
        Part("scales", "F16", (groups, R), axis=1),
        Part("zeros", "I32", (groups, R // in_word), in_word, axis=1),
        Part("groups", "I32", (C,), per=0),
    )


def _unfit(bits: int, shape: Shape, params: Params) -> str | None:
    (R, C), in_word = shape[-2:], _WORD_BITS // bits
    if R % in_word or C % in_word or C % params.group:
        return (
            f"has shape [{R}, {C}]; GPTQ packs {in_word} columns a word, {in_word} zero points, and groups of "
            f"{params.group}"
        )
    return None


def _decode(bits: int, less_one: bool, arrays: Arrays, setting: Setting) -> F32:
    words = np.ascontiguousarray(arrays["codes"]).view(np.uint32)
    shifts, mask = np.arange(0, _WORD_BITS, bits, dtype=np.uint32), np.uint32((1 << bits) - 1)
    codes = (words[:, None, :] >> shifts[None, :, None] & mask).reshape(-1, words.shape[1])  # [C, R]
    packed = np.ascontiguousarray(arrays["zeros"]).view(np.uint32)
    zeros = (packed[:, :, None] >> shifts & mask).reshape(len(packed), -1).astype(np.float32)
    groups = arrays["groups"].astype(np.intp)
    scales = stored_scales(arrays["scales"])
    values = (codes.astype(np.float32) - (zeros + np.float32(less_one))[groups]) * scales[groups]
    return np.ascontiguousarray(values.T)


def _format(name: str, bits: int, less_one: bool) -> Format:
    in_word = _WORD_BITS // bits
    return Format(
        name=name,
        title=f"GPTQ, {bits} bits with zero points" + ("" if less_one else ", version 2"),
        laws={},
        spellings=(Spelling(name, _NAMES),),
        parts=partial(_parts, bits),
        unfit=partial(_unfit, bits),
        unit=lambda shape, params: (1, params.group),
        weight_shape=lambda stored, spelling: (stored[1], in_word * stored[0]),
        group_of=lambda weight, scales: weight[1] // scales[0] if scales and scales[0] else 1,
        encode=None,
        decode=partial(_decode, bits, less_one),
    )


FORMATS: Final = (
    _format("gptq", 4, True),
    _format("gptq-8bit", 8, True),
    _format("gptq-v2", 4, False),
    _format("gptq-v2-8bit", 8, False),
)
