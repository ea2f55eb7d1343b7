"""What published names mean: which tensors convert, which are kept and why, what runtimes fuse and deal out.

Sources: the index files and modelling code of Llama, Qwen3, Qwen3-MoE, DeepSeek-V3, Kimi-Linear, GLM-4.x and GLM-5.x,
and vLLM 0.33.0's packed modules. Rows are tried in order, the first that matches speaks. To teach a new name: a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Names of one meaning. `reason` None: they are quantized, where their shape and the profile allow it.

    beside: only where the same module also holds a child of that name.
    stock: whether unpatched runtimes build these quantized; else only 'modelopt-mixed' converts them.
    model_types: the only ones that use the names so; empty for any.
    """

    family: str
    globs: tuple[str, ...]
    reason: str | None = None
    beside: str | None = None
    stock: bool = True
    model_types: tuple[str, ...] = ()


MLPS = "shared experts + dense MLP"  # of one meaning; `family_name` says which of the two a model has
_SHARED = frozenset(("shared_experts", "shared_expert", "shared_mlp"))
_ATTENTION = "**.{self_attn,attention}"
_EXPERT = "**.experts.*"
_VISION = "**.{visual,vision_tower,vision_model}"

ROWS: tuple[Row, ...] = (
    Row(
        "routers",
        (
            "**.{mlp,block_sparse_moe,feed_forward}.gate.{weight,e_score_correction_bias}",
            "**.{mlp,block_sparse_moe}.e_score_correction_bias",
            "**.{mlp,block_sparse_moe}.shared_expert_gate.weight",
            "**.router.**",
            "**.mlp.gate.wg.weight",
            "**.ffn.gate.{weight,bias,tid2eid}",
            "**.{mixer,moe}.gate.{weight,e_score_correction_bias}",
        ),
        "a rounded router logit sends a token to another expert",
    ),
    Row(
        "sparse indexer",
        ("**.indexer.**",),
        "it picks the tokens that attention sees; a wrong pick is not a small error",
    ),
    Row(
        "vision Linears",
        (
            _VISION + ".blocks.*.attn.{qkv,proj}.weight",
            _VISION + ".blocks.*.mlp.{gate,up,down}_proj.weight",
            _VISION + ".merger.{proj,gate_proj,up_proj,down_proj}.weight",
        ),
        stock=False,
    ),
    Row("vision remainder", ("**.visual.**",), "convolutions, biases, norms and what no runtime quantizes"),
    Row(
        "other towers",
        ("**.{vision_tower,vision_model,audio_tower,multi_modal_projector}.**",),
        "runtimes build other towers than the language model's unquantized",
    ),
    Row("KDA q/k/v + b/f_a/g_a", (_ATTENTION + ".{q,k,v,b,f_a,g_a}_proj.weight",), beside="A_log"),
    Row(
        "KDA f_b/g_b",
        (_ATTENTION + ".{f_b,g_b}_proj.weight",),
        "they set the delta rule's decay and gate, whose precision the authors insist on",
        beside="A_log",
    ),
    Row(
        "KDA state",
        (
            _ATTENTION + ".{q,k,v}_conv1d.weight",
            _ATTENTION + ".{A_log,dt_bias}",
            _ATTENTION + ".o_norm.weight",
        ),
        "convolutions, decays and norms are small and no Linear",
        beside="A_log",
    ),
    Row("MLA q_a/kv_a/q_b", (_ATTENTION + ".{q_a_proj,kv_a_proj_with_mqa,q_b_proj}.weight",)),
    Row("MLA q", (_ATTENTION + ".q_proj.weight",), beside="kv_a_proj_with_mqa"),
    Row("kv_b", (_ATTENTION + ".kv_b_proj.weight",), "MLA absorbs it to BF16 when it loads"),
    Row("attention q/k/v", (_ATTENTION + ".{q,k,v,qkv}_proj.weight",)),
    Row("o_proj", (_ATTENTION + ".{o,out}_proj.weight", _ATTENTION + ".dense.weight")),
    # Numbered attention and MLPs: LongCat-Flash has two of each in a layer.
    Row("kv_b", (_ATTENTION + ".*.kv_b_proj.weight",), "MLA absorbs it to BF16 when it loads"),
    Row(
        "numbered attention",
        (_ATTENTION + ".*.{q_a_proj,kv_a_proj_with_mqa,q_b_proj,q_proj,k_proj,v_proj,o_proj}.weight",),
    ),
    Row("numbered MLP", ("**.mlps.*.{gate,up,down}_proj.weight",)),
    # Qwen3-Next and Qwen3.5: their makers publish these in FP8, and the small gates (a, b, ba) as floats.
    Row("linear attention", ("**.linear_attn.{in_proj_qkvz,in_proj_qkv,in_proj_z,out_proj}.weight",)),
    Row(
        "linear attention gates",
        ("**.linear_attn.{in_proj_ba,in_proj_a,in_proj_b}.weight",),
        "they set decay and gate of the delta rule: small, and floats at the makers",
    ),
    Row(
        "mixers",
        (
            "**.mixer.{q,k,v,o}_proj.weight",
            "**.{mixer,mamba}.{in_proj,out_proj}.weight",
            "**.mixer.{up,down}_proj.weight",
        ),
    ),
    Row(
        "state-space parameters",
        ("**.{mixer,mamba}.{x_proj,dt_proj}.weight",),
        "they set step sizes of the state: small and sensitive",
    ),
    Row(
        "DeepSeek-V4 attention",
        ("**.attn.{wq_a,wq_b,wkv,wo_a,wo_b}.weight", "layers.*.attn.{wq_a,wq_b,wkv,wo_a,wo_b}.weight"),
    ),
    # GPT-2 and its kin store these transposed (Conv1D): a Linear's kernel would read rows for columns.
    Row(
        "transposed Linears",
        (
            "**.h.*.{attn,crossattention}.{c_attn,c_proj,q_attn}.weight",
            "**.h.*.mlp.{c_fc,c_proj}.weight",
            "h.*.{attn,crossattention}.{c_attn,c_proj,q_attn}.weight",
            "h.*.mlp.{c_fc,c_proj}.weight",
        ),
        "stored [columns, rows] (Conv1D), which loaders build unquantized",
        model_types=("gpt2", "openai-gpt", "imagegpt", "decision_transformer"),
    ),
    Row(
        "attention projections",
        (
            "**.{self_attention,attention}.{query_key_value,dense}.weight",  # Falcon, BLOOM, GPT-NeoX
            "**.attn.{Wqkv,Wo,out_proj}.weight",  # MPT, ModernBERT
            "**.attn.{q,k,v}_proj.weight",  # GPT-J
            "**.h.*.attn.{c_attn,c_proj}.weight",  # the first Qwen, StarCoder
            "**.{SelfAttention,EncDecAttention}.{q,k,v,o}.weight",  # T5
            "**.attention.{self,attention}.{query,key,value}.weight",  # BERT; ViT, DINOv2
            "**.attention.{q_lin,k_lin,v_lin,out_lin}.weight",  # DistilBERT
            "**.attention.output.dense.weight",
        ),
    ),
    Row(
        "MLP",
        (
            "**.mlp.{dense_h_to_4h,dense_4h_to_h,fc_in,fc_out,Wi,Wo}.weight",
            "**.ffn.{up_proj,down_proj,lin1,lin2}.weight",
            "**.h.*.mlp.{w1,w2,c_fc,c_proj}.weight",
            "**.DenseReluDense.{wi,wi_0,wi_1,wo}.weight",
            "**.layer.*.{intermediate,output}.dense.weight",
        ),
    ),
    Row(
        "RWKV",
        (
            "**.blocks.*.attention.{key,value,receptance,output}.weight",
            "**.blocks.*.feed_forward.{key,value,receptance}.weight",
        ),
        model_types=("rwkv",),
    ),
    Row(
        "recurrent blocks",
        (
            "**.temporal_block.{q_proj,k_proj,v_proj,o_proj,linear_x,linear_y,linear_out}.weight",
            "**.mlp_block.{gate,up,down}_proj.weight",
        ),
    ),
    Row("short convolutions' Linears", ("**.layers.*.conv.{in_proj,out_proj}.weight",)),
    Row("feed-forward", ("**.feed_forward.{w1,w2,w3}.weight",)),
    Row("DeepSeek-V4 shared experts", ("**.ffn.shared_experts.{w1,w2,w3}.weight",)),
    Row(
        "routed experts",
        (_EXPERT + ".{gate,up,down}_proj.weight", _EXPERT + ".{w1,w2,w3}.weight"),
    ),
    Row(
        MLPS,
        (
            "**.{shared_experts,shared_expert,share_expert}.{gate,up,down}_proj.weight",
            "**.{mlp,block_sparse_moe}.{gate,up,down,gate_up}_proj.weight",  # the latter: Kimi as transformers saves it
            "**.{shared_mlp,feed_forward}.{gate,up,down}_proj.weight",
            "**.layers.*.mlp.{c_fc,c_proj,fc1,fc2}.weight",
            "**.layers.*.{fc1,fc2}.weight",
        ),
    ),
    Row(
        "hyper-connections",
        ("**.{hc_attn,hc_ffn}_{fn,base,scale}",),
        "they mix the residual streams and are sensitive to rounding",
    ),
    Row(
        "draft (MTP) joints",
        ("**.{eh_proj,enorm,hnorm,shared_head.norm}.weight", "**.mtp_layers.*.input_proj.weight"),
        "runtimes build eh_proj unquantized; the rest are norms",
    ),
    Row("lm_head", ("**.lm_head.weight",), stock=False),
    Row(
        "DeepSeek-V4 head",
        ("head.weight", "embed.weight"),
        "vocabulary matrices, which loaders expect as floats",
    ),
    Row(
        "embeddings",
        (
            "**.{embed_tokens,word_embeddings,position_embeddings,token_type_embeddings,wte,wpe,embed_in,embed_out,shared_head.head}.weight",
        ),
        "a look-up or a copy of the head, not a product that runtimes have in FP8",
    ),
    Row("biases of experts", ("**.experts.{gate_up_proj,down_proj}_bias",), "biases, no Linear"),
    Row(
        "norms",
        ("**.*{norm,layernorm,layer_norm}.{weight,bias}", "**.{norm1,norm2,ln_1,ln_2,ln_f}.{weight,bias}"),
        "vectors, no Linear",
    ),
)


def family_name(family: str, tensors: Iterable[str]) -> str:
    """What a family of these tensors is called: of shared experts and dense MLPs those that are there."""
    shared = {not _SHARED.isdisjoint(tensor.split(".")) for tensor in tensors}
    if len(shared) > 1:
        return family
    return family.replace(MLPS, "shared experts" if shared == {True} else "dense MLP")


@dataclass(frozen=True, slots=True)
class Group:
    """Children of one module that runtimes build as one, in their order, and what they call it."""

    name: str
    home: str  # the module's last dotted parts
    members: tuple[str, ...]
    runtime_names: tuple[str, ...] = ()
    beside: str | None = None


_GATED = ("gate_proj", "up_proj")

GROUPS: tuple[Group, ...] = (
    Group(
        "KDA input",
        "self_attn",
        ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
        ("in_proj_qkvbfg_a", "fused_qkvbfg_a_proj", "in_proj_qkvgfab"),
        beside="A_log",
    ),
    Group(
        "MLA input",
        "self_attn",
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
    ),
    Group("attention input", "self_attn", ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)),
    Group("dense MLP", "mlp", _GATED, ("gate_up_proj",)),
    Group("dense MLP", "block_sparse_moe", _GATED, ("gate_up_proj",)),
    Group("shared expert", "shared_experts", _GATED, ("gate_up_proj",)),
    Group("shared expert", "shared_expert", _GATED, ("gate_up_proj",)),
    Group("shared MLP", "shared_mlp", _GATED, ("gate_up_proj",)),
    Group("dense MLP", "feed_forward", _GATED, ("gate_up_proj",)),
    Group("dense MLP", "mlps.*", _GATED, ("gate_up_proj",)),
    Group("shared expert", "shared_experts", ("w1", "w3"), ("gate_up_proj",)),
    Group("linear attention input", "linear_attn", ("in_proj_qkv", "in_proj_z"), ("in_proj_qkvz",)),
    Group("mixer input", "mixer", ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)),
    Group("MLA input", "self_attn.*", ("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj",)),
    Group("vision merger", "merger", _GATED, ("gate_up_proj",)),
    Group("expert", "experts.*", _GATED),
    Group("expert", "experts.*", ("w1", "w3")),
)

# Models whose makers published block FP8 [128,128], and the families of which BF16 copies decode from it: model_type
# -> families. `recover/1` finds those codes and scales again, and is `amax/1` where a block was never FP8.
NATIVE_FP8: Mapping[str, tuple[str, ...]] = {
    "glm5_next": ("MLA q_a/kv_a/q_b", MLPS),
    "deepseek_v3": ("MLA q_a/kv_a/q_b", "o_proj", "routed experts", MLPS),
}

# What tensor-parallel ranks share out. What is not here stands whole on each rank.
AXES: Mapping[str, tuple[str, ...]] = {
    "rows": (
        "**.lm_head.weight",
        "**.self_attn.{q,k,v,b,q_b,qkv}_proj.weight",
        "**.{gate,up,gate_up}_proj.weight",
        "**.experts.*.{w1,w3}.weight",
        "**.blocks.*.attn.qkv.weight",
        "**.experts.gate_up_proj",
        "**.linear_attn.{in_proj_qkvz,in_proj_qkv,in_proj_z}.weight",
        "**.mixer.{q,k,v,in}_proj.weight",
        "**.mamba.in_proj.weight",
        "**.self_attn.*.q_b_proj.weight",
        "**.shared_experts.{w1,w3}.weight",
        "**.attn.{wq_b,wo_a}.weight",
        "**.mlp.{c_fc,fc1}.weight",
        "**.layers.*.fc1.weight",
        "**.{self_attention,attention}.query_key_value.weight",
        "**.attn.{Wqkv,q_proj,k_proj,v_proj,c_attn}.weight",
        "**.mlp.{dense_h_to_4h,fc_in,Wi,w1,w2}.weight",
        "**.ffn.up_proj.weight",
        "**.feed_forward.{w1,w3}.weight",
    ),
    "columns": (
        "**.self_attn.o_proj.weight",
        "**.down_proj.weight",
        "**.experts.down_proj",
        "**.linear_attn.out_proj.weight",
        "**.self_attn.{out_proj,dense}.weight",
        "**.self_attn.*.o_proj.weight",
        "**.mixer.{o_proj,out_proj}.weight",
        "**.mamba.out_proj.weight",
        "**.shared_experts.w2.weight",
        "**.attn.wo_b.weight",
        "**.mlp.{c_proj,fc2}.weight",
        "**.layers.*.fc2.weight",
        "**.experts.*.w2.weight",
        "**.blocks.*.attn.proj.weight",
        "**.{self_attention,attention}.dense.weight",
        "**.attn.{out_proj,Wo,c_proj}.weight",
        "**.mlp.{dense_4h_to_h,fc_out,Wo}.weight",
        "**.ffn.down_proj.weight",
        "**.feed_forward.w2.weight",
    ),
}
