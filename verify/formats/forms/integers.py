"""Integers of compressed-tensors: INT8 in bytes, and INT4 or INT8 packed into words of 32 bits.

| kind | codes | scale | zero point |
|---|---|---|---|
| int8 | `weight` I8 [R, C] | `weight_scale` [R, 1], [R], [] or [R, C/g] | none |
| int-pack | `weight_packed` I32 [R, C * bits / 32] | `weight_scale` [R, C/g] | `weight_zero_point`, packed |

`weight_shape` I64 [2] holds R and C; `weight_g_idx` I32 [C] the group of each column, where they were reordered.
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import int8, offset_words
from shardmill.verify.formats.linear import FLOATS, Form, Linear, ones
from shardmill.verify.reading.header import Tensor


def _bytes_grid(linear: Linear, scale: Tensor) -> str:
    shape = linear.shape
    if ones(scale.shape) or scale.shape in (shape[:-1], (*shape[:-1], 1)) or _groups(shape, scale.shape):
        return ""
    return f"one number, {[*shape[:-1], 1]}, or a group's scale for whole groups of the {shape[-1:]} columns"


def _words_grid(linear: Linear, scale: Tensor) -> str:
    """The columns are a multiple of 8 or of 4: how many bits a code has is only said in the config."""
    assert linear.weight is not None
    stored = linear.weight.shape
    if len(stored) < 2 or scale.shape[:-1] != stored[:-1] or len(scale.shape) != len(stored):
        return "[rows, groups]"
    whole = any(_groups((*stored[:-1], stored[-1] * codes), scale.shape) for codes in (8, 4))
    return "" if whole else "[rows, groups] with groups of the same whole number of columns"


def _groups(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether a grid has one scale for whole groups of columns of each row."""
    return (
        len(grid) == len(shape) >= 2 and grid[:-1] == shape[:-1] and grid[-1] > 0 and not shape[-1] % grid[-1]
    )


FORMS = (
    Form("int8", "INT8", "llm-compressor (int-quantized)",
         "`weight` I8 [R, C]; `weight_scale` [R, 1], [R], [] or [R, C/g]",
         ("weight_scale",), FLOATS, _bytes_grid, int8, 0.05),
    Form("int-pack", "packed INT4 and INT8", "llm-compressor (pack-quantized), Kimi-K2",
         "`weight_packed` I32 [R, C * bits / 32]; `weight_scale` [R, groups]; `weight_shape` I64 [2]",
         ("weight_scale",), FLOATS, _words_grid, offset_words, 0.25, 0,
         ("origin where groups were reordered",)),
)  # fmt: skip
