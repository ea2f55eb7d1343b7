"""FP8 with one scale for a weight or one for a row, under the names of five tools.

| kind | published by | scale |
|---|---|---|
| fp8-tensor | ModelOpt, AutoFP8, Quark | `weight_scale` [] or [1] |
| fp8-tensor | Ministral-3, transformers | `weight_scale_inv` BF16 [] or [1, 1], `activation_scale` |
| fp8-channel | llm-compressor, ModelOpt, fbgemm | `weight_scale` [R, 1] or [R]; fbgemm adds `input_scale_ub` |
| fp8-parts | fused modules with one scale a part | `weight_scale` [n], n below 9; a part ends by config.json |
| comfy-fp8 | ComfyUI | `scale_weight` [] |
| mistral-fp8 | Mistral's own layout | `qscale_weight` [], `qscale_act` [] |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardmill.verify.formats.forms.codes import e4m3
from shardmill.verify.formats.linear import FLOATS, Form, Linear, ones
from shardmill.verify.reading.header import Tensor

PARTS_MAX = 8
_QKV = re.compile(r"qkv|query_key_value|Wqkv|c_attn")


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
         _PER_TENSOR + "`weight_scale` [n]", ("weight_scale",), FLOATS, _any, e4m3, 0.05, 0x7E),
    Form("comfy-fp8", "FP8 of ComfyUI", "ComfyUI",
         _PER_TENSOR + "`scale_weight` []", ("scale_weight",), FLOATS, _one, e4m3, 0.05, 0x7E),
    Form("mistral-fp8", "FP8 of Mistral's own layout", "Mistral",
         _PER_TENSOR + "`qscale_weight` []", ("qscale_weight",), FLOATS, _one, e4m3, 0.05, 0x7E),
)  # fmt: skip


def rows_of_parts(linear: Linear, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows under each scale: q's, k's and v's by the config's heads, else equal ones; () where neither fits."""
    count, rows = (
        (*linear.scales["weight_scale"].shape, 0)[0],
        linear.shape[-2] if len(linear.shape) > 1 else 0,
    )
    if count == 3 and _QKV.search(linear.module):
        text = config.get("text_config")
        place = text if isinstance(text, Mapping) else config
        heads, hidden = place.get("num_attention_heads"), place.get("hidden_size")
        kv, size = place.get("num_key_value_heads", heads), place.get("head_dim")
        if type(heads) is int and type(kv) is int and type(hidden) is int and heads > 0:
            each = size if type(size) is int else hidden // heads
            parts = (heads * each, kv * each, kv * each)
            return parts if sum(parts) == rows and min(parts) > 0 else ()
        return ()
    return (rows // count,) * count if count and rows and not rows % count else ()
