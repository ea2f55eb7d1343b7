"""`verify fit` plans the KV cache as the real vLLM 0.33.0 does, on 20 random models and flags."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from shardmill.verify.fit.layers import block_tokens, plan_layers
from shardmill.verify.fit.planner import plan_blocks
from shardmill.verify.fit.preset import ROW_BYTES, Preset
from shardmill.verify.fit.shape import read_shape
from tests.runtime_patch.vllm.conftest import Case

CASES = 20
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
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


def random_case(rng: random.Random) -> dict[str, object]:
    """A model of the family with its own depth, heads and pattern, and flags of its own."""
    depth, every, heads = rng.randint(6, 48), rng.randint(2, 5), rng.choice([8, 16, 32, 64])
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
    config = {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    preset = Preset(
        "random",
        max_model_len=rng.choice([8_192, 100_000, 262_144, 524_288, 1_000_000]),
        kv_dtype=rng.choice(["fp8", "fp8", "fp8", "auto"]),
        prefix_caching=rng.random() < 0.6,
        kda_backend=rng.choice(["flashkda", "triton"]),
        draft_tokens=rng.choice([0, 1, 1, 3]),
        state_dtype=rng.choice(["auto", "auto", "bfloat16"]),
        rung=rng.choice(list(ROW_BYTES)),
    )
    pin = rng.randint(2, 60) * 10**9
    return {"config": config, "preset": asdict(preset), "row_bytes": ROW_BYTES[preset.rung], "pin": pin}


@pytest.fixture(scope="module")
def cases() -> list[dict[str, object]]:
    rng = random.Random(8)
    return [random_case(rng) for _ in range(CASES)]


@pytest.fixture(scope="module")
def planned(cases, tmp_path_factory) -> list[dict[str, int]]:
    """The real planner's answers, all from one process."""
    folder = tmp_path_factory.mktemp("fit")
    job = {"cases": cases, "folder": str(folder)}
    case = Case(job, plugin=False, module="fit_probe", environment={"FAKE_DEVICE": "meta"})
    report = case.start(folder).report()
    assert isinstance(report, list), report
    return report


@pytest.mark.parametrize("index", range(CASES))
def test_fit_plans_as_vllm_does(cases, planned, index):
    case = cases[index]
    shape, preset = read_shape(case["config"]), Preset(**{**case["preset"], "captures": (1,)})
    plan = plan_blocks(plan_layers(shape, preset))
    ours = {
        "block_tokens": block_tokens(shape, preset),
        "block_bytes": plan.block_bytes,
        "need_bytes": plan.need_bytes(preset.max_model_len),
        "max_context": plan.max_context(case["pin"], preset.max_model_len),
        "groups": len(plan.groups),
    }
    assert ours == planned[index]
