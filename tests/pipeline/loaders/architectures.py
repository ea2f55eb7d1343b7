"""Small random models for the table of loaders: those of `verify loads`, and more that stock transformers builds."""

from __future__ import annotations

import random
from typing import Any

from tests.verify.loaders.architectures import ARCHITECTURES, LATER, MOE, VISION, Config, config_of, sizes

# model_type -> what its config says beside the sizes.
MORE: dict[str, Config] = {
    "gemma": {},
    "cohere": {},
    "glm": {},
    "phi": {},
    "stablelm": {},
    "starcoder2": {},
    "olmo": {},
    "nemotron": {},
    "helium": {},
    "exaone4": {},
    "arcee": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256, "max_position_embeddings": 128},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, **MOE},
    "llava": {"text": {"model_type": "llama"}, "vision": {**VISION, "model_type": "clip_vision_model"}},
}
KINDS = (*ARCHITECTURES, *LATER, *MORE)


def model_config(kind: str) -> Config:
    """The config of the one model of a kind; sizes that formats hold, heads untied but where the kind ties them."""
    rng = random.Random(f"table {kind}")
    if kind not in MORE:
        return _runnable(config_of(kind, rng))
    own: dict[str, Any] = dict(MORE[kind])
    text, vision = own.pop("text", None), own.pop("vision", None)
    base = {**sizes(rng), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, **own}
    if kind == "falcon":
        base.pop("head_dim")  # a property there
    if vision is None:
        return {
            "model_type": kind,
            **base,
            "tie_word_embeddings": kind in ("gemma", "cohere", "gpt2", "bloom", "opt"),
        }
    return {
        "model_type": kind,
        "text_config": {**base, **text},
        "vision_config": vision,
        "image_token_index": 5,
    }


def _runnable(config: Config) -> Config:
    """What a forward needs, and nothing that only loads does: MLA's heads of keys, and parts of a rotation that fit."""
    if "kv_lora_rank" in config:
        return {**config, "num_key_value_heads": config["num_attention_heads"]}
    if config["model_type"] in ("qwen2_5_vl", "qwen3_vl"):
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
        text = {
            **config["text_config"],
            "hidden_size": 256,
            "num_attention_heads": 4,
            "rope_parameters": rope,
        }
        vision = {**config["vision_config"], "out_hidden_size": 256}
        return {**config, "text_config": text, "vision_config": vision}
    return config
