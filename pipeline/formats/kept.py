"""The law `recast/1`: a quantized weight keeps its source's codes and scales wherever the target can hold them.

Within one format the parts are re-declared: copied, scales in the target's dtype. From codes with other scales to
block FP8, each block takes the first of two scales under which every number of it decodes as before, the largest of
the source's own and the smallest power of two that does not clip; a block that neither keeps is encoded anew.
Nothing is believed: the stage decodes what was made and counts.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import decode, grid
from shardmill.kernels.block_fp8_scales import ue8m0_scales
from shardmill.kernels.block_fp8_tiny import is_tiny
from shardmill.kernels.formats import F32, U8, f32_to_bf16
from shardmill.pipeline.formats.base import RECAST, Coded, Format, Recast, Setting
from shardmill.pipeline.formats.scales import stored_scales

_ONE: Final = np.uint8(0x38)  # 1 as E4M3
_E4M3_CODES: Final = "F8_E4M3"
Block = tuple[int, int]


def recast_of(source: Format, target: Format, law: str) -> Recast | None:
    """The way from one format to another under a law that keeps more than encoding anew; None where there is none."""
    found = target.recasts.get(source.name)
    if found is not None and found.law in ("", law):
        return found
    return Recast(_same, law=RECAST) if source is target and law == RECAST else None


def keeps(source: Format, target: Format) -> bool:
    """Whether `recast/1` is a law of this conversion, and so its default."""
    return recast_of(source, target, RECAST) is not None and not _always(source, target)


def _always(source: Format, target: Format) -> bool:
    found = target.recasts.get(source.name)
    return found is not None and not found.law


def _same(coded: Coded, setting: Setting) -> dict[str, NDArray[Any]]:
    """The same format under other names: the parts as they are, but for the dtype of scales. Of other groups anew."""
    form, shape = coded.form, coded.values.shape
    if form.unit(shape, coded.setting.params) != form.unit(shape, setting.params):
        assert form.encode is not None
        return form.encode(coded.values, setting)
    dtypes = {part.role: part.dtype for part in form.parts(shape, setting.params)}
    made = {role: array for role, array in coded.arrays.items() if role != "shape"}
    if "scales" in made:
        made["scales"] = _scales_as(made["scales"], dtypes["scales"])
    if "global" in made:
        made["global"] = _global(made["global"], _is_inverse(coded.setting) != _is_inverse(setting))
    return made


def _scales_as(scales: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "F32":
        return stored_scales(scales)
    if dtype == "BF16" and scales.dtype != np.uint16:
        return f32_to_bf16(stored_scales(scales))
    return scales  # E8M0 and E4M3 are bytes in each spelling


def _is_inverse(setting: Setting) -> bool:
    """Whether the number of the whole weight is stored as its reciprocal, as compressed-tensors does."""
    return "global_scale" in setting.spelling.ends.get("global", "")


def _global(stored: NDArray[Any], turned: bool) -> NDArray[Any]:
    number = stored.reshape(-1)[:1].astype(np.float32)
    return np.float32(1) / number if turned else number


def to_blocks(coded: Coded, setting: Setting, block: Block) -> tuple[U8, F32, NDArray[np.bool_]]:
    """Codes u8 [rows, C], scales f32 and whether they are exact, both [ceil(rows/r), ceil(C/c)]."""
    values = coded.values
    amax = _block_max(np.abs(values), block)
    powers = ue8m0_scales(amax.view(np.uint32))
    own = _own_scales(coded, block)
    if own is None or setting.params.scale_dtype == "F8_E8M0":
        own = powers if own is None else np.where(_is_power(own), own, powers)
    codes, exact = _under(values, own, setting, block)
    if exact.all():
        return codes, own, exact
    others, again = _under(values, powers, setting, block)
    better = again & ~exact
    by_element = np.repeat(np.repeat(better, block[0], 0), block[1], 1)[: values.shape[0], : values.shape[1]]
    return np.where(by_element, others, codes), np.where(better, powers, own), exact | again


def _own_scales(coded: Coded, block: Block) -> F32 | None:
    """The largest scale of the source among a block's numbers that are not zero, 1 of none; None where E4M3 is not
    what the source's codes are.
    """
    if not any(part.dtype == _E4M3_CODES for part in coded.form.parts((1, 128), coded.setting.params)[:1]):
        return None
    ones = np.full(coded.arrays["codes"].shape, _ONE, np.uint8)
    scales = coded.form.decode({**coded.arrays, "codes": ones}, coded.setting)
    largest = _block_max(np.where(coded.values != 0, scales, np.float32(0)), block)
    largest[largest == 0] = 1
    return largest


def _is_power(scales: F32) -> NDArray[np.bool_]:
    bits = scales.view(np.uint32)
    power: NDArray[np.bool_] = (bits & np.uint32(0x7FFFFF) == 0) & (bits > np.uint32(0x7FFFFF))
    return power


def _under(values: F32, scales: F32, setting: Setting, block: Block) -> tuple[U8, NDArray[np.bool_]]:
    """Codes of the values under these scales, and which blocks decode to just the values."""
    codes = np.empty(values.shape, np.uint8)
    usable = ~is_tiny(scales)
    setting.codes.rows.codes(values, np.where(usable, scales, np.float32(1)), block, codes)
    same = _block_max((decode(codes, scales, block) != values).astype(np.float32), block) == 0
    return codes, same & usable


def _block_max(values: F32, block: Block) -> F32:
    """The largest number of each block: f32 [ceil(rows/r), ceil(C/c)]."""
    rows, cols = grid(values.shape, block)
    down = np.maximum.reduceat(values, np.arange(rows) * block[0], axis=0)
    largest: F32 = np.maximum.reduceat(down, np.arange(cols) * block[1], axis=1)
    return np.ascontiguousarray(largest)
