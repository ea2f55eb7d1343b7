"""A format that was added: INT6 as INT8 codes with a scale a row, small enough to read. See test_worked_example."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32
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

BITS: Final = 6


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", "I8", shape), Part("scales", "F32", (shape[0], 1))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    width = strip.shape[1]
    scales = np.maximum(setting.codes.maxima(strip, width) / np.float32(31.5), np.float32(2.0**-100))
    return {"codes": setting.codes.integers(strip, scales, width, BITS), "scales": scales}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    return arrays["codes"].astype(np.float32) * arrays["scales"]


FORMAT: Final = Format(
    name="int6-channel",
    title="INT6, a scale a row",
    laws={"int6/1": "amax / 31.5"},
    spellings=(
        Spelling(
            "compressed-tensors",
            {"codes": ".weight", "scales": ".weight_scale"},
            entry=lambda params: compressed(
                {"num_bits": BITS, "type": "int", "strategy": "channel"}, None, "int-quantized"
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
