"""FP8 per channel: E4M3 codes [R, C] and one F32 scale a row, [R, 1]; activations are quantized token by token.

The law is `amax/1` with a row for its block, so the bits are those of compressed-tensors' FP8_DYNAMIC in F32.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import decode
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
from shardmill.pipeline.formats.fp8 import CODES, block_in_pieces, encode_blocks
from shardmill.pipeline.formats.scales import stored_scales


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", CODES, shape), Part("scales", "F32", (shape[0], 1))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    codes, scales, _ = encode_blocks(strip, setting, (1, strip.shape[1]), setting.law)
    return {"codes": codes, "scales": scales}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    codes = arrays["codes"].view(np.uint8)
    return decode(codes, stored_scales(arrays["scales"]).reshape(-1, 1), (1, codes.shape[1]))


_NAMES: Final = {"codes": ".weight", "scales": ".weight_scale"}

FORMAT: Final = Format(
    name="fp8-channel",
    title="FP8, a scale a row",
    laws={
        "amax/1": "amax / 448",
        "amax-bf16/1": "amax / 448 rounded to BF16",
        "mse/1": "the best by squared error of eight from amax / 448 on",
    },
    spellings=(
        Spelling(
            "compressed-tensors",
            _NAMES,
            entry=lambda params: compressed(
                {"num_bits": 8, "type": "float", "strategy": "channel"}, DYNAMIC_TOKENS, "float-quantized"
            ),
            drafted="amax-bf16/1",
        ),
        Spelling(
            "modelopt-mixed",
            _NAMES,
            shapes={"scales": lambda shape: shape[:1]},
            entry=lambda params: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        ),
        Spelling(
            "modelopt",
            _NAMES,
            shapes={"scales": lambda shape: shape[:1]},
            entry=lambda params: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        ),
    ),
    parts=_parts,
    unfit=always_fit,
    unit=lambda shape, params: (1, shape[1]),
    cut=lambda shape, params: (1, 1),  # a part of a row keeps its scale
    encode=_encode,
    decode=_decode,
    in_pieces=block_in_pieces(lambda params: (1, sys.maxsize)),  # a row, whatever its columns
)
