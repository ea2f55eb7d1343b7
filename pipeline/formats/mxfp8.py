"""MXFP8: E4M3 codes [R, C] and one power of two for 32 neighbours of a row, as E8M0 codes u8 [R, C/32].

The law is `ue8m0/1` in blocks of [1, 32]: the smallest power of two >= amax / 448, so that nothing is clipped. These
are the bits of ModelOpt 0.47's MXFP8QTensor. A block of zeros has the E8M0 code 0, as there. OCP's own floor law
(torchao's default) clips what lies between 448 and 512 times the scale.
"""

from __future__ import annotations

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
    columns_of,
    compressed,
)
from shardmill.pipeline.formats.fp8 import CODES, encode_blocks
from shardmill.pipeline.formats.scales import e8m0_codes, e8m0_values

GROUP: Final = 32
BLOCK: Final = (1, GROUP)


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return Part("codes", CODES, shape), Part("scales", "U8", (shape[0], shape[1] // GROUP))


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    codes, scales, _ = encode_blocks(strip, setting, BLOCK, "ue8m0/1")
    exponents = e8m0_codes(scales)
    empty = scales == 1  # the scale of zeros, but of others too
    if empty.any():
        exponents[empty & (_largest_codes(codes) == 0)] = 0
    return {"codes": codes, "scales": exponents}


def _largest_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The largest magnitude's code of each group: u8 [rows, C/32]."""
    largest: NDArray[np.uint8] = (codes & np.uint8(0x7F)).reshape(len(codes), -1, GROUP).max(axis=2)
    return largest


def _decode(arrays: Arrays, setting: Setting) -> F32:
    return decode(arrays["codes"].view(np.uint8), e8m0_values(arrays["scales"].view(np.uint8)), BLOCK)


_NAMES: Final = {"codes": ".weight", "scales": ".weight_scale"}
_GROUPED: Final = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": GROUP}
_GROUP_INPUTS: Final = {
    **DYNAMIC_TOKENS,
    "strategy": "group",
    "group_size": GROUP,
    "scale_dtype": "torch.uint8",
}


def _declared(params: Params) -> dict[str, Any]:
    return compressed({**_GROUPED, "scale_dtype": "torch.uint8"}, _GROUP_INPUTS, "mxfp8-quantized")


def _algo(params: Params) -> dict[str, Any]:
    return {"quant_algo": "MXFP8", "group_size": GROUP}


FORMAT: Final = Format(
    name="mxfp8",
    title="MXFP8, a power of two for 32",
    laws={"mxfp8/1": "the smallest power of two >= amax / 448"},
    spellings=(
        Spelling(
            "compressed-tensors",
            _NAMES,
            entry=_declared,
            unread_expert="transformers multiplies an expert by the bytes of its exponents, and stops at their shape",
        ),
        Spelling("modelopt-mixed", _NAMES, entry=_algo),
        Spelling("modelopt", _NAMES, entry=_algo),
    ),
    parts=_parts,
    unfit=columns_of(GROUP),
    unit=lambda shape, params: BLOCK,
    encode=_encode,
    decode=_decode,
)
