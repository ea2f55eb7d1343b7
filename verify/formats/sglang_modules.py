"""Which module of SGLang 0.5.23 takes which tensor, for the architectures most published: literal tables.

Read from sglang/srt/models at 0.5.23 and held to the real classes, which build and load on a CPU (`make sglang-test`).
A row: the checkpoint's name inside a layer, the module that takes it, its part there, and what that module can hold.

  float    built without a quantization config: floats alone
  merged   a Linear of several parts that the checkpoint holds as one tensor, with a loader of its own
  config   a Linear that is whatever the checkpoint's config says of it
  head     the vocabulary's head, which some methods quantize
  bank     experts, one module of two stacked weights: `w13` of gates and ups, `w2`
  stack    the same, given as tensors that are stacked already

`listed` is the name under which SGLang asks its config for a module, which a few classes shorten or mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Holds = Literal["float", "config", "merged", "head", "bank", "stack"]
Branch = Literal["single", "fused", "expert"]  # of a class's load_weights


@dataclass(frozen=True, slots=True)
class Row:
    name: str  # in the checkpoint, within its layer
    module: str  # in SGLang, within its layer
    part: str  # of a fused module, "" for a whole one
    holds: Holds
    listed: str = ""  # where it is not `module`


@dataclass(frozen=True, slots=True)
class Layers:
    """Numbered layers or blocks: prefix in the checkpoint, in SGLang, and the one that its config is asked with."""

    prefix: str
    memory: str
    listed: str | None  # None: names are asked without prefix and number
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One model class."""

    types: tuple[str, ...]  # model_type values
    layers: tuple[Layers, ...]
    top: tuple[Row, ...]
    packed: Mapping[str, tuple[str, ...]]  # fused module -> its parts, as the class tells its config
    loud: frozenset[Branch] = (
        frozenset()
    )  # where a tensor that no parameter takes raises; elsewhere it is dropped
    renames: tuple[tuple[str, str, str], ...] = ()  # of names in lists: "in", "begin" or "end", old, new
    # What a head that config.json says is tied becomes: the embedding itself, a module of its own with the embedding's
    # weight, or one of its own that nobody fills.
    tied: Literal["embedding", "weight", "no"] = "embedding"
    head: str = "lm_head"
    scale_inv: bool = (
        True  # False: weight_scale_inv is taken for weight_scale, and no module has such a parameter
    )
    methods: tuple[str, ...] = ()  # the only values of quant_method that are followed, () for all
    draft: bool = False  # layers after num_hidden_layers are of another model, and are dropped


def single(holds: Holds, *names: str) -> tuple[Row, ...]:
    return tuple(Row(name, name, "", holds) for name in names)


def fused(module: str, members: Mapping[str, str], holds: Holds = "config") -> tuple[Row, ...]:
    parent = module.rpartition(".")[0]
    dot = "." if parent else ""
    return tuple(Row(f"{parent}{dot}{name}", module, part, holds) for name, part in members.items())


def bank(
    place: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, ...]:
    """Experts one by one on disk."""
    names = ((gate, "w13 gate"), (up, "w13 up"), (down, "w2"))
    return tuple(Row(f"{place}.experts.#.{name}", f"{place}.experts", part, "bank") for name, part in names)


QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
GATE_UP = {"gate_proj": "gate", "up_proj": "up"}
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MLA_PACKED = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
NONE: Mapping[str, tuple[str, ...]] = {}
GQA = (*fused("self_attn.qkv_proj", QKV), *single("config", "self_attn.o_proj"))
MLP = (*fused("mlp.gate_up_proj", GATE_UP), *single("config", "mlp.down_proj"))
FUSED_MLP = single("config", "mlp.gate_up_proj", "mlp.down_proj")
NORMS = single(
    "float",
    *(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    *("post_self_attn_layernorm", "post_mlp_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
)
MLA = (
    *fused("self_attn.fused_qkv_a_proj_with_mqa", {"q_a_proj": "q_a", "kv_a_proj_with_mqa": "kv_a"}),
    *single("config", "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    *single("float", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
)
INDEXER = (
    *single("config", "self_attn.indexer.wq_b", "self_attn.indexer.wk"),
    *single("float", "self_attn.indexer.weights_proj", "self_attn.indexer.k_norm"),
)
MOE = (*bank("mlp"), *single("float", "mlp.gate", "mlp.gate.e_score_correction_bias"))
W_MOE = (*bank("block_sparse_moe", "w1", "w3", "w2"), *single("float", "block_sparse_moe.gate"))
DELTA_NET = (
    *single("merged", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    *single("config", "linear_attn.out_proj"),
    *single("float", "linear_attn.conv1d", "linear_attn.norm", "linear_attn.A_log", "linear_attn.dt_bias"),
)
# Linears that are not fused, by the last word of their name: how their weight is divided, and so copied.
BY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "fc1", "0")  # refuse to copy floats into codes
BY_COLUMNS = (
    "o_proj",
    "down_proj",
    "out_proj",
    "proj",
    "fc2",
    "2",
)  # take the columns that fit and zeros for those that lack
LOUD: frozenset[Branch] = frozenset({"single", "fused", "expert"})


def shared(name: str) -> tuple[Row, ...]:
    return (
        *fused(f"mlp.{name}.gate_up_proj", GATE_UP),
        *single("config", f"mlp.{name}.down_proj"),
    )


def one_more(name: str) -> tuple[Row, ...]:
    """Shared experts that the class loads as one more expert of its bank."""
    return tuple(
        Row(f"mlp.{name}.{row.name.rpartition('.')[2]}", row.module, row.part, "bank") for row in bank("mlp")
    )


def decoder(
    *rows: Row, prefix: str = "model.", memory: str = "model.", listed: str | None = "as in memory"
) -> Layers:
    asked = memory if listed == "as in memory" else listed
    return Layers(
        f"{prefix}layers.", f"{memory}layers.", None if asked is None else f"{asked}layers.", (*NORMS, *rows)
    )


def blocks(prefix: str, rows: tuple[Row, ...]) -> Layers:
    """Numbered blocks of a tower, whose name is the same everywhere."""
    return Layers(prefix, prefix, prefix, rows)


def top(
    prefix: str = "model.", memory: str = "model.", head: str = "lm_head", asked: bool = True
) -> tuple[Row, ...]:
    return (
        Row(head, head, "", "head" if asked else "float"),
        Row(f"{prefix}embed_tokens", f"{memory}embed_tokens", "", "float"),
        Row(f"{prefix}norm", f"{memory}norm", "", "float"),
    )


def moved(*rows: Row) -> tuple[Row, ...]:
    """Qwen3-Next keeps the parts of its full attention in the layer itself, and asks for them under `self_attn`."""
    return tuple(
        Row(row.name, row.module.removeprefix("self_attn."), row.part, row.holds, row.module)
        if row.module.startswith("self_attn.")
        else row
        for row in rows
    )
