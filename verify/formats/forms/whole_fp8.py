"""FP8 with one scale for a weight or one for a row, under the names of five tools.

| kind | published by | scale |
|---|---|---|
| fp8-tensor | ModelOpt, AutoFP8, Quark | `weight_scale` [] or [1] |
| fp8-tensor | Ministral-3, transformers | `weight_scale_inv` BF16 [] or [1, 1], `activation_scale` |
| fp8-channel | llm-compressor, ModelOpt, fbgemm | `weight_scale` [R, 1] or [R]; fbgemm adds `input_scale_ub` |
| fp8-parts | fused modules with one scale a part | `weight_scale` [n], n below 9: where a part ends is not said |
| comfy-fp8 | ComfyUI | `scale_weight` [] |
| mistral-fp8 | Mistral's own layout | `qscale_weight` [], `qscale_act` [] |
"""

from __future__ import annotations

from shardmill.verify.formats.forms.codes import e4m3
from shardmill.verify.formats.linear import FLOATS, Form, Linear, ones
from shardmill.verify.reading.header import Tensor

PARTS_MAX = 8


def _one(linear: Linear, scale: Tensor) -> str:
    leading = linear.shape[:-2]  # a bank of experts has one each
    return (
        "" if ones(scale.shape) or scale.shape in (leading, (*leading, 1), (*leading, 1, 1)) else "one number"
    )


def _row(linear: Linear, scale: Tensor) -> str:
    rows = linear.shape[:-1]
    return "" if scale.shape in (rows, (*rows, 1)) else f"{[*rows, 1]} or {[*rows]}"


def _any(linear: Linear, scale: Tensor) -> str:
    return ""


_PER_TENSOR = "`weight` F8_E4M3 [R, C]; "
FORMS = (
    Form("fp8-tensor", "FP8 per tensor", "ModelOpt, AutoFP8, llm-compressor, Quark, Mistral, transformers",
         _PER_TENSOR + "`weight_scale` or `weight_scale_inv` []", ("weight_scale",), FLOATS, _one, e4m3, 0.05, 0x7E),
    Form("fp8-channel", "FP8 per channel", "llm-compressor, ModelOpt, fbgemm",
         _PER_TENSOR + "`weight_scale` [R, 1] or [R]", ("weight_scale",), FLOATS, _row, e4m3, 0.05, 0x7E),
    Form("fp8-parts", "FP8 with one scale a fused part", "vLLM's older tools",
         _PER_TENSOR + "`weight_scale` [n]", ("weight_scale",), FLOATS, _any, None, 0.05, 0x7E,
         ("decoded values: the file does not say where a part ends",)),
    Form("comfy-fp8", "FP8 of ComfyUI", "ComfyUI",
         _PER_TENSOR + "`scale_weight` []", ("scale_weight",), FLOATS, _one, e4m3, 0.05, 0x7E),
    Form("mistral-fp8", "FP8 of Mistral's own layout", "Mistral",
         _PER_TENSOR + "`qscale_weight` []", ("qscale_weight",), FLOATS, _one, e4m3, 0.05, 0x7E),
)  # fmt: skip
