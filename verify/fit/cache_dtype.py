"""The dtype that vLLM 0.33.0 gives the KV cache under `auto`: what config.json declares, else the family's habit.

Source: vLLM 0.33.0, `utils/torch_utils.py` (ModelOpt's declarations), `layers/attention/attention.py` (the scheme of
compressed-tensors, which latent attention does not ask for) and `models/config.py` (habits by architecture).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
# Families whose cache vLLM makes FP8 on cards of SM10x where neither the flags nor the checkpoint say otherwise.
FP8_ON_SM100 = ("glm_moe_dsa", "glm5_next", "glm5_next_text")


def declared_dtype(config: Mapping[str, Any], text: Mapping[str, Any], latent: bool) -> str:
    """The cache dtype that a config.json asks for: `auto`, one that vLLM has, or `nvfp4`. latent: MLA."""
    top = _table(config.get("quantization_config"))
    if str(top.get("quant_method")).startswith("modelopt"):
        inner = _table(top.get("quantization")) or top
        return _modelopt(inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo"))
    any_part = top or _table(text.get("quantization_config")) or _table(config.get("compression_config"))
    compressed = any_part.get("quant_method") == "compressed-tensors"
    return "fp8" if compressed and any_part.get("kv_cache_scheme") and not latent else AUTO


def _modelopt(scheme: Any) -> str:
    if isinstance(scheme, dict):
        if scheme.get("type") != "float":
            return AUTO
        bits = scheme.get("num_bits")
        if bits == 8 and scheme.get("dynamic") is False:
            return "fp8_e4m3"
        return "nvfp4" if bits == 4 else AUTO
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), AUTO)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def served_dtype(flag: str, declared: str, model_type: str, sm: int) -> str:
    """What the cache holds under a flag: the flag itself, unless it is `auto`."""
    if flag == "bfloat16" and model_type == "deepseek_v32":
        return AUTO  # its class turns the one into the other
    if flag != AUTO:
        return flag
    if declared != AUTO:
        return declared
    return "fp8" if sm == 100 and model_type in FP8_ON_SM100 else AUTO
