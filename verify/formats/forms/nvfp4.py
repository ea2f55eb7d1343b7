"""NVFP4: E2M1 codes, two a byte, an E4M3 scale for each 16 columns, and one F32 scale of these scales.

| kind | published by | the global scale |
|---|---|---|
| nvfp4 | ModelOpt | `weight_scale_2` = amax / (6 * 448): it multiplies |
| ct-nvfp4 | compressed-tensors | `weight_global_scale` = 6 * 448 / amax: it divides |
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import e2m1
from shardmill.verify.formats.forms.mxfp8 import grid_by_group
from shardmill.verify.formats.linear import Form

FORMS = (
    Form("nvfp4", "NVFP4 of ModelOpt", "ModelOpt",
         "`weight` U8 [R, C/2]; `weight_scale` F8_E4M3 [R, C/16]; `weight_scale_2` F32 []",
         ("weight_scale", "weight_scale_2"), ("F8_E4M3",), grid_by_group, e2m1, 0.16, 0x7),
    Form("ct-nvfp4", "NVFP4 of compressed-tensors", "llm-compressor",
         "`weight_packed` U8 [R, C/2]; `weight_scale` F8_E4M3 [R, C/16]; `weight_global_scale` F32 [1]",
         ("weight_scale", "weight_global_scale"), ("F8_E4M3",), grid_by_group, e2m1, 0.16, 0x7),
)  # fmt: skip
