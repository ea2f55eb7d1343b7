"""FP6 by channel, added by the worked example: E2M3 codes, one a byte [R, C], and an F32 scale a row [R, 1]."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.formats.base import (
    Arrays,
    Format,
    Params,
    Part,
    Setting,
    Shape,
    Spelling,
    always_fit,
    compressed,
)

_MAGNITUDES: Final = np.array(
    [0.125 * i for i in range(8)] + [2.0**e * (1 + m / 8) for e in range(3) for m in range(8)]
)
_MIDDLES: Final = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", "U8", shape), Part("scales", "F32", (shape[0], 1))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    amax = setting.codes.maxima(strip, strip.shape[1])
    scales = np.where(amax == 0, np.float32(1), amax / np.float32(7.5)).astype(np.float32)
    quotients = widened(strip) / scales
    codes = np.searchsorted(_MIDDLES, np.abs(quotients)).astype(np.uint8)
    return {"codes": codes | np.signbit(quotients).astype(np.uint8) << np.uint8(5), "scales": scales}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    codes = arrays["codes"]
    values = _MAGNITUDES[codes & np.uint8(31)] * np.where(codes & np.uint8(32), -1, 1)
    return values.astype(np.float32) * arrays["scales"]


FORMAT: Final = Format(
    name="fp6-channel",
    title="FP6, a scale a row",
    laws={"fp6/1": "amax / 7.5"},
    spellings=(
        Spelling(
            "compressed-tensors",
            {"codes": ".weight", "scales": ".weight_scale"},
            entry=lambda params: compressed(
                {"num_bits": 6, "type": "float", "strategy": "channel"}, None, "fp6-in-bytes"
            ),
        ),
    ),
    parts=_parts,
    unfit=always_fit,
    unit=lambda shape, params: (1, shape[1]),
    cut=lambda shape, params: (1, 1),
    encode=_encode,
    decode=_decode,
)
