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
from shardmill.kernels.formats import F32, U8, bf16_to_f32
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling, compressed

CODES: Final = "F8_E4M3"
Block = tuple[int, int]


def e8m0_values(codes: U8) -> F32:
    """E8M0 codes u8 -> 2^(code - 127) as f32, exactly; 255 is NaN (OCP Microscaling Formats 1.0)."""
    bits = np.where(codes == 0, 1 << 22, codes.astype(np.uint32) << 23).astype(np.uint32)
    bits[codes == 255] = 0x7FC00000
    return bits.view(np.float32)


def e8m0_codes(scales: F32) -> U8:
    """f32 powers of two from 2^-127 on -> E8M0 codes; asserts that each is one."""
    bits = np.ascontiguousarray(scales).view(np.uint32)
    power = (bits & np.uint32(0x7FFFFF) == 0) | (bits == 1 << 22)
    assert power.all(), "a scale is no power of two"
    codes: U8 = (bits >> np.uint32(23)).astype(np.uint8)
    return codes


def stored_scales(scales: NDArray[Any]) -> F32:
    """Scales as they are stored, u8 (E8M0), u16 (BF16 bits) or f32, as f32."""
    if scales.dtype == np.uint8:
        return e8m0_values(scales)
    return bf16_to_f32(scales) if scales.dtype == np.uint16 else scales.astype(np.float32, copy=False)


def encode_blocks(
    strip: NDArray[Any], setting: Setting, block: Block, law: str
) -> tuple[U8, F32, dict[str, int]]:
    """Codes u8 like the strip, scales f32 [ceil(rows/r), ceil(C/c)], and what the law counts."""
    codes, scales = np.empty(strip.shape, np.uint8), np.empty(grid(strip.shape, block), np.float32)
    counts = BlockEncoder(law, block, setting.codes.rows).encode(strip, codes, scales)
    return codes, scales, counts


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    R, C = shape
    scales = grid((R, C), params.block)
    return Part("codes", CODES, shape), Part("scales", "F32", scales, params.block[0])


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    codes, scales, _ = encode_blocks(strip, setting, setting.params.block, setting.law)
    e8m0 = setting.spelling.dtypes.get("scales") == "F8_E8M0"
    return {"codes": codes, "scales": e8m0_codes(scales) if e8m0 else scales}


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
        Spelling("deepseek-v4", {"codes": ".weight", "scales": ".scale"}, {"scales": "F8_E8M0"}),
    ),
    parts=_parts,
    unfit=lambda shape, params: None,
    unit=lambda shape, params: params.block,
    encode=_encode,
    decode=_decode,
)
