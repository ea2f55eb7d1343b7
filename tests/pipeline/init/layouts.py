"""True-size layouts of published models, from their configs: every tensor's name, dtype and shape.

A layout is proven by its index file's `total_size`, where that is public: see test_recipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.header import lay_out
from shardmill.pipeline.types import Parent, Shape

Tensor = tuple[str, str, Shape]


@dataclass(frozen=True)
class Model:
    """A published model's dimensions. What it does not have is 0."""

    name: str
    config: dict[str, Any]
    hidden: int
    layers: int
    vocabulary: int
    heads: int
    head: int = 128
    kv_heads: int = 0
    width: int = 0  # of the dense MLP
    expert_width: int = 0
    experts: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    nope: int = 0
    kda_layers: frozenset[int] = field(default=frozenset())
    qk_norm: bool = False
    qkv_bias: bool = False
    drafts: bool = False
    kimi_names: bool = False
    correction: bool = False
    native_fp8: bool = False
    tied: bool = False


def tensors(m: Model) -> Iterator[Tensor]:
    """Every tensor of the model as it is published."""
    for name, dtype, shape in _floats(m):
        converts = (
            m.native_fp8 and name.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in name
        )
        if not converts:
            yield name, dtype, shape
            continue
        yield name, "F8_E4M3", shape
        yield f"{name}_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def _floats(m: Model) -> Iterator[Tensor]:
    top = {"model.embed_tokens.weight": (m.vocabulary, m.hidden), "model.norm.weight": (m.hidden,)}
    if not m.tied:
        top["lm_head.weight"] = (m.vocabulary, m.hidden)
    yield from _bf16("", top)
    for layer in range(m.layers + m.drafts):
        yield from _layer(m, layer)


def _bf16(prefix: str, shapes: dict[str, Shape]) -> Iterator[Tensor]:
    return ((prefix + name, "BF16", shape) for name, shape in shapes.items())


def _layer(m: Model, layer: int) -> Iterator[Tensor]:
    at = f"model.layers.{layer}."
    yield from _bf16(
        at, {f"{norm}.weight": (m.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    )
    if layer in m.kda_layers:
        yield from _kda(m, at + "self_attn.")
    else:
        yield from _bf16(at + "self_attn.", _mla(m) if m.kv_rank else _gqa(m))
    if m.experts and layer >= m.dense_layers:
        yield from _moe(m, at)
    else:
        yield from _bf16(at + "mlp.", _gated(m.hidden, m.width))
    if layer == m.layers:
        yield from _bf16(
            at,
            {
                "eh_proj.weight": (m.hidden, 2 * m.hidden),
                "enorm.weight": (m.hidden,),
                "hnorm.weight": (m.hidden,),
                "shared_head.norm.weight": (m.hidden,),
                "shared_head.head.weight": (m.vocabulary, m.hidden),
                "embed_tokens.weight": (m.vocabulary, m.hidden),
            },
        )


def _gqa(m: Model) -> dict[str, Shape]:
    q, kv = m.heads * m.head, m.kv_heads * m.head
    shapes: dict[str, Shape] = {
        "q_proj.weight": (q, m.hidden),
        "k_proj.weight": (kv, m.hidden),
        "v_proj.weight": (kv, m.hidden),
        "o_proj.weight": (m.hidden, q),
    }
    if m.qk_norm:
        shapes |= {"q_norm.weight": (m.head,), "k_norm.weight": (m.head,)}
    if m.qkv_bias:
        shapes |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
    return shapes


def _mla(m: Model) -> dict[str, Shape]:
    qk = m.nope + m.rope
    shapes: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (m.kv_rank + m.rope, m.hidden),
        "kv_a_layernorm.weight": (m.kv_rank,),
        "kv_b_proj.weight": (m.heads * (m.nope + m.head), m.kv_rank),
        "o_proj.weight": (m.hidden, m.heads * m.head),
    }
    if not m.q_rank:
        return shapes | {"q_proj.weight": (m.heads * qk, m.hidden)}
    return shapes | {
        "q_a_proj.weight": (m.q_rank, m.hidden),
        "q_a_layernorm.weight": (m.q_rank,),
        "q_b_proj.weight": (m.heads * qk, m.q_rank),
    }


def _kda(m: Model, at: str) -> Iterator[Tensor]:
    wide = m.heads * m.head
    yield from _bf16(
        at,
        {
            **{f"{x}_proj.weight": (wide, m.hidden) for x in "qkv"},
            **{f"{x}_conv1d.weight": (wide, 1, 4) for x in "qkv"},
            **{f"{x}_a_proj.weight": (m.head, m.hidden) for x in "fg"},
            **{f"{x}_b_proj.weight": (wide, m.head) for x in "fg"},
            "b_proj.weight": (m.heads, m.hidden),
            "o_norm.weight": (m.head,),
            "o_proj.weight": (m.hidden, wide),
        },
    )
    yield at + "A_log", "F32", (1, 1, m.heads, 1)
    yield at + "dt_bias", "F32", (wide,)


def _moe(m: Model, at: str) -> Iterator[Tensor]:
    home = at + ("block_sparse_moe." if m.kimi_names else "mlp.")
    yield from _bf16(home, {"gate.weight": (m.experts, m.hidden)})
    if m.correction:
        yield home + "gate.e_score_correction_bias", "F32", (m.experts,)
    if m.shared_width:
        yield from _bf16(home + "shared_experts.", _gated(m.hidden, m.shared_width))
    for expert in range(m.experts):
        shapes = _gated(m.hidden, m.expert_width)
        if m.kimi_names:
            shapes = dict(zip(("w1.weight", "w3.weight", "w2.weight"), shapes.values(), strict=True))
        yield from _bf16(f"{home}experts.{expert}.", shapes)


def _gated(hidden: int, width: int) -> dict[str, Shape]:
    return {
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }


def parent_of(name: str, config: dict[str, Any], layout: Iterable[Tensor]) -> Parent:
    """A Parent of these tensors in one file that nobody has."""
    header = lay_out(layout, "model.safetensors", {"format": "pt"})
    stats = {"model.safetensors": (header.file_bytes, 0, 0, 0)}
    return Parent(Path("/nowhere") / name, (header,), stats, config, (), {}, single=True)


def model_parent(m: Model) -> Parent:
    return parent_of(m.name, m.config, tensors(m))


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_FULL_ATTENTION = frozenset({3, 7, 11, 15, 19, 23, 26})

MODELS = {
    m.name: m
    for m in (
        Model(
            "llama-3.1-8b",
            {
                "model_type": "llama",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            hidden=4096,
            layers=32,
            vocabulary=128_256,
            heads=32,
            kv_heads=8,
            width=14_336,
        ),
        Model(
            "qwen3-8b",
            {
                "model_type": "qwen3",
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            hidden=4096,
            layers=36,
            vocabulary=151_936,
            heads=32,
            kv_heads=8,
            width=12_288,
            qk_norm=True,
        ),
        Model(
            "qwen3-30b-a3b",
            {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
            },
            hidden=2048,
            layers=48,
            vocabulary=151_936,
            heads=32,
            kv_heads=4,
            expert_width=768,
            experts=128,
            qk_norm=True,
        ),
        Model(
            "deepseek-v3",
            {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "quantization_config": _FP8,
            },
            hidden=7168,
            layers=61,
            vocabulary=129_280,
            heads=128,
            width=18_432,
            expert_width=2048,
            experts=256,
            shared_width=2048,
            dense_layers=3,
            q_rank=1536,
            kv_rank=512,
            rope=64,
            nope=128,
            drafts=True,
            correction=True,
            native_fp8=True,
        ),
        Model(
            "kimi-linear-48b-a3b",
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 27,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
            },
            hidden=2304,
            layers=27,
            vocabulary=163_840,
            heads=32,
            width=9216,
            expert_width=1024,
            experts=256,
            shared_width=1024,
            dense_layers=1,
            kv_rank=512,
            rope=64,
            nope=128,
            kda_layers=frozenset(range(27)) - _FULL_ATTENTION,
            kimi_names=True,
            correction=True,
        ),
        Model(
            "glm-4.5-air",
            {
                "model_type": "glm4_moe",
                "num_hidden_layers": 46,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
            },
            hidden=4096,
            layers=46,
            vocabulary=151_552,
            heads=96,
            kv_heads=8,
            width=10_944,
            expert_width=1408,
            experts=128,
            shared_width=1408,
            dense_layers=1,
            qkv_bias=True,
            drafts=True,
            correction=True,
        ),
    )
}
