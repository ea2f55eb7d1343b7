"""Small random models of the architectures that `verify loads` has a table for, as transformers would save them."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]

MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
DEEPSEEK = {**MOE, **MLA, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "out_hidden_size": 256,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

# model_type -> what its config says beside the sizes of `sizes`; a wrapper's keys lie under text_config.
ARCHITECTURES: dict[str, Config] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {"tied": True},
    "gemma3_text": {"tied": True},
    "cohere2": {"tied": True},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "glm4": {},
    "seed_oss": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**MOE, "num_experts": 4},
    "qwen3_next": {**MOE, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 256},
    "deepseek_v2": {**DEEPSEEK, "num_experts_per_tok": 2},
    "deepseek_v3": {**DEEPSEEK, "topk_method": "noaux_tc"},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 64,
        "use_routing_bias": True,
        "use_qk_norm": False,
        "scoring_func": "sigmoid",
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {
        "tied": True,
        "text": {"sliding_window": 64},
        "vision": VISION,
        "more": {"mm_tokens_per_image": 4},
    },
    "mistral3": {
        "text": {"model_type": "mistral"},
        "vision": {**VISION, "model_type": "pixtral", "head_dim": 32},
    },
    "qwen2_5_vl": {"text": {}, "vision": QWEN_VISION},
    "qwen3_vl": {"text": {}, "vision": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}},
}


INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
# Architectures of one model each, after the others.
LATER: dict[str, Config] = {"deepseek_v32": {**DEEPSEEK, **INDEXER}, "glm_moe_dsa": {**DEEPSEEK, **INDEXER}}


def sizes(rng: random.Random) -> Config:
    """Sizes that the formats can hold: rows and columns in multiples of 64, some not of 128."""
    heads = rng.choice([4, 8])
    return {
        "hidden_size": rng.choice([256, 384]),
        "intermediate_size": rng.choice([256, 512]),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([2, 4]),
        "head_dim": 64,
        "vocab_size": 512,
        "pad_token_id": 0,
    }


def config_of(kind: str, rng: random.Random) -> Config:
    """The config of one random model, whose class transformers knows by `model_type`."""
    own = dict((ARCHITECTURES | LATER)[kind])
    tied = own.pop("tied", False) or rng.random() < 0.3
    text, vision, more = own.pop("text", None), own.pop("vision", None), own.pop("more", {})
    base = {**sizes(rng), **own}
    if vision is None:
        return {"model_type": kind, **base, "tie_word_embeddings": tied}
    vision = {**vision, **({"out_hidden_size": base["hidden_size"]} if "out_hidden_size" in vision else {})}
    return {
        "model_type": kind,
        "text_config": {**base, **text, "tie_word_embeddings": tied},
        "vision_config": vision,
        "tie_word_embeddings": tied,
        **more,
    }
