"""Small models of the architectures that SGLang's table has, as they are published; no library is needed here."""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.verify.loaders.architectures import config_of
from tests.verify.loaders.cases import as_published, fold, unfold

Headers = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

# model_type -> (class of SGLang, its module in sglang.srt.models).
CLASSES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "phi3": ("Phi3ForCausalLM", "llama"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_causal"),
    "cohere2": ("Cohere2ForCausalLM", "commandr"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v2"),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "deepseek_v2"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "glm4_moe"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_mm"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
}

# Keys of published config files that transformers leaves out where it saves.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "qwen3_next": {"full_attention_interval": 2},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v32": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm_moe_dsa": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "minimax_m2": {"use_qk_norm": True, "qk_norm_type": "per_layer"},
}
UNTIED = ("qwen3_moe", "glm4_moe", "gpt_oss")  # published so, and SGLang's class knows no tied head


def config_for(kind: str, number: int) -> dict[str, Any]:
    """A config of `kind` that transformers can build. Its heads fill the hidden size, as SGLang takes for granted."""
    config = config_of(kind, random.Random(f"sglang {kind} {number}"))
    text = config.get("text_config", config)
    text |= {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": random.Random(number).choice([2, 4]),
    }
    if "out_hidden_size" in config.get("vision_config", {}):
        config["vision_config"]["out_hidden_size"] = 256
    if kind in UNTIED:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    return config


def fold_headers(headers: Headers) -> dict[str, dict[str, str]]:
    """Names by dtype and shape, so that a record stays small."""
    kinds = sorted({(dtype, tuple(shape)) for dtype, shape in headers.values()})
    return {
        " ".join([dtype, *map(str, shape)]): fold(
            n for n, e in headers.items() if tuple(e[1]) == shape and e[0] == dtype
        )
        for dtype, shape in kinds
    }


def unfold_headers(folded: dict[str, dict[str, str]]) -> Headers:
    headers: Headers = {}
    for kind, names in folded.items():
        dtype, *sides = kind.split(" ")
        headers |= {name: (dtype, tuple(map(int, sides))) for name in unfold(names)}
    return headers


def widened(config: dict[str, Any], headers: Headers) -> tuple[dict[str, Any], Headers]:
    """DeepSeek-V3 with as many experts as it has: then SGLang loads the shared one as one more of them."""
    count = {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
    }
    wide: Headers = {}
    for name, (dtype, shape) in headers.items():
        front, expert, leaf = name.partition(".experts.0.")
        if expert:
            wide |= {f"{front}.experts.{number}.{leaf}": (dtype, shape) for number in range(256)}
        elif ".mlp.gate." in name:
            wide[name] = (dtype, (256, *shape[1:]))
        elif ".experts." not in name:
            wide[name] = (dtype, shape)
    return config | count, wide


def published_config(kind: str, saved: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(saved) | PUBLISHED.get(kind, {})


def published_names(kind: str, saved: list[str]) -> dict[str, str]:
    """Name as transformers saves it -> as such a model was published; a tensor that none has is left out."""
    if kind != "gemma3":
        return {name: name for name in saved}
    return {name: as_published(name) for name in saved if ".head." not in name}
