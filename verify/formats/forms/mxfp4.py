"""MXFP4 (OCP Microscaling Formats 1.0): E2M1 codes, two a byte, one power of two for each 32 columns.

| published by | codes | scale |
|---|---|---|
| llm-compressor | `weight_packed` U8 [R, C/2] | `weight_scale` U8 [R, C/32] |
| Quark | `weight` U8 [R, C/2] | `weight_scale` U8 [R, C/32] |
| DeepSeek-V4 (experts) | `weight` I8 [R, C/2] | `scale` F8_E8M0 [R, C/32] |
| OpenAI (gpt-oss) | `*_blocks` U8 [E, R, C/32, 16] | `*_scales` U8 [E, R, C/32] |

The even column lies in the low nibble in all of them.
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import e2m1
from shardmill.verify.formats.forms.mxfp8 import grid_by_group
from shardmill.verify.formats.linear import EXPONENTS, Form, Linear
from shardmill.verify.reading.header import Tensor


def _blocks(linear: Linear, scale: Tensor) -> str:
    assert linear.weight is not None
    shape = linear.weight.shape
    if len(shape) < 3 or shape[-1] != 16:
        return "blocks [experts, rows, columns / 32, 16] and scales of the same without the last"
    return "" if scale.shape == shape[:-1] else str(list(shape[:-1]))


FORMS = (
    Form("mxfp4", "MXFP4", "llm-compressor, Quark, DeepSeek-V4",
         "`weight_packed` or `weight` U8 or I8 [R, C/2]; `weight_scale` or `scale` U8 or F8_E8M0 [R, C/32]",
         ("weight_scale",), EXPONENTS, grid_by_group, e2m1, 0.2),
    Form("gpt-oss", "MXFP4 of gpt-oss", "OpenAI",
         "`*_blocks` U8 [E, R, C/32, 16]; `*_scales` U8 [E, R, C/32]",
         ("_scales",), EXPONENTS, _blocks, e2m1, 0.2),
)  # fmt: skip
