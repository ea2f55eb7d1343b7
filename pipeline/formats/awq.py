"""AWQ, as a source: unsigned 4-bit numbers packed along the rows of the transposed weight, read to floats.

`qweight` I32 [C, R/8]: nibble i of a word is row 8k + (0, 2, 4, 6, 1, 3, 5, 7)[i]; `scales` F16 [C/g, R]; `qzeros` I32
[C/g, R/8], packed alike. Value = (number - zero) * scale, in f32. (AutoAWQ's GEMM version; vLLM 0.33.0 `awq`.)
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling
from shardmill.pipeline.formats.scales import stored_scales

_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble in which row 8k + i is
_IN_WORD: Final = 8


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    groups = C // params.group
    return (
        Part("codes", "I32", (C, R // _IN_WORD), _IN_WORD, axis=1),
        Part("scales", "F16", (groups, R), axis=1),
        Part("zeros", "I32", (groups, R // _IN_WORD), _IN_WORD, axis=1),
    )


def _unfit(shape: Shape, params: Params) -> str | None:
    R, C = shape[-2:]
    if R % _IN_WORD or C % params.group:
        return f"has shape [{R}, {C}]; AWQ packs 8 rows a word and groups of {params.group} columns"
    return None


def _decode(arrays: Arrays, setting: Setting) -> F32:
    codes, zeros = nibbles(arrays["codes"]), nibbles(arrays["zeros"])
    scales = stored_scales(arrays["scales"])
    group = len(codes) // len(scales)
    values = (codes - zeros.repeat(group, axis=0)) * scales.repeat(group, axis=0)
    return np.ascontiguousarray(values.T)


def nibbles(words: NDArray[Any]) -> F32:
    """I32 [n, R/8] -> the numbers 0..15 in the order of rows, f32 [n, R]."""
    shifts = np.array([4 * place for place in _ORDER], np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    return (unsigned[:, :, None] >> shifts & np.uint32(15)).reshape(len(words), -1).astype(np.float32)


FORMAT: Final = Format(
    name="awq",
    title="AWQ, 4 bits with zero points",
    laws={},
    spellings=(Spelling("awq", {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"}),),
    parts=_parts,
    unfit=_unfit,
    unit=lambda shape, params: (1, params.group),
    weight_shape=lambda stored, spelling: (_IN_WORD * stored[1], stored[0]),
    group_of=lambda weight, scales: weight[1] // scales[0],
    encode=None,
    decode=_decode,
)
