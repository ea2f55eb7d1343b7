"""Headers of GLM-5.3-Flash at full size, as the parent has them and as converted; nothing is read from disk."""

from __future__ import annotations

import re
from functools import cache

from shardmill.pipeline.toy.glm53 import REAL, cut, parent_files

Headers = dict[str, tuple[str, tuple[int, ...]]]

TEXT = re.compile(
    r"language_model.*self_attn\.((?P<kda>q|k|v|b|f_a|g_a)_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa)\.weight$"
    r"|language_model.*mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight$|^lm_head\.weight$"
)
VISION = re.compile(
    r"visual\.(blocks\.\d+\.(attn|mlp)\.|merger\.)(qkv|proj|gate_proj|up_proj|down_proj)\.weight$"
)


@cache
def parent() -> Headers:
    files = parent_files(REAL, cut(REAL, 5 << 30))
    return {name: (dtype, shape) for tensors in files.values() for name, dtype, shape in tensors}


@cache
def converted(vision: bool) -> Headers:
    """The parent with 425 weights in block FP8, or all 549."""
    headers: Headers = {}
    for name, (dtype, shape) in parent().items():
        found = TEXT.search(name) or (vision and VISION.search(name))
        if not found or dtype != "BF16":
            headers[name] = (dtype, shape)
            continue
        block = 32 if found is not True and found.groupdict().get("kda") else 128
        headers[name] = ("F8_E4M3", shape)
        headers[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // block), -(-shape[1] // block)))
    return headers
