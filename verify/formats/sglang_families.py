"""The model classes of SGLang 0.5.23 that `verify loads` knows: literal tables, with the rows of `sglang_modules`."""

from __future__ import annotations

from shardmill.verify.formats.sglang_modules import (
    DELTA_NET,
    FUSED_MLP,
    GATE_UP,
    GQA,
    INDEXER,
    LOUD,
    MLA,
    MLA_PACKED,
    MLP,
    MOE,
    NONE,
    PACKED,
    QKV,
    W_MOE,
    Family,
    Layers,
    Row,
    blocks,
    decoder,
    fused,
    moved,
    one_more,
    shared,
    single,
    top,
)

_QWEN_RENAMES = (
    ("in", "attn.qkv", "attn.qkv_proj"),
    ("begin", "model.language_model.", "language_model.model."),
    ("begin", "model.visual.", "visual."),
    ("begin", "lm_head.", "language_model.lm_head."),
    ("begin", "model.", "language_model.model."),
)
_MERGER = ("linear_fc1", "linear_fc2", "norm")
_SIGLIP = "vision_tower.vision_model."
_PIXTRAL = (
    *fused("attention.qkv_proj", QKV),
    Row("attention.o_proj", "attention.proj", "", "config"),
    *fused("feed_forward.gate_up_proj", GATE_UP),
    *single("config", "feed_forward.down_proj"),
    *single("float", "attention_norm", "ffn_norm"),
)
_PROJECTOR = ("linear_1", "linear_2", "norm", "patch_merger.merging_layer")

FAMILIES: tuple[Family, ...] = (
    Family(("llama", "mistral"), (decoder(*GQA, *MLP),), top(), NONE, scale_inv=False),
    Family(
        ("phi3",),
        (decoder(*single("config", "self_attn.qkv_proj", "self_attn.o_proj"), *FUSED_MLP),),
        top(),
        NONE,
        scale_inv=False,
    ),
    Family(("qwen2",), (decoder(*GQA, *MLP),), top(), NONE),
    Family(("qwen3",), (decoder(*GQA, *MLP),), top(), NONE, loud=frozenset({"fused"})),
    Family(("gemma2",), (decoder(*GQA, *MLP, listed=None),), top(asked=False), PACKED, loud=LOUD),
    Family(("gemma3_text",), (decoder(*GQA, *MLP),), top(), PACKED, loud=LOUD),
    Family(("cohere", "cohere2"), (decoder(*GQA, *MLP),), top(asked=False), NONE, loud=LOUD),
    Family(("granite",), (decoder(*GQA, *MLP),), top(), NONE, loud=LOUD, tied="weight"),
    Family(("olmo2",), (decoder(*GQA, *MLP),), top(), NONE, loud=LOUD),
    Family(("glm4",), (decoder(*GQA, *FUSED_MLP),), top(), NONE),
    Family(
        ("mixtral",),
        (decoder(*GQA, *W_MOE, listed=""),),
        top(asked=False),
        NONE,
        loud=frozenset({"fused", "expert"}),
        tied="no",
        methods=("fp8", "compressed-tensors"),  # under others its class is QuantMixtralForCausalLM
    ),
    Family(
        ("qwen2_moe",),
        (decoder(*GQA, *MLP, *MOE, *shared("shared_expert"), *single("float", "mlp.shared_expert_gate")),),
        top(),
        NONE,
        loud=frozenset({"expert"}),
        tied="no",
    ),
    Family(("qwen3_moe",), (decoder(*GQA, *MLP, *MOE),), top(), PACKED, tied="no"),
    Family(
        ("qwen3_next",),
        (
            decoder(
                *moved(*GQA, *single("float", "self_attn.q_norm", "self_attn.k_norm")),
                *(*DELTA_NET, *MLP, *MOE, *shared("shared_expert")),
                *single("float", "mlp.shared_expert_gate"),
            ),
        ),
        top(),
        PACKED,
        loud=LOUD,
        tied="no",
    ),
    Family(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        (decoder(*MLA, *MLP, *MOE, *shared("shared_experts")),),
        top(),
        MLA_PACKED,
        loud=frozenset({"fused"}),
        draft=True,
    ),
    Family(
        ("deepseek_v32", "glm_moe_dsa"),
        (decoder(*MLA, *INDEXER, *MLP, *MOE, *shared("shared_experts")),),
        top(),
        MLA_PACKED,
        loud=frozenset({"fused"}),
        draft=True,
    ),
    Family(
        ("glm4_moe",),
        (decoder(*GQA, *MLP, *MOE, *one_more("shared_experts")),),
        top(),
        NONE,
        tied="no",
        draft=True,
    ),
    Family(
        ("minimax_m2",),
        (decoder(*GQA, *W_MOE, *single("float", "block_sparse_moe.e_score_correction_bias")),),
        top(asked=False),
        PACKED,
        tied="no",
    ),
    Family(
        ("granitemoe",),
        (
            decoder(
                *GQA,
                Row("block_sparse_moe.input_linear", "block_sparse_moe.experts", "w13", "stack"),
                Row("block_sparse_moe.output_linear", "block_sparse_moe.experts", "w2", "stack"),
                Row("block_sparse_moe.router.layer", "block_sparse_moe.gate", "", "float"),
            ),
        ),
        top(),
        NONE,
        loud=frozenset({"fused", "expert"}),
        tied="weight",
        renames=(
            ("end", ".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            ("end", ".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
        ),
    ),
    Family(
        ("gpt_oss",),
        (
            decoder(
                *fused("self_attn.qkv_proj", QKV, "float"),
                *single("float", "self_attn.o_proj", "self_attn.sinks", "mlp.router"),
                Row("mlp.experts.gate_up_proj", "mlp.experts", "w13", "stack"),
                Row("mlp.experts.down_proj", "mlp.experts", "w2", "stack"),
            ),
        ),
        top(asked=False),
        NONE,
        tied="no",
        methods=("fp8", "compressed-tensors", "mxfp4"),
    ),
    Family(
        ("gemma3",),
        (
            decoder(*GQA, *MLP, prefix="language_model.model.", memory="language_model.model."),
            blocks(
                f"{_SIGLIP}encoder.layers.",
                (
                    *fused("self_attn.qkv_proj", QKV),
                    Row("self_attn.out_proj", "self_attn.proj", "", "config"),
                    *single("config", "mlp.fc1", "mlp.fc2"),
                    *single("float", "layer_norm1", "layer_norm2"),
                ),
            ),
        ),
        (
            *top("language_model.model.", "language_model.model.", "language_model.lm_head"),
            *single(
                "float", f"{_SIGLIP}embeddings.patch_embedding", f"{_SIGLIP}embeddings.position_embedding"
            ),
            *single("float", f"{_SIGLIP}post_layernorm", "multi_modal_projector.mm_input_projection_weight"),
            *single("float", "multi_modal_projector.mm_soft_emb_norm"),
        ),
        PACKED,
        loud=LOUD,
        head="language_model.lm_head",
    ),
    Family(
        ("mistral3",),
        (
            decoder(
                *GQA,
                *MLP,
                prefix="language_model.model.",
                memory="language_model.model.",
                listed="model.",
            ),
            blocks("vision_tower.transformer.layers.", _PIXTRAL),
        ),
        (
            *top("language_model.model.", "language_model.model.", "language_model.lm_head"),
            *single("float", "vision_tower.ln_pre", "vision_tower.patch_conv"),
            *single("float", *(f"multi_modal_projector.{name}" for name in _PROJECTOR)),
        ),
        NONE,
        scale_inv=False,
        head="language_model.lm_head",
    ),
    Family(
        ("qwen2_5_vl",),
        (
            decoder(*GQA, *MLP),
            blocks(
                "visual.blocks.",
                (
                    Row("attn.qkv", "attn.qkv_proj", "", "config"),
                    *single("config", "attn.proj", "mlp.down_proj"),
                    *fused("mlp.gate_up_proj", GATE_UP),
                    *single("float", "norm1", "norm2"),
                ),
            ),
        ),
        (
            *top(),
            *single("config", "visual.merger.mlp.0", "visual.merger.mlp.2"),
            *single("float", "visual.merger.ln_q", "visual.patch_embed.proj"),
        ),
        {"gate_up_proj": ("gate_proj", "up_proj")},
        loud=frozenset({"fused"}),
        renames=_QWEN_RENAMES,
    ),
    Family(
        ("qwen3_vl",),
        (
            decoder(*GQA, *MLP, prefix="model.language_model.", listed="model.language_model."),
            Layers(
                "model.visual.blocks.",
                "visual.blocks.",
                "visual.blocks.",
                (
                    Row("attn.qkv", "attn.qkv_proj", "", "float"),
                    *single("float", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "norm1", "norm2"),
                ),
            ),
            Layers(
                "model.visual.deepstack_merger_list.",
                "visual.deepstack_merger_list.",
                "visual.deepstack_merger_list.",
                single("float", *_MERGER),
            ),
        ),
        (
            *top("model.language_model.", "model."),
            *(Row(f"model.visual.merger.{name}", f"visual.merger.{name}", "", "float") for name in _MERGER),
            *(
                Row(f"model.visual.{name}", f"visual.{name}", "", "float")
                for name in ("patch_embed.proj", "pos_embed")
            ),
        ),
        NONE,
        renames=_QWEN_RENAMES,
    ),
)


def family_of(model_type: object) -> Family | None:
    return next((family for family in FAMILIES if model_type in family.types), None)
