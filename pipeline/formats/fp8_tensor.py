"""FP8 per tensor: E4M3 codes [R, C] and one F32 scale, amax / 448 of the weight or of its whole fused group.

A runtime that fuses q, k and v has one scale for the three, and re-rounds codes where they differ; so a fused group
is surveyed first and shares its maximum.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import decode
from shardmill.kernels.block_fp8_scales import amax_scales, bf16_scales
from shardmill.kernels.block_fp8_tiny import is_tiny, tiny_codes
from shardmill.kernels.formats import F32
from shardmill.pipeline.formats.base import (
    DYNAMIC_TOKENS,
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
from shardmill.pipeline.formats.fp8 import CODES
from shardmill.pipeline.formats.scales import stored_scales


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", CODES, shape), Part("scales", "F32", (1,), per=0)


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    assert setting.amax is not None, "FP8 per tensor is surveyed first"
    choose = bf16_scales if setting.law == "amax-bf16/1" else amax_scales
    scales = choose(np.array([[setting.amax]], np.float32).view(np.uint32))
    codes = np.empty(strip.shape, np.uint8)
    if is_tiny(scales).any():
        codes[...] = tiny_codes(strip, scales[0, 0])
    else:
        setting.codes.rows.codes(strip, scales, strip.shape, codes)
    return {"codes": codes, "scales": scales.reshape(1)}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    codes = arrays["codes"].view(np.uint8)
    return decode(codes, stored_scales(arrays["scales"]).reshape(1, 1), codes.shape)


_NAMES: Final = {"codes": ".weight", "scales": ".weight_scale"}


def _scalar(shape: Shape) -> Shape:
    return ()


FORMAT: Final = Format(
    name="fp8-tensor",
    title="FP8, one scale",
    laws={
        "amax/1": "amax / 448, of the whole fused group",
        "amax-bf16/1": "the same rounded to BF16",
    },
    spellings=(
        Spelling(
            "fp8",
            _NAMES,
            shapes={"scales": _scalar},
            entry=lambda params: {},
            unread="transformers knows weight_scale_inv alone, and so takes codes for weights without a scale",
        ),
        Spelling(
            "ministral", {"codes": ".weight", "scales": ".weight_scale_inv"}, shapes={"scales": _scalar}
        ),
        Spelling(
            "compressed-tensors",
            _NAMES,
            entry=lambda params: compressed(
                {"num_bits": 8, "type": "float", "strategy": "tensor"}, DYNAMIC_TOKENS, "float-quantized"
            ),
            drafted="amax-bf16/1",
        ),
    ),
    parts=_parts,
    unfit=always_fit,
    unit=lambda shape, params: (shape[0], shape[1]),
    counted=lambda shape, params: (1, shape[1]),
    cut=lambda shape, params: (1, 1),
    encode=_encode,
    decode=_decode,
    surveys=True,
)
