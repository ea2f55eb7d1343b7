"""The config.json of a toy parent: the real one's keys and order, with the toy's dimensions and
the toy tokenizer's numbers.

The `quantization_config` is the published parent's (LibertAIDAI/GLM-5.3-Flash-NVFP4): its six keys and its 43
globs of modules that are not quantized.
"""

from __future__ import annotations

from typing import Any

from shardmill.pipeline.toy.glm53 import GROUP, Dimensions
from shardmill.pipeline.toy.tokenizer import token_id

_ATTENTION = (
    "in_proj_qkvbfg_a",
    "q_proj",
    "k_proj",
    "v_proj",
    "b_proj",
    "f_a_proj",
    "g_a_proj",
    "f_b_proj",
    "g_b_proj",
    "fused_qkv_a_proj",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "q_b_proj",
    "kv_b_proj",
    "indexer.wk_weights_proj",
    "indexer.wk",
    "indexer.weights_proj",
    "indexer.wq_b",
    "o_proj",
)
_MLP = (
    "gate",
    "gate_up_proj",
    "down_proj",
    "shared_experts.gate_up_proj",
    "shared_experts.down_proj",
    "shared_experts.gate_proj",
    "shared_experts.up_proj",
    "gate_proj",
    "up_proj",
)
_ATTENTION_LATER = (
    "qkv_proj",
    "fused_qkvbfg_a_proj",
    "fused_fg_b_proj",
    "qkv_conv1d",
    "fused_qkv_a_proj_with_mqa",
    "q_conv1d",
    "k_conv1d",
    "v_conv1d",
    "o_norm",
)
IGNORE = [
    "lm_head",
    "model.language_model.embed_tokens",
    *(f"*.self_attn.{name}" for name in _ATTENTION),
    *(f"*.mlp.{name}" for name in _MLP),
    "*.eh_proj",
    "model.visual.*",
    *(f"*.self_attn.{name}" for name in _ATTENTION_LATER),
    "visual.*",
    "*.visual.*",
]


def config(d: Dimensions) -> dict[str, Any]:
    """config.json for the dimensions `d`."""
    return {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": _text(d),
        "vision_config": _vision(d),
        **_media_tokens(),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": _quantization(),
    }


def _text(d: Dimensions) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_text",
        "vocab_size": d.vocabulary,
        "pad_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|endoftext|>"),
        "hidden_size": d.hidden,
        "intermediate_size": d.dense_width,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.heads,
        "first_k_dense_replace": d.dense_layers,
        "moe_intermediate_size": d.expert_width,
        "n_routed_experts": d.experts,
        "n_shared_experts": d.shared_experts,
        "num_experts_per_tok": d.experts_per_token,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "topk_group": 1,
        "mhc": True,
        "hc_mult": d.streams,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "mla_use_nope": True,
        "q_lora_rank": d.q_rank,
        "kv_lora_rank": d.kv_rank,
        "qk_nope_head_dim": d.qk_head,
        "qk_rope_head_dim": 0,
        "v_head_dim": d.v_head,
        "index_n_heads": d.index_heads,
        "index_head_dim": d.index_head,
        "index_topk": 2048,
        "index_kpool": d.index_pool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "layer_types": [
            "deepseek_sparse_attention" if d.attends(layer) else "linear_attention"
            for layer in range(d.layers)
        ],
        "mlp_layer_types": ["dense" if layer < d.dense_layers else "sparse" for layer in range(d.layers)],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "max_position_embeddings": 1_048_576,
        "linear_attn_config": {
            "num_heads": d.kda_heads,
            "head_dim": d.kda_head,
            "short_conv_kernel_size": d.convolution,
            "gate_lower_bound": -5.0,
            "safe_gate": True,
        },
        "dtype": "bfloat16",
    }


def _media_tokens() -> dict[str, int]:
    """The special tokens around an image and a video, which the libraries take from here."""
    return {
        f"{medium}{part}_token_id": token_id(token.format(medium))
        for medium in ("image", "video")
        for part, token in (("", "<|{}|>"), ("_start", "<|begin_of_{}|>"), ("_end", "<|end_of_{}|>"))
    }


def _vision(d: Dimensions) -> dict[str, Any]:
    return {
        "model_type": "glm5_next_vision",
        "depth": d.vision_blocks,
        "hidden_size": d.vision_hidden,
        "intermediate_size": d.vision_width,
        "num_heads": d.vision_heads,
        "image_size": 448,
        "patch_size": d.vision_patch,
        "temporal_patch_size": d.vision_frames,
        "spatial_merge_size": d.vision_merge,
        "out_hidden_size": d.vision_out,
        "projection_intermediate_size": d.vision_merger_width,
        "in_channels": 3,
        "attention_bias": True,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
    }


def _quantization() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": group},
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_method": "modelopt",
        "ignore": IGNORE,
    }
