"""Which module of vLLM 0.33.0 takes which tensor: literal tables for glm5_next and for DeepSeek-V3 style models.

Read from vllm/models/glm5next and vllm/model_executor/models/deepseek_v2.py at 0.33.0, and held to the real loader by
tests that need it installed. A row: the checkpoint's name inside a layer, the module that takes it, its place there,
and what that module can hold as it ships (`stock`) and under our runtime patch (`patched`).

  float     built without a quantization config: floats alone
  dequant   built without one, but its loader turns block FP8 with a 2-D weight_scale_inv back into BF16
  config    whatever the checkpoint's config says of it
  by 64     as config where both sides of the weight are multiples of 64, else float
  vocab     as config, but the loader refuses scales (rows must be the vocabulary's)
  raw       a bare parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Holds = Literal["float", "dequant", "config", "by 64", "vocab", "raw"]


@dataclass(frozen=True, slots=True)
class Row:
    name: str  # in the checkpoint, within its layer; of a raw parameter the whole name, else the module
    module: str  # in vLLM, within its layer
    place: str  # the part of a fused module, "" for a whole one
    stock: Holds
    patched: Holds


@dataclass(frozen=True, slots=True)
class Family:
    """One model class: prefixes in the checkpoint and in vLLM, and its rows."""

    types: tuple[str, ...]  # model_type values
    layers: Mapping[str, str]  # checkpoint's prefix of layers -> vLLM's
    draft: str  # vLLM's prefix of the MTP layer, which is a model of its own
    layer_rows: tuple[Row, ...]
    top_rows: tuple[Row, ...]
    blocks: Mapping[str, str]  # prefix of numbered vision blocks -> vLLM's
    block_rows: tuple[Row, ...]
    dropped: tuple[str, ...] = ()  # prefixes of tensors that the loader passes over
    leaves: Mapping[str, str] = field(default_factory=dict)  # leaf -> the leaf that the loader takes it for
    only_with: Mapping[str, str] = field(
        default_factory=dict
    )  # row -> the key of config.json without which it is not
    bank_biased: bool = False  # experts have biases, which no FP8 bank of compressed-tensors takes
    listed_as: Mapping[str, str] = field(
        default_factory=dict
    )  # part of a module's name -> its name to exclusion lists


def same(holds: Holds, patched: Holds, *names: str) -> tuple[Row, ...]:
    return tuple(Row(name, name, "", holds, patched) for name in names)


def fused(module: str, holds: Holds, patched: Holds, members: Mapping[str, str]) -> tuple[Row, ...]:
    parent = module.rpartition(".")[0]
    dot = "." if parent else ""
    return tuple(
        Row(f"{parent}{dot}{name}", module, place, holds, patched) for name, place in members.items()
    )


GATE_UP = {"gate_proj": "gate", "up_proj": "up"}
_MLA_A = {"q_a_proj": "q_a", "kv_a_proj_with_mqa": "kv_a"}

_MOE = (
    *fused("mlp.gate_up_proj", "config", "config", GATE_UP),
    *same("config", "config", "mlp.down_proj"),
    *fused("mlp.shared_experts.gate_up_proj", "config", "config", GATE_UP),
    *same("config", "config", "mlp.shared_experts.down_proj"),
    *fused("mlp.experts.#.w13", "config", "config", GATE_UP),
    Row("mlp.experts.#.down_proj", "mlp.experts.#.w2", "", "config", "config"),
    *same("float", "float", "mlp.gate"),
    *same("raw", "raw", "mlp.gate.e_score_correction_bias"),
)
_NORMS = same("float", "float", "input_layernorm", "post_attention_layernorm")
_MTP = same(
    "float", "float", "eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"
)

_KDA = (
    *fused(
        "self_attn.in_proj_qkvbfg_a",
        "float",
        "config",
        {"q_proj": "q", "k_proj": "k", "v_proj": "v", "b_proj": "b", "f_a_proj": "f_a", "g_a_proj": "g_a"},
    ),
    *same("float", "float", "self_attn.f_b_proj", "self_attn.g_b_proj", "self_attn.o_norm"),
    *same("float", "float", "self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
    *same("raw", "raw", "self_attn.A_log", "self_attn.dt_bias"),
    *same("dequant", "config", "self_attn.o_proj"),
)
_GLM_MLA = (
    *fused("self_attn.fused_qkv_a_proj", "dequant", "config", _MLA_A),
    *same("dequant", "config", "self_attn.q_b_proj"),
    *same("float", "float", "self_attn.kv_b_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    *same("float", "float", "self_attn.indexer.wq_b", "self_attn.indexer.k_norm"),
    *fused("self_attn.indexer.wk_weights_proj", "float", "float", {"wk": "wk", "weights_proj": "weights"}),
    *same("raw", "raw", "self_attn.indexer.index_kpool_compress_ape"),
    *same("raw", "raw", "self_attn.indexer.index_kpool_compress_gate"),
)
_HC = same(
    "raw", "raw", *(f"hc_{part}_{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale"))
)
_VISION = (
    Row("attn.qkv", "attn.qkv_proj", "", "float", "config"),
    *same("float", "config", "attn.proj", "mlp.down_proj"),
    *fused("mlp.gate_up_proj", "float", "config", GATE_UP),
    *same("float", "float", "attn.q_norm", "attn.k_norm", "norm1", "norm2"),
)
_VISION_TOP = (
    Row("model.visual.merger.proj", "visual.merger.proj", "", "float", "config"),
    Row("model.visual.merger.gate_proj", "visual.merger.gate_up_proj", "gate", "float", "config"),
    Row("model.visual.merger.up_proj", "visual.merger.gate_up_proj", "up", "float", "config"),
    Row("model.visual.merger.down_proj", "visual.merger.down_proj", "", "float", "config"),
    *(
        Row(f"model.visual.{name}", f"visual.{name}", "", "float", "float")
        for name in ("merger.post_projection_norm", "patch_embed.proj", "downsample", "post_layernorm")
    ),
)

GLM5_NEXT = Family(
    types=("glm5_next",),
    layers={"model.language_model.layers.": "language_model.model.layers."},
    draft="model.layers.",
    layer_rows=(*_NORMS, *_KDA, *_GLM_MLA, *_MOE, *_HC, *_MTP),
    top_rows=(
        Row("lm_head", "language_model.lm_head", "", "vocab", "config"),
        Row("model.language_model.embed_tokens", "language_model.model.embed_tokens", "", "float", "float"),
        Row("model.language_model.norm", "language_model.model.norm", "", "float", "float"),
        *_VISION_TOP,
    ),
    blocks={"model.visual.blocks.": "visual.blocks."},
    block_rows=_VISION,
)

DEEPSEEK_V3 = Family(
    types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"),
    layers={"model.layers.": "model.layers."},
    draft="model.layers.",
    layer_rows=(
        *_NORMS,
        *fused("self_attn.fused_qkv_a_proj", "config", "config", _MLA_A),
        *same("config", "config", "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
        *same("config", "config", "self_attn.o_proj", "self_attn.indexer.wq_b"),
        *same(
            "float",
            "float",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
            "self_attn.indexer.k_norm",
        ),
        *same("dequant", "dequant", "self_attn.indexer.wk"),
        *same("float", "float", "self_attn.indexer.weights_proj"),
        *_MOE,
        *_MTP,
    ),
    top_rows=(
        Row("lm_head", "lm_head", "", "vocab", "vocab"),
        *same("float", "float", "model.embed_tokens", "model.norm"),
    ),
    blocks={},
    block_rows=(),
)

# Fused modules for which vLLM can find the members' entries: packed_modules_mapping and its fallbacks.
STOCK_PACKED = ("gate_up_proj", "qkv_proj", "w13")

# quant_algo -> (leaves that its parameters are loaded from, axes of the scale), as stock knows them.
STOCK_ALGOS: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "FP8": (("weight", "weight_scale", "input_scale"), 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (("weight", "weight_scale"), None),
    "FP8_PB_WO": (("weight", "weight_scale"), 4),
    "NVFP4": (("weight", "weight_scale", "weight_scale_2", "input_scale"), 2),
    "W4A16_NVFP4": (("weight", "weight_scale", "weight_scale_2"), 2),
    "MXFP8": (("weight", "weight_scale"), 2),
    "fp8": (("weight", "weight_scale_inv"), 2),  # quant_method fp8 with weight_block_size
    "fp8 by tensor": (("weight", "weight_scale", "input_scale"), None),
}
# The kinds of `formats.declared` that stand for a compressed-tensors group of FP8 weights.
COMPRESSED_ALGOS: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "fp8-grid": (("weight", "weight_scale"), 2),
    "fp8-channel": (("weight", "weight_scale"), None),
    "fp8-tensor": (("weight", "weight_scale", "input_scale"), None),
}
PATCHED_ALGOS = {**STOCK_ALGOS, "FP8_BLOCK": (("weight", "weight_scale_inv"), 2)}
