"""Which module of vLLM 0.33.0 takes which tensor, for the architectures most published: literal tables.

Read from vllm/model_executor/models at 0.33.0, and held to the real loader by tests that need it installed. The forms
of a row are those of `vllm_modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmill.verify.formats.vllm_modules import (
    DEEPSEEK_V3,
    GATE_UP,
    GLM5_NEXT,
    Family,
    Holds,
    Row,
    fused,
    same,
)

_QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
_NORMS = same(
    "float",
    "float",
    *(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    *("post_self_attn_layernorm", "post_mlp_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
)


def _config(*names: str) -> tuple[Row, ...]:
    return same("config", "config", *names)


_GQA = (*fused("self_attn.qkv_proj", "config", "config", _QKV), *_config("self_attn.o_proj"))
_MLP = (*fused("mlp.gate_up_proj", "config", "config", GATE_UP), *_config("mlp.down_proj"))
_FUSED_MLP = _config("mlp.gate_up_proj", "mlp.down_proj")


def _bank(place: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Experts one by one on disk, one module in memory."""
    return (
        *fused(f"{place}.experts.#.w13", "config", "config", {gate: "gate", up: "up"}),
        Row(f"{place}.experts.#.{down}", f"{place}.experts.#.w2", "", "config", "config"),
        *same("float", "float", f"{place}.gate"),
    )


def _shared(name: str) -> tuple[Row, ...]:
    return (
        *fused(f"mlp.{name}.gate_up_proj", "config", "config", GATE_UP),
        *_config(f"mlp.{name}.down_proj"),
    )


_MOE = _bank("mlp", "gate_proj", "up_proj", "down_proj")
_W_MOE = _bank("block_sparse_moe", "w1", "w3", "w2")
_DELTA_NET = (
    *_config("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    *same("float", "float", "linear_attn.conv1d", "linear_attn.norm"),
    *same("raw", "raw", "linear_attn.A_log", "linear_attn.dt_bias"),
)


def _family(
    *types: str,
    rows: tuple[Row, ...],
    layers: Mapping[str, str] | None = None,
    top: tuple[Row, ...] | None = None,
    blocks: Mapping[str, str] | None = None,
    block_rows: tuple[Row, ...] = (),
    **more: Any,
) -> Family:
    return Family(
        types=types,
        layers=layers or {"model.layers.": "model.layers."},
        draft="model.layers.",
        layer_rows=(*_NORMS, *rows),
        top_rows=top or _top("model.", "lm_head", "model.", "lm_head"),
        blocks=blocks or {},
        block_rows=block_rows,
        **more,
    )


def _top(prefix: str, head: str, runtime: str, runtime_head: str) -> tuple[Row, ...]:
    return (
        Row(head, runtime_head, "", "vocab", "vocab"),
        Row(f"{prefix}embed_tokens", f"{runtime}embed_tokens", "", "float", "float"),
        Row(f"{prefix}norm", f"{runtime}norm", "", "float", "float"),
    )


def _seen_as(runtime: str, holds: Holds, *names: str) -> tuple[Row, ...]:
    """Rows of the top whose published prefix is `model.` before vLLM's."""
    return tuple(Row(f"model.{runtime}{name}", f"{runtime}{name}", "", holds, holds) for name in names)


_STACKED = (("gate_up_proj", "w13"), ("down_proj", "w2"))
_SIGLIP = "vision_tower.vision_model."
_SIGLIP_TOP = ("embeddings.patch_embedding", "embeddings.position_embedding", "post_layernorm")
_SIGLIP_ROWS = (
    *fused("self_attn.qkv_proj", "config", "config", _QKV),
    *_config("self_attn.out_proj"),
    *same("by 64", "by 64", "mlp.fc1", "mlp.fc2"),
    *same("float", "float", "layer_norm1", "layer_norm2"),
)

FAMILIES: tuple[Family, ...] = (
    GLM5_NEXT,
    DEEPSEEK_V3,
    _family(
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2"),
        *("granite", "olmo2", "smollm3", "seed_oss"),
        rows=(*_GQA, *_MLP),
    ),
    _family("phi3", rows=(*_config("self_attn.qkv_proj", "self_attn.o_proj"), *_FUSED_MLP)),
    _family("glm4", rows=(*_GQA, *_FUSED_MLP)),
    _family(
        "mixtral", rows=(*_GQA, *_W_MOE, *_bank("block_sparse_moe", "gate_proj", "up_proj", "down_proj")[:-1])
    ),
    _family("qwen3_moe", rows=(*_GQA, *_MLP, *_MOE[:-1], *_config("mlp.gate"))),
    _family(
        "qwen2_moe",
        rows=(
            *_GQA,
            *_MLP,
            *_MOE,
            *_shared("shared_expert"),
            *same("float", "float", "mlp.shared_expert_gate"),
        ),
    ),
    _family(
        "qwen3_next",
        rows=(
            *(*_GQA, *_DELTA_NET, *_MLP, *_MOE, *_shared("shared_expert")),
            *same("float", "float", "mlp.shared_expert_gate"),
        ),
    ),
    _family(
        "glm4_moe",
        rows=(
            *(*_GQA, *_MLP, *_MOE, *_shared("shared_experts")),
            *same("raw", "raw", "mlp.gate.e_score_correction_bias"),
        ),
    ),
    _family(
        "granitemoe",
        rows=(
            *_GQA,
            Row("block_sparse_moe.input_linear", "block_sparse_moe.experts.w13", "", "config", "config"),
            Row("block_sparse_moe.output_linear", "block_sparse_moe.experts.w2", "", "config", "config"),
            Row("block_sparse_moe.router.layer", "block_sparse_moe.gate", "", "float", "float"),
        ),
    ),
    _family(
        "gemma3",
        rows=(*_GQA, *_MLP),
        layers={"language_model.model.layers.": "language_model.model.layers."},
        top=(
            *_top("language_model.model.", "lm_head", "language_model.model.", "language_model.lm_head"),
            Row("language_model.lm_head", "language_model.lm_head", "", "vocab", "vocab"),
            *same("float", "float", *(_SIGLIP + name for name in _SIGLIP_TOP)),
            *same("raw", "raw", "multi_modal_projector.mm_input_projection_weight"),
            *same("float", "float", "multi_modal_projector.mm_soft_emb_norm"),
        ),
        blocks={_SIGLIP + "encoder.layers.": _SIGLIP + "encoder.layers."},
        block_rows=_SIGLIP_ROWS,
        dropped=(_SIGLIP + "head.",),
    ),
    _family(
        "qwen2_5_vl",
        rows=(*_GQA, *_MLP),
        layers={"model.layers.": "language_model.model.layers."},
        top=(
            *_top("model.", "lm_head", "language_model.model.", "language_model.lm_head"),
            *same("float", "float", "visual.patch_embed.proj", "visual.merger.ln_q"),
            *_config("visual.merger.mlp.0", "visual.merger.mlp.2"),
        ),
        blocks={"visual.blocks.": "visual.blocks."},
        block_rows=(
            *_config("attn.qkv", "attn.proj", "mlp.down_proj"),
            *fused("mlp.gate_up_proj", "config", "config", GATE_UP),
            *same("float", "float", "norm1", "norm2"),
        ),
    ),
    _family(
        "qwen3_vl",
        rows=(*_GQA, *_MLP),
        layers={"model.language_model.layers.": "language_model.model.layers."},
        top=(
            *_top("model.language_model.", "lm_head", "language_model.model.", "language_model.lm_head"),
            *_seen_as("visual.", "float", "patch_embed.proj", "pos_embed", "merger.norm"),
            *_seen_as("visual.", "config", "merger.linear_fc1", "merger.linear_fc2"),
        ),
        blocks={
            f"model.visual.{place}.": f"visual.{place}." for place in ("blocks", "deepstack_merger_list")
        },
        block_rows=(
            *_config("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "linear_fc1", "linear_fc2"),
            *same("float", "float", "norm1", "norm2", "norm"),
        ),
    ),
    _family(
        "mistral3",
        rows=(*_GQA, *_MLP),
        layers={"language_model.model.layers.": "language_model.model.layers."},
        top=(
            *_top("language_model.model.", "lm_head", "language_model.model.", "language_model.lm_head"),
            Row("language_model.lm_head", "language_model.lm_head", "", "vocab", "vocab"),
            *same("float", "float", "vision_tower.patch_conv", "vision_tower.ln_pre"),
            *same("float", "float", "multi_modal_projector.norm"),
            *same("float", "float", "multi_modal_projector.patch_merger.merging_layer"),
            *_config("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
        ),
        blocks={"vision_tower.transformer.layers.": "vision_tower.transformer.layers."},
        block_rows=(
            *fused("attention.qkv_proj", "config", "config", _QKV),
            *_config("attention.o_proj", "feed_forward.down_proj"),
            *fused("feed_forward.gate_up_proj", "config", "config", GATE_UP),
            *same("float", "float", "attention_norm", "ffn_norm"),
        ),
        leaves={"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"},
    ),
    _family(
        "minimax_m2",
        rows=(
            *_GQA,
            *_W_MOE,
            *same("raw", "raw", "block_sparse_moe.e_score_correction_bias"),
        ),
        listed_as={".block_sparse_moe.": ".mlp."},
        only_with={"block_sparse_moe.e_score_correction_bias": "use_routing_bias"},
    ),
    _family(
        "gpt_oss",
        rows=(
            *(
                Row(f"self_attn.{name}", "attn.qkv_proj", place, "config", "config")
                for name, place in _QKV.items()
            ),
            Row("self_attn.o_proj", "attn.o_proj", "", "config", "config"),
            Row("self_attn.sinks", "attn.sinks", "", "raw", "raw"),
            *same("float", "float", "mlp.router"),
            *(
                Row(f"mlp.experts.{name}", f"mlp.experts.{module}", "", "config", "config")
                for name, module in _STACKED
            ),
            *(
                Row(f"mlp.experts.{name}_bias", f"mlp.experts.{module}.bias", "", "raw", "raw")
                for name, module in _STACKED
            ),
        ),
        top=(
            Row("lm_head", "lm_head", "", "float", "float"),
            Row("model.embed_tokens", "model.embedding", "", "float", "float"),
            *same("float", "float", "model.norm"),
        ),
        bank_biased=True,
    ),
)
