"""INT8 per channel: whole numbers -128..127 as I8 [R, C] and one F32 scale a row; activations token by token (W8A8).

scale = amax / 127.5, code = the nearest whole number to w / scale, ties to even: compressed-tensors' bits in F32.
`int8-bf16/1` rounds the scale to BF16 first, since loaders that keep scales in the model's dtype do so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.formats import F32, bf16_to_f32, f32_to_bf16
from shardmill.kernels.pieces import Pieces
from shardmill.pipeline.formats.base import (
    DYNAMIC_TOKENS,
    Arrays,
    Format,
    InPieces,
    Params,
    Part,
    Setting,
    Shape,
    Spelling,
    always_fit,
    compressed,
)
from shardmill.pipeline.formats.integers import scales_of
from shardmill.pipeline.formats.scales import stored_scales

BITS: Final = 8


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", "I8", shape), Part("scales", "F32", (shape[0], 1))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    width = strip.shape[1]
    scales = _scales(setting.codes.maxima(strip, width), setting)
    return {"codes": setting.codes.integers(strip, scales, width, BITS), "scales": scales}


def _scales(maxima: F32, setting: Setting) -> F32:
    scales = scales_of(maxima, BITS)
    return bf16_to_f32(f32_to_bf16(scales)) if setting.law == "int8-bf16/1" else scales


def _choose(pieces: Pieces, shape: tuple[int, int], setting: Setting) -> F32:
    largest = np.zeros((1, 1), np.float32)
    for row, col, part in pieces():
        try:
            np.maximum(largest, setting.codes.maxima(part, part.shape[1]), out=largest)
        except NonFinite as fault:
            raise NonFinite(row + fault.row, col + fault.col, fault.value) from None
    return _scales(largest, setting)


def _encode_part(part: NDArray[Any], scales: F32, setting: Setting) -> NDArray[Any]:
    return setting.codes.integers(part, scales, part.shape[1], BITS)


def _decode(arrays: Arrays, setting: Setting) -> F32:
    return arrays["codes"].view(np.int8).astype(np.float32) * stored_scales(arrays["scales"]).reshape(-1, 1)


def _declared(params: Params) -> dict[str, Any]:
    weights = {"num_bits": BITS, "type": "int", "strategy": "channel"}
    return compressed(weights, {**DYNAMIC_TOKENS, "type": "int"}, "int-quantized")


FORMAT: Final = Format(
    name="int8-channel",
    title="INT8, a scale a row",
    laws={"int8/1": "amax / 127.5", "int8-bf16/1": "amax / 127.5 rounded to BF16"},
    spellings=(
        Spelling(
            "compressed-tensors",
            {"codes": ".weight", "scales": ".weight_scale"},
            entry=_declared,
            drafted="int8-bf16/1",
            unread_expert="transformers unpacks an expert of whole numbers from weight_packed alone, and stops",
        ),
    ),
    parts=_parts,
    unfit=always_fit,
    unit=lambda shape, params: (1, shape[1]),
    cut=lambda shape, params: (1, 1),  # a part of a row keeps its scale
    encode=_encode,
    decode=_decode,
    in_pieces=InPieces(_choose, _encode_part, lambda scales, setting: scales),
)
