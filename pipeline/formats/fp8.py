"""FP8 with the scale of a block: E4M3 codes [R, C] and one scale for r x c elements, F32 or, as powers of two, E8M0.

Laws and bits are those of shardmill.kernels.block_fp8. A block of a whole row is FP8 per channel, of the whole weight
FP8 per tensor: see fp8_channel and fp8_tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import RECIPES, BlockEncoder, decode, grid
from shardmill.kernels.formats import F32, U8
from shardmill.kernels.pieces import Pieces
from shardmill.pipeline.formats.base import (
    RECAST,
    Arrays,
    Coded,
    Format,
    InPieces,
    Params,
    Part,
    Recast,
    Setting,
    Shape,
    Spelling,
    compressed,
)
from shardmill.pipeline.formats.kept import to_blocks
from shardmill.pipeline.formats.scales import e8m0_codes, stored_scales

CODES: Final = "F8_E4M3"
Block = tuple[int, int]


def encode_blocks(
    strip: NDArray[Any], setting: Setting, block: Block, law: str
) -> tuple[U8, F32, dict[str, int]]:
    """Codes u8 like the strip, scales f32 [ceil(rows/r), ceil(C/c)], and what the law counts."""
    codes, scales = np.empty(strip.shape, np.uint8), np.empty(grid(strip.shape, block), np.float32)
    counts = BlockEncoder(law, block, setting.codes.rows).encode(strip, codes, scales)
    return codes, scales, counts


def block_in_pieces(block: Callable[[Params], Block]) -> InPieces:
    """How E4M3 codes with a scale a block are made of a matrix in pieces; a block may be wider than the matrix."""

    def encoder(setting: Setting) -> BlockEncoder:
        return BlockEncoder(_law(setting), block(setting.params), setting.codes.rows)

    def choose(pieces: Pieces, shape: tuple[int, int], setting: Setting) -> F32:
        rows, C = shape
        return encoder(setting).choose(pieces, rows, -(-C // block(setting.params)[1]))[0]

    def encode(part: NDArray[Any], scales: F32, setting: Setting) -> NDArray[Any]:
        codes = np.empty(part.shape, np.uint8)
        encoder(setting).encode_with(part, scales, codes)
        return codes

    return InPieces(choose, encode, _stored)


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    scales = grid((R, C), params.block)
    return Part("codes", CODES, shape), Part("scales", params.scale_dtype, scales, params.block[0])


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    codes, scales, _ = encode_blocks(strip, setting, setting.params.block, _law(setting))
    return {"codes": codes, "scales": _stored(scales, setting)}


def _law(setting: Setting) -> str:
    """The law by which numbers are encoded: of `recast/1` that of the blocks that can't be kept."""
    if setting.law == RECAST:
        return "ue8m0/1" if _is_e8m0(setting) else "amax/1"
    return setting.law


def _is_e8m0(setting: Setting) -> bool:
    return "F8_E8M0" in (setting.spelling.dtypes.get("scales"), setting.params.scale_dtype)


def _stored(scales: F32, setting: Setting) -> NDArray[Any]:
    return e8m0_codes(scales) if _is_e8m0(setting) else scales


def _kept(coded: Coded, setting: Setting) -> dict[str, NDArray[Any]]:
    """The blocks of a quantized source with the scales under which they stay exact; the rest encoded anew."""
    block = setting.params.block
    codes, scales, exact = to_blocks(coded, setting, block)
    if not exact.all():
        again, other, _ = encode_blocks(coded.values, setting, block, _law(setting))
        lost = np.repeat(np.repeat(~exact, block[0], 0), block[1], 1)[: codes.shape[0], : codes.shape[1]]
        codes, scales = np.where(lost, again, codes), np.where(exact, scales, other)
    return {"codes": codes, "scales": _stored(scales, setting)}


def _decode(arrays: Arrays, setting: Setting) -> F32:
    codes = arrays["codes"].view(np.uint8)
    scales = stored_scales(arrays["scales"]).reshape(grid(codes.shape, setting.params.block))
    return decode(codes, scales, setting.params.block)


def _declared(params: Params) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(params.block)}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group"}
    return compressed(weights, {**inputs, "group_size": params.block[1]}, "float-quantized")


def four_axes(shape: Shape) -> Shape:
    """[n, m] -> [n, 1, m, 1], as ModelOpt stores the scales of FP8_PB_WO."""
    return shape[0], 1, shape[1], 1


def _fine(entry: str) -> Callable[[Params], dict[str, Any]]:
    return lambda params: {"quant_algo": entry, "group_size": params.block[0]}


_INVERSE: Final = {
    "codes": ".weight",
    "scales": ".weight_scale_inv",
}  # DeepSeek's name; the number multiplies
_PLAIN: Final = {"codes": ".weight", "scales": ".weight_scale"}

FORMAT: Final = Format(
    name="fp8-block",
    title="FP8, a scale a block",
    laws={name: recipe.law for name, recipe in RECIPES.items()},
    spellings=(
        Spelling("fp8", _INVERSE, entry=lambda params: {"weight_block_size": list(params.block)}),
        Spelling("modelopt-mixed", _INVERSE, entry=_fine("FP8_BLOCK")),
        Spelling("modelopt", _PLAIN, shapes={"scales": four_axes}, entry=_fine("FP8_PB_WO")),
        Spelling(
            "compressed-tensors",
            _PLAIN,
            entry=_declared,
            drafted="amax-bf16/1",
            unread_expert="transformers multiplies an expert by its scales without spreading them over blocks",
        ),
        Spelling("fp8-e8m0", _INVERSE, {"scales": "F8_E8M0"}),
        Spelling("deepseek-v4", {"codes": ".weight", "scales": ".scale"}, {"scales": "F8_E8M0"}),
    ),
    parts=_parts,
    unfit=lambda shape, params: None,
    unit=lambda shape, params: params.block,
    encode=_encode,
    decode=_decode,
    in_pieces=block_in_pieces(lambda params: params.block),
    recasts={
        name: Recast(_kept, law=RECAST)
        for name in ("fp8-block", "fp8-channel", "fp8-tensor", "mxfp4", "mxfp8")
    },
)
