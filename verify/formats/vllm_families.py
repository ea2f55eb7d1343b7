"""Which module of vLLM 0.33.0 takes which tensor, for the architectures most published: literal tables.

Read from vllm/model_executor/models at 0.33.0, and held to the real loader by tests that need it installed. The forms
of a row are those of `vllm_modules`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.verify.formats.vllm_modules import (
    DEEPSEEK_V3,
    GATE_UP,
    GLM5_NEXT,
    Family,
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
    unknown: tuple[str, ...] = (),
) -> Family:
    return Family(
        types=types,
        layers=layers or {"model.layers.": "model.layers."},
        draft="model.layers.",
        layer_rows=(*_NORMS, *rows),
        top_rows=top or _top("model.", "lm_head", "model.", "lm_head"),
        blocks=blocks or {},
        block_rows=block_rows,
        unknown=unknown,
    )


def _top(prefix: str, head: str, runtime: str, runtime_head: str) -> tuple[Row, ...]:
    return (
        Row(head, runtime_head, "", "vocab", "vocab"),
        Row(f"{prefix}embed_tokens", f"{runtime}embed_tokens", "", "float", "float"),
        Row(f"{prefix}norm", f"{runtime}norm", "", "float", "float"),
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
        ),
        unknown=("vision_tower.", "multi_modal_projector."),
    ),
    _family(
        "qwen2_5_vl",
        rows=(*_GQA, *_MLP),
        layers={"model.layers.": "language_model.model.layers."},
        top=_top("model.", "lm_head", "language_model.model.", "language_model.lm_head"),
        unknown=("visual.",),
    ),
    _family(
        "qwen3_vl",
        rows=(*_GQA, *_MLP),
        layers={"model.language_model.layers.": "language_model.model.layers."},
        top=_top("model.language_model.", "lm_head", "language_model.model.", "language_model.lm_head"),
        unknown=("model.visual.",),
    ),
)
