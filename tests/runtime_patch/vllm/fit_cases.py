"""426 random models and flags over the families that `verify fit` plans, 96 on several ranks, and 23 published.

Sizes that memory does not look at are small, so that the real classes are built in seconds on the meta device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shardmill.verify.fit.preset import ROW_BYTES, Preset
from tests.runtime_patch.vllm.fit_dtypes import dtype_cases
from tests.runtime_patch.vllm.fit_published import published_cases
from tests.runtime_patch.vllm.fit_ranks import rank_cases
from tests.runtime_patch.vllm.glm_case import glm_config

Config = dict[str, Any]
CASES = 200
CARDS = {90: "9,0", 100: "10,0", 120: "12,0"}  # SM -> what the fake platform claims
LENGTHS = (8_192, 32_768, 100_000, 262_144)

BASE: Config = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
MLA = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
}


def _gqa(kind: str, arch: str, rng: random.Random, **more: Any) -> Config:
    kv_heads = rng.choice([1, 2, 4, 8])
    return {
        **BASE,
        "model_type": kind,
        "architectures": [arch],
        "num_hidden_layers": rng.randint(2, 12),
        "num_attention_heads": kv_heads * rng.choice([1, 2, 4]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([64, 128]),
        **more,
    }


def _windows(config: Config, every: int, rng: random.Random, **more: Any) -> Config:
    """Windows in all but each `every`-th layer, spelled as layer_types or left to the class's default."""
    count = config["num_hidden_layers"]
    kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
    said = {"layer_types": kinds} if rng.random() < 0.7 else {}
    return {**config, "sliding_window": rng.choice([128, 512, 1024, 4096]), **said, **more}


def _llama(rng: random.Random) -> Config:
    return _gqa("llama", "LlamaForCausalLM", rng)


def _mistral(rng: random.Random) -> Config:
    return _gqa("mistral", "MistralForCausalLM", rng, sliding_window=rng.choice([None, 1024, 4096]))


def _qwen2(rng: random.Random) -> Config:
    config = _gqa("qwen2", "Qwen2ForCausalLM", rng)
    window = {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": config["num_hidden_layers"],
    }
    return {**config, **(window if rng.random() < 0.5 else {})}


def _qwen3(rng: random.Random) -> Config:
    return _gqa("qwen3", "Qwen3ForCausalLM", rng)


def _qwen3_moe(rng: random.Random) -> Config:
    return _gqa(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rng,
        **MOE,
        num_experts=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _mixtral(rng: random.Random) -> Config:
    return _gqa("mixtral", "MixtralForCausalLM", rng, num_local_experts=8, num_experts_per_tok=2)


def _granite(rng: random.Random) -> Config:
    more = {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    return _gqa("granite", "GraniteForCausalLM", rng, **more)


def _seed_oss(rng: random.Random) -> Config:
    return _gqa("seed_oss", "SeedOssForCausalLM", rng)


def _smollm3(rng: random.Random) -> Config:
    return _gqa("smollm3", "SmolLM3ForCausalLM", rng)


def _glm4_moe(rng: random.Random) -> Config:
    more = {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return _gqa("glm4_moe", "Glm4MoeForCausalLM", rng, **MOE, **more, routed_scaling_factor=1.0)


def _gemma2(rng: random.Random) -> Config:
    config = _gqa(
        "gemma2", "Gemma2ForCausalLM", rng, query_pre_attn_scalar=64, hidden_activation="gelu_pytorch_tanh"
    )
    return _windows({**config, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, 2, rng)


def _gemma3(rng: random.Random) -> Config:
    more = {"query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"}
    config = _windows(_gqa("gemma3_text", "Gemma3ForCausalLM", rng, **more), 6, rng)
    return (
        config if "layer_types" in config or rng.random() < 0.5 else {**config, "sliding_window_pattern": 6}
    )


def _cohere2(rng: random.Random) -> Config:
    config = _windows(
        _gqa("cohere2", "Cohere2ForCausalLM", rng, layer_norm_eps=1e-5, logit_scale=1.0), 4, rng
    )
    return config if "layer_types" in config else {**config, "sliding_window_pattern": 4}


def _olmo3(rng: random.Random) -> Config:
    return _windows(_gqa("olmo3", "Olmo3ForCausalLM", rng), 4, rng)


def _gpt_oss(rng: random.Random) -> Config:
    config = _gqa(
        "gpt_oss", "GptOssForCausalLM", rng, head_dim=64, num_local_experts=8, num_experts_per_tok=2
    )
    config = _windows(config, 2, rng)
    return {**config, "sliding_window": 128, "swiglu_limit": 7.0}


def _deepseek(kind: str, arch: str, rng: random.Random, **more: Any) -> Config:
    heads = rng.choice([16, 32, 128])
    sizes = {
        "num_hidden_layers": rng.randint(2, 8),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    return {**BASE, **MOE, **MLA, "model_type": kind, "architectures": [arch], **sizes, **more}


def _deepseek_v2(rng: random.Random) -> Config:
    more = {"scoring_func": "softmax", "topk_method": "greedy"}
    return _deepseek("deepseek_v2", "DeepseekV2ForCausalLM", rng, **more)


def _deepseek_v3(rng: random.Random) -> Config:
    return _deepseek("deepseek_v3", "DeepseekV3ForCausalLM", rng, num_nextn_predict_layers=1)


def _deepseek_v32(rng: random.Random) -> Config:
    index = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "num_nextn_predict_layers": 1}
    return _deepseek("deepseek_v32", "DeepseekV32ForCausalLM", rng, **index)


def _qwen3_next(rng: random.Random) -> Config:
    linear = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": rng.choice([16, 32]),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": rng.choice([2, 4]),
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 8,
        "partial_rotary_factor": 0.25,
    }
    config = _gqa("qwen3_next", "Qwen3NextForCausalLM", rng, **MOE, **linear)
    config |= {"num_hidden_layers": 4 * rng.randint(1, 3), "head_dim": rng.choice([128, 256])}
    every = config["full_attention_interval"]
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "linear_attention"
        for i in range(config["num_hidden_layers"])
    ]
    return config | ({"layer_types": kinds} if rng.random() < 0.5 else {})


def _kimi_linear(rng: random.Random) -> Config:
    depth, every, heads = 4 * rng.randint(1, 3), rng.choice([2, 4]), rng.choice([16, 32])
    full = [i + 1 for i in range(depth) if (i + 1) % every == 0]
    return {
        **BASE,
        **MLA,
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "use_grouped_topk": True,
        "linear_attn_config": {
            "kda_layers": [i + 1 for i in range(depth) if i + 1 not in full],
            "full_attn_layers": full,
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
    }


FAMILIES: dict[str, Callable[[random.Random], Config]] = {
    "glm5_next": glm_config,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "granite": _granite,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "glm4_moe": _glm4_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "cohere2": _cohere2,
    "olmo3": _olmo3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "qwen3_next": _qwen3_next,
    "kimi_linear": _kimi_linear,
}


def _glm_moe_dsa(rng: random.Random) -> Config:
    index = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "num_nextn_predict_layers": 1}
    return _deepseek("glm_moe_dsa", "GlmMoeDsaForCausalLM", rng, **index, index_topk_freq=rng.choice([1, 4]))


def _wrapped(kind: str, arch: str, text: Config, vision: Config, **more: Any) -> Config:
    inner = {key: value for key, value in text.items() if key != "architectures"}
    top = {"model_type": kind, "architectures": [arch], "dtype": "bfloat16", "tie_word_embeddings": False}
    return {**top, "text_config": inner, "vision_config": vision, **more}


def _gemma3_vl(rng: random.Random) -> Config:
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    return _wrapped("gemma3", "Gemma3ForConditionalGeneration", _gemma3(rng), vision, mm_tokens_per_image=4)


def _qwen_vl(kind: str, arch: str, text: Config) -> Config:
    vision = {
        "depth": 1,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 2,
        "out_hidden_size": 256,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [text["head_dim"] // 2 - 32, 16, 16]}
    text |= {"rope_scaling": rope, "rope_theta": 1e6}
    return _wrapped(kind, arch, text, vision, image_token_id=5, video_token_id=6, vision_start_token_id=7)


def _qwen2_5_vl(rng: random.Random) -> Config:
    text = _gqa("qwen2_5_vl_text", "", rng)
    text |= {"hidden_size": text["num_attention_heads"] * text["head_dim"]}
    return _qwen_vl("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", text)


def _qwen3_vl(rng: random.Random) -> Config:
    return _qwen_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", _gqa("qwen3_vl_text", "", rng))


EXTRA: dict[str, Callable[[random.Random], Config]] = {
    "glm_moe_dsa": _glm_moe_dsa,
    "gemma3": _gemma3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
POOLED = {"glm5_next": glm_config}
EXTRA_CASES = 24
POOLED_CASES = 16  # of GLM-5.3-Flash on SM120, with the rows of every rung
DRAFTED = (
    "glm5_next",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
)  # families whose draft layers the probe builds too


def random_case(index: int) -> dict[str, Any]:
    """Case `index`: a family in turn, a card in turn, and flags of its own."""
    rng = random.Random(f"fit {index}")
    families = FAMILIES if index < CASES else EXTRA if index < CASES + EXTRA_CASES else POOLED
    names = list(families)
    family = names[index % len(names)]
    sm = list(CARDS)[(index // len(names) + index) % len(CARDS)] if families is not POOLED else 120
    config = families[family](rng)
    preset = Preset(
        "random",
        max_model_len=rng.choice(LENGTHS),
        batched_tokens=rng.choice([1024, 2048, 8192]),
        kv_dtype=rng.choice(["fp8", "auto"]),
        prefix_caching=rng.random() < 0.6,
        kda_backend=rng.choice(["flashkda", "triton"]),
        draft_tokens=rng.choice([0, 1, 3]) if family in DRAFTED else 0,
        state_dtype=rng.choice(["auto", "auto", "bfloat16", "float32"]),
        rung=rng.choice(list(ROW_BYTES)) if family == "glm5_next" else "stock",
        sm=sm,
    )
    pin = rng.randint(2, 60) * 10**9
    row = ROW_BYTES[preset.rung]
    return {
        "index": index,
        "family": family,
        "config": config,
        "preset": asdict(preset),
        "row_bytes": row,
        "pin": pin,
    }


def cases() -> list[dict[str, Any]]:
    count = CASES + EXTRA_CASES + POOLED_CASES
    more = dtype_cases(FAMILIES | EXTRA, tuple(CARDS), count)
    made = [*(random_case(i) for i in range(count)), *more]
    made += published_cases(tuple(CARDS), len(made))
    return [*made, *rank_cases(FAMILIES | EXTRA, tuple(CARDS), len(made))]
