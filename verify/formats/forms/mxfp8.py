"""MXFP8 (OCP Microscaling Formats 1.0): E4M3 codes, one power of two for each 32 columns.

ModelOpt writes the exponents as U8, others as F8_E8M0: a byte e is 2^(e - 127), 0xFF is NaN.
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import e4m3
from shardmill.verify.formats.linear import EXPONENTS, GROUP, Form, Linear
from shardmill.verify.reading.header import Tensor


def grid_by_group(linear: Linear, scale: Tensor) -> str:
    """One scale for each group of columns of each row, as MX formats and NVFP4 have it."""
    shape = linear.shape
    grid = (*shape[:-1], -(-shape[-1] // GROUP[linear.kind])) if shape else ()
    return "" if scale.shape == grid else str(list(grid))


FORMS = (
    Form("mxfp8", "MXFP8", "ModelOpt, llm-compressor",
         "`weight` F8_E4M3 [R, C]; `weight_scale` U8 or F8_E8M0 [R, C/32]",
         ("weight_scale",), EXPONENTS, grid_by_group, e4m3, 0.05),
)  # fmt: skip
