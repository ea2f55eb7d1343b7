"""Bytes of weights on one rank, from tensor headers, by vLLM's tensor-parallel rules.

A weight is cut by rows (column-parallel), by columns (row-parallel) or held whole on every rank; its scales follow
it. Some small tensors are F32 at run time though stored as BF16. Sources: vLLM 0.33.0, `models/glm5next/common/*.py`
and `layers/vocab_parallel_embedding.py` (vocabulary padded to a multiple of 64).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from shardmill.verify.fit.planner import ceil_div

Shape = tuple[int, ...]
Headers = Mapping[str, tuple[str, Shape]]

DTYPE_BITS: Mapping[str, int] = {
    "F64": 64,
    "F32": 32,
    "BF16": 16,
    "F16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "BOOL": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
    "U64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
VOCAB_PAD = 64
LAYER = re.compile(r"\.layers\.(\d+)\.")
NUMBER = re.compile(r"\.\d+(?=\.)")
SCALE_SUFFIX = re.compile(r"_scale_inv$|_scale_2$|_scale$|(?<=\.)input_scale$")

# How a tensor is cut, by its name; the first row that matches decides. What no row names is whole on every rank:
# norms, routers, hyper-connections, the indexer, and the projections that vLLM replicates (q_a, kv_a, f_a, g_a, eh).
CUTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vocab", re.compile(r"(^|\.)(lm_head|embed_tokens)\.weight")),
    (
        "columns",
        re.compile(r"\.visual\.blocks\.\d+\.attn\.proj\.weight|\.(o_proj|out_proj|down_proj)\.weight"),
    ),
    ("rows", re.compile(r"\.visual\.(blocks\.\d+\.attn\.qkv|merger\.proj)\.")),
    ("rows", re.compile(r"\.(q_proj|b_proj|f_b_proj|g_b_proj|q_b_proj|kv_b_proj|gate_proj|up_proj)\.")),
    ("rows", re.compile(r"\.(in_proj_\w+|qkv_proj|gate_up_proj)\.")),
    ("heads", re.compile(r"\.(k_proj|v_proj)\.")),
    ("rows", re.compile(r"\.(([qkv]_)?conv1d\.weight|A_log|dt_bias)$")),
)
WIDENED = re.compile(
    r"\.hc_(attn|ffn)_fn$|\.[qkv]_conv1d\.weight$|\.indexer\.k_norm\.|\.index_kpool_compress_ape$"
)

FAMILIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vision", re.compile(r"(^|\.)visual\.")),
    ("routed experts", re.compile(r"\.mlp\.experts\.")),
    ("lm_head", re.compile(r"(^|\.)lm_head\.")),
    ("embeddings", re.compile(r"\.embed_tokens\.")),
    ("shared experts and dense MLP", re.compile(r"\.mlp\.")),
    ("attention", re.compile(r"\.self_attn\.")),
    ("norms and hyper-connections", re.compile(r"norm|\.hc_")),
)


class WeightsError(ValueError):
    """A tensor cannot be cut as the rule says. The message names it, its size and the ranks."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes on one rank, in all and by family; the draft layer is a family of its own."""

    families: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.families.values())


def weights_per_rank(
    headers: Headers, ranks: int, *, layers: int, draft: bool, vision: bool, kv_heads: int = 0
) -> WeightBytes:
    """Sum over the tensors that a rank loads. `layers` is the trunk's depth: what lies above it is the draft.

    A draft or a vision tower that the preset does not serve is not loaded. Raises WeightsError for a cut that leaves a
    remainder and for an unknown dtype.
    """
    kinds = Counter(_kinds(headers, layers, draft, vision))
    families: dict[str, int] = {}
    for (template, dtype, shape, is_draft), count in kinds.items():
        family = "draft layer" if is_draft else _family(template)
        size = rank_bytes(template, dtype, shape, ranks, kv_heads)
        families[family] = families.get(family, 0) + count * size
    return WeightBytes(dict(sorted(families.items(), key=lambda item: -item[1])))


def rank_bytes(name: str, dtype: str, shape: Shape, ranks: int, kv_heads: int = 0) -> int:
    """Bytes of one tensor on one rank, at the dtype that it has at run time."""
    if dtype not in DTYPE_BITS:
        raise WeightsError(f"{name}: dtype {dtype!r} is unknown; expected one of {', '.join(DTYPE_BITS)}")
    bits = 32 if dtype == "BF16" and WIDENED.search(name) else DTYPE_BITS[dtype]
    return ceil_div(prod(_cut(name, shape, ranks, kv_heads)) * bits, 8)


def cut_of(name: str) -> str:
    """The rule for a tensor; a scale's is that of its weight."""
    weight = SCALE_SUFFIX.sub("", name) if not name.endswith(".input_scale") else name
    return next((cut for cut, pattern in CUTS if pattern.search(weight)), "whole")


def _cut(name: str, shape: Shape, ranks: int, kv_heads: int) -> Shape:
    cut = cut_of(name)
    if not shape or cut == "whole" or ranks == 1:
        return shape
    if cut == "columns":
        return shape if len(shape) == 1 else (shape[0], _divide(name, shape[1], ranks), *shape[2:])
    if cut == "vocab" and not SCALE_SUFFIX.search(name):
        return (ceil_div(shape[0], VOCAB_PAD) * VOCAB_PAD // ranks, *shape[1:])
    shares = min(ranks, kv_heads) if cut == "heads" and kv_heads else ranks
    return (_divide(name, shape[0], shares), *shape[1:])


def _divide(name: str, size: int, ranks: int) -> int:
    if size == 1:  # one scale for all rows or columns goes to every rank
        return 1
    if size % ranks:
        raise WeightsError(f"{name}: {size} does not divide over {ranks} ranks")
    return size // ranks


def _kinds(
    headers: Headers, layers: int, draft: bool, vision: bool
) -> Iterator[tuple[str, str, Shape, bool]]:
    """The tensors that are loaded, layer and expert numbers taken out: 150,000 names are some hundred kinds."""
    for name, (dtype, shape) in headers.items():
        layer = LAYER.search(name)
        is_draft = layer is not None and int(layer[1]) >= layers
        if (draft or not is_draft) and (vision or "visual." not in name):
            yield NUMBER.sub(".0", name), dtype, shape, is_draft


def _family(name: str) -> str:
    return next((family for family, pattern in FAMILIES if pattern.search(name)), "other")
