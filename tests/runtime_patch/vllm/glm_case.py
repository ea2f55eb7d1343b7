"""A random GLM-5.3-Flash: its own depth, heads and pattern, small where memory does not look."""

from __future__ import annotations

import random
from typing import Any

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
}
TEXT = {
    "model_type": "glm5_next_text",
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "topk_group": 1,
    "mhc": True,
    "hc_mult": 4,
    "mla_use_nope": True,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1 << 20,
    "dtype": "bfloat16",
}
VISION = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "image_size": 448,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 256,
    "projection_intermediate_size": 512,
    "in_channels": 3,
    "attention_bias": True,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-5,
}


def glm_config(rng: random.Random) -> dict[str, Any]:
    """The config.json of one random model of the family."""
    depth, every, heads = rng.randint(6, 16), rng.randint(2, 5), rng.choice([8, 16, 32, 64])
    kinds = [
        "deepseek_sparse_attention" if i % every == every - 1 else "linear_attention" for i in range(depth)
    ]
    text = {
        **TEXT,
        **SMALL,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "index_kpool": 4,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (depth - 3),
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": 128,
            "short_conv_kernel_size": rng.choice([3, 4]),
            "gate_lower_bound": -5.0,
            "safe_gate": True,
        },
    }
    return {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
