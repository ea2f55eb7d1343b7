"""Which families `fit` plans, and how each one's config.json spells its windows. All others are refused by name.

A family is here if its plan equals that of vLLM 0.33.0's own planner to the byte, on random models of it: tests hold
each row to figures of the real planner. A model that mixes in layers which no row names (Mamba, chunked attention,
cross attention, shared caches) is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Windows:
    """Where config.json names no layer_types: all but every `every`-th layer have a window; 1: none, 0: all of them."""

    every: int
    pattern_key: str = ""  # the key that may say another number
    window: int | None = None  # the class's window where the key is missing


NONE = Windows(1)
ALL = Windows(0)

# model_type of the text model -> its windows.
FAMILIES: Mapping[str, Windows] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "granite", "seed_oss", "smollm3"), NONE
    ),
    **dict.fromkeys(("glm4_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"), NONE),
    "mistral": ALL,
    "gemma2": Windows(2, window=4096),
    "gemma3_text": Windows(6, "sliding_window_pattern", 4096),
    "cohere2": Windows(4, "sliding_window_pattern", 4096),
    "olmo3": Windows(4, window=4096),
    "gpt_oss": Windows(2, window=128),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), NONE),
    **dict.fromkeys(("qwen3_next", "kimi_linear", "glm5_next_text", "glm5_next"), NONE),
}

# Their classes know no head_dim: heads divide the hidden size, whatever config.json says beside.
WITHOUT_HEAD_DIM = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text")

# Families whose draft layers were compared too; of others a draft is refused.
DRAFTED = ("glm5_next", "glm5_next_text", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa")

# What the class of a family says where config.json is silent; published Gemma 3 models leave most of it out.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}

# model_type of a wrapper whose language model has the only cache; its own type is that of text_config.
INNER = {"gemma3": "gemma3_text", "glm5_next": "glm5_next_text"}  # where text_config has none
WRAPPERS = ("glm5_next", "gemma3", "qwen2_5_vl", "qwen3_vl")

# Keys that a known model_type does not have: with one of them the model is another than the row describes.
FOREIGN: Mapping[str, str] = {
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a cache",
    "hybrid_override_pattern": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "cross_attention_layers": "cross attention",
    "hybrid_layer_ids": "Mamba layers",
}


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with its family's defaults for what the language model leaves out."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    kind = text.get("model_type") or INNER.get(str(config.get("model_type")))
    return {**config, "text_config": {**DEFAULTS.get(str(kind), {}), **text}}


def why_unknown(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """Why this model is not planned; None for one that is."""
    kind, outer = text.get("model_type"), config.get("model_type")
    if text is not config and outer is not None and outer not in (*WRAPPERS, kind):
        return f"models of model_type {str(outer)[:60]!r} are not planned"
    if kind is None and text is not config:
        kind = INNER.get(str(outer))
    if kind not in FAMILIES:
        return f"models of model_type {str(kind)[:60]!r} are not planned; planned are {', '.join(sorted(FAMILIES))}"
    for key, what in FOREIGN.items():
        if text.get(key):
            return f"{key} means {what}, which are not planned"
    if text.get("use_sliding_window") is True:
        return "use_sliding_window of Qwen models is not planned"
    return None
