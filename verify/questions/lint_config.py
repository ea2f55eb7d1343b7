"""The numbers in config.json against the tensors: sizes, heads, layers, experts, embedding and head.

Only what a shape proves is judged: a row is compared where the config states its number and the tensor's name says
what it is. A model whose layers differ in a number (heads, widths) is left in peace if any of them fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.formats.declared import CONFIG
from shardmill.verify.formats.linear import FLAT, FLOATS, Linear
from shardmill.verify.formats.schemes import split_name
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.questions.tied import EMBEDDING, TOWER, tied
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

Shape = tuple[int, ...]
NAME_CHARS_MAX = 200

_NORM = re.compile(r"\blayers\.\d+\.(input|post_attention)_layernorm\.weight$")  # where codes show no width
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings?|shared|embed)\.weight$"
)
_HEAD = re.compile(
    r"(^|\.)(lm_head|head|output|embed_out|output_layer|score|classifier|cls|lm_head\.\w+|decoder)"
    r"\.(\w+\.)*(weight|weight_packed|qweight|linear)$"
)
_PROJECTION = re.compile(
    r"^(?P<front>.*\blayers\.\d+)\.(?P<part>self_attn|attention|mlp|feed_forward)\.(?P<leaf>[qkvo]_proj|gate_proj|up_proj|down_proj)"
    r"\.(weight|weight_packed)$"
)
_ROUTER = re.compile(
    r"\.layers\.\d+\.(mlp|block_sparse_moe|feed_forward|moe)\.(gate|router)(\.classifier)?\.weight$"
)
_GENERATES = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def config_faults(names: Names) -> Iterator[Finding]:
    if not names.checkpoint.config:
        return
    shapes = _trunk_shapes(names)
    yield from _sizes(names, shapes)
    yield from _heads(names, shapes)
    yield from _inside_a_layer(shapes)
    yield from _routers(names)
    yield from _ends(names)


def _trunk_shapes(names: Names) -> dict[tuple[str, str], dict[str, tuple[Shape, Tensor]]]:
    """(layer, part) -> projection -> its decoded shape and its tensor, of the text trunk alone."""
    found: dict[tuple[str, str], dict[str, tuple[Shape, Tensor]]] = {}
    for tensor in names.checkpoint.tensors.values():
        match = _PROJECTION.match(tensor.name) if ".experts." not in tensor.name else None
        if match is None or TOWER.search(match["front"]):
            continue
        linear = names.linears.get(split_name(tensor.name)[0])
        if not _decodes_to_its_shape(names, linear, tensor) or (linear is not None and linear.kind in FLAT):
            continue
        shape = linear.shape if linear is not None and linear.weight is not None else tensor.shape
        if len(shape) == 2:
            found.setdefault((match["front"], match["part"]), {})[match["leaf"]] = (shape, tensor)
    return found


def _number(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if type(value) is int and value > 0:
            return value
    return 0


def _decodes_to_its_shape(names: Names, linear: Linear | None, tensor: Tensor) -> bool:
    """Whether the header alone shows a weight's columns: not of bytes of no known form, nor of packed INT8."""
    if linear is None or linear.weight is None:
        return tensor.dtype in FLOATS
    return linear.kind not in ("other", "bare") and not (
        linear.kind == "int-pack" and names.declared and names.declared.bits == 8
    )


def _wrong(tensor: Tensor, key: str, said: int, got: str) -> Finding:
    return Finding("config-shape", tensor.file, tensor.name, f"{key} {said:,}, as {CONFIG} says", got)


def _sizes(
    names: Names, shapes: Mapping[tuple[str, str], Mapping[str, tuple[Shape, Tensor]]]
) -> Iterator[Finding]:
    config = names.text_config
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    vocabulary = _number(config, "vocab_size")
    for tensor in names.checkpoint.tensors.values():
        if EMBEDDING.search(tensor.name) and len(tensor.shape) == 2 and not TOWER.search(tensor.name):
            if (
                vocabulary
                and tensor.shape[0] < vocabulary
                and "position" not in tensor.name
                and "type" not in tensor.name
            ):
                yield _wrong(tensor, "vocab_size", vocabulary, f"{tensor.shape[0]:,} rows")
            break
    entries = [
        row
        for (_, part), rows in shapes.items()
        for leaf, row in rows.items()
        if leaf in ("q_proj", "k_proj", "gate_proj")
    ]
    if hidden and entries and all(shape[1] != hidden for shape, _ in entries):
        yield _wrong(entries[0][1], "hidden_size", hidden, f"{entries[0][0][1]:,} columns")
    norms = [t for name, t in names.checkpoint.tensors.items() if _NORM.search(name) and len(t.shape) == 1]
    if hidden and not entries and norms and all(norm.shape[0] != hidden for norm in norms):
        yield _wrong(norms[0], "hidden_size", hidden, f"{norms[0].shape[0]:,} numbers")
    widths = [
        row
        for (_, part), rows in shapes.items()
        if part in ("mlp", "feed_forward")
        for leaf, row in rows.items()
        if leaf == "gate_proj"
    ]
    said = {
        _number(config, key)
        for key in ("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "ffn_hidden_size")
    }
    width = _number(config, "intermediate_size")
    if width and widths and all(shape[0] not in said for shape, _ in widths):
        yield _wrong(widths[0][1], "intermediate_size", width, f"{widths[0][0][0]:,} rows")


def _heads(
    names: Names, shapes: Mapping[tuple[str, str], Mapping[str, tuple[Shape, Tensor]]]
) -> Iterator[Finding]:
    """Rows of q and k are heads times head_dim; a gate may double q's."""
    config = names.text_config
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    if not heads or "kv_lora_rank" in config or "q_lora_rank" in config:
        return
    dims = {
        _number(config, key) for key in ("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim")
    } - {0}
    dims = dims or {hidden // heads}
    if dims == {0}:
        return
    cached = config.get("num_key_value_heads", heads)
    if type(cached) is not int:
        return
    groups = {cached} | {
        _number(config, key) for key in ("num_global_key_value_heads", "swa_num_key_value_heads")
    } - {0}
    for leaf, key, counts in (
        ("q_proj", "num_attention_heads", {heads, 2 * heads}),
        ("k_proj", "num_key_value_heads", groups),
    ):
        rows = [
            row[leaf]
            for (_, part), row in shapes.items()
            if part == "self_attn" and leaf in row and "k_proj" in row
        ]
        wanted = {count * dim for count in counts for dim in dims}
        if rows and all(shape[0] not in wanted for shape, _ in rows):
            shape, tensor = rows[0]
            dim = max(dims)
            yield _wrong(
                tensor,
                key,
                max(counts) if leaf == "k_proj" else heads,
                f"{shape[0]:,} rows, {shape[0] / dim:g} heads of {dim}",
            )


def _inside_a_layer(
    shapes: Mapping[tuple[str, str], Mapping[str, tuple[Shape, Tensor]]],
) -> Iterator[Finding]:
    """What gate and up give, down takes; k and v have one width, and o takes as many as q gives (or a part of it)."""
    for rows in shapes.values():
        if {"gate_proj", "up_proj", "down_proj"} <= rows.keys():
            gate, up, down = rows["gate_proj"][0], rows["up_proj"][0], rows["down_proj"][0]
            if not gate[0] == up[0] == down[1]:
                got = f"gate {list(gate)}, up {list(up)}, down {list(down)}"
                tensor = rows["down_proj"][1]
                yield Finding(
                    "sibling-shape", tensor.file, tensor.name, "as many columns as gate and up have rows", got
                )
        inputs = {
            leaf: rows[leaf][0][1]
            for leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            if leaf in rows
        }
        if len(set(inputs.values())) > 1:
            tensor = rows[next(iter(inputs))][1]
            got = ", ".join(f"{leaf} {columns}" for leaf, columns in inputs.items())
            yield Finding("sibling-shape", tensor.file, tensor.name, "as many columns as its siblings", got)


def _routers(names: Names) -> Iterator[Finding]:
    experts = names.count("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    extra = names.count("zero_expert_num")
    if not experts:
        return
    for tensor in names.checkpoint.tensors.values():
        if not tensor.name.endswith(("gate.weight", "router.weight", "classifier.weight")):
            continue
        rows = tensor.shape[0] if len(tensor.shape) == 2 and _ROUTER.search(tensor.name) else experts
        if rows not in (experts, experts + extra):
            yield _wrong(tensor, "experts", experts, f"{rows:,} rows of the router")


def _ends(names: Names) -> Iterator[Finding]:
    """A model that generates has an embedding, and a head of its own unless it is tied."""
    config = names.checkpoint.config
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(isinstance(c, str) and _GENERATES.search(c) for c in classes):
        return
    if not names.whole or not any(
        ".layers." in f".{name}" or ".h." in f".{name}" for name in names.checkpoint.tensors
    ):
        return
    ends = [name for name in names.checkpoint.tensors if "weight" in name and len(name) <= NAME_CHARS_MAX]
    if not any(EMBEDDING.search(name) or "embed" in name for name in ends):
        yield Finding("embedding-missing", "", "", "an embedding, such as model.embed_tokens.weight", "none")
    has_head = any(_HEAD.search(name) and not re.search(r"\.(layers|h|blocks)\.\d", name) for name in ends)
    if not has_head and tied(config) is False:
        yield Finding("head-missing", "", "lm_head.weight", "a head, as tie_word_embeddings is false", "none")
