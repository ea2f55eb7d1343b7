"""The parts of a config that describe a vision or audio tower, against the one stack of blocks that is that tower.

Judged are the number of blocks, the width of the norms, of the first MLP matrix and of a patch, where the config states
them and one stack alone can be meant; towers of several stacks are left in peace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.formats.declared import CONFIG
from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.questions.lint_siblings import judges_gaps
from shardmill.verify.questions.stacks import Stack
from shardmill.verify.questions.tied import SPEAKERS
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

TOWERS = {
    "vision_config": re.compile(r"(^|\.)(vision|visual|vit|image|vpm|siglip)"),
    "audio_config": re.compile(r"(^|\.)(audio|speech|apm)"),
}
DEPTHS = ("depth", "num_hidden_layers", "encoder_layers", "num_layers", "n_layers", "layers")
WIDTHS = (
    "hidden_size",
    "embed_dim",
    "d_model",
    "width",
    "dim",
    "n_embd",
    "encoder_hidden_size",
    "out_hidden_size",
)
MLPS = ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim")
STACKS = ("blocks", "layers", "layer", "h", "resblocks")  # what a stack of a tower's blocks is called
BLOCKS_MIN, NAMED_MAX = 2, 20
_NORM = re.compile(
    r"^(norm[12]|ln_[12]|layer_norm[12]|layernorm_before|input_layernorm|self_attn_layer_norm|attention_norm)\.weight$"
)
_FIRST = re.compile(r"(^|\.)(fc1|linear_fc1|gate_proj|up_proj|c_fc)\.weight$")
_PATCH = re.compile(r"(patch_embed\.proj|patch_embedding|patch_conv)\.weight$")


def tower_faults(names: Names) -> Iterator[Finding]:
    if not names.whole:
        return
    for key, pattern in TOWERS.items():
        for config in _parts(names.checkpoint.config, key):
            stacks = [
                stack
                for stack in names.stacks.by_name.values()
                if pattern.search(stack.name)
                and stack.of_modules
                and len(stack.blocks) >= BLOCKS_MIN
                and stack.name.rpartition(".")[2] in STACKS
            ]
            if len(stacks) == 1:
                if not names.checkpoint.config.get("drop_vision_last_layer"):
                    yield from _depth(stacks[0], config, key)
                yield from _widths(stacks[0], config, key)
            patches = (t for t in names.checkpoint.tensors.values() if _PATCH.search(t.name))
            yield from _patch((t for t in patches if pattern.search(t.name)), config, key)


def _parts(config: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    for place in (config, *(config.get(part) for part in SPEAKERS)):
        if isinstance(place, dict) and isinstance(place.get(key), dict):
            yield place[key]


def _numbers(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, int]:
    return {key: config[key] for key in keys if type(config.get(key)) is int and config[key] > 0}


def _depth(stack: Stack, config: Mapping[str, Any], part: str) -> Iterator[Finding]:
    """The tower has as many blocks as its part of the config says, without a gap."""
    said = _numbers(config, DEPTHS)
    have = max(stack.blocks) + 1
    if said and have not in said.values():
        key, number = next(iter(said.items()))
        expected = f"{part}.{key} {number:,} blocks, as {CONFIG} says"
        slug = "layer-beyond" if have > max(said.values()) else "layer-missing"
        yield Finding(slug, "", stack.name, expected, f"{have:,}")
    elif said and not judges_gaps(stack):
        for number in [number for number in range(have) if number not in stack.blocks][:NAMED_MAX]:
            yield Finding(
                "layer-missing",
                "",
                f"{stack.name}.{number}",
                f"blocks 0 to {have - 1}",
                "none of its tensors",
            )


def _widths(stack: Stack, config: Mapping[str, Any], part: str) -> Iterator[Finding]:
    rows = [tensor for kinds in stack.blocks.values() for kind, tensor in kinds.items() if _NORM.search(kind)]
    every = {value for value in config.values() if type(value) is int}
    yield from _each(rows, _numbers(config, WIDTHS), part, every)
    first = [
        tensor
        for kinds in stack.blocks.values()
        for kind, tensor in kinds.items()
        if _FIRST.search(kind) and tensor.dtype in FLOATS and len(tensor.shape) == 2
    ]
    said = _numbers(config, MLPS)
    yield from _each(first, said, part, every | {2 * number for number in said.values()})


def _each(tensors: list[Tensor], said: Mapping[str, int], part: str, fitting: set[int]) -> Iterator[Finding]:
    """One of the numbers is what all these tensors have as rows; any other number of the part is as good."""
    if said and tensors and all(t.shape and t.shape[0] not in fitting for t in tensors):
        key, number = next(iter(said.items()))
        expected, got = f"{part}.{key} {number:,}, as {CONFIG} says", f"{tensors[0].shape[0]:,}"
        yield Finding("config-shape", tensors[0].file, tensors[0].name, expected, got)


def _patch(tensors: Iterator[Tensor], config: Mapping[str, Any], part: str) -> Iterator[Finding]:
    side = config.get("patch_size")
    for tensor in tensors:
        if type(side) is int and len(tensor.shape) in (4, 5) and tensor.shape[-1] != side:
            expected = f"{part}.patch_size {side:,}, as {CONFIG} says"
            yield Finding("config-shape", tensor.file, tensor.name, expected, f"{tensor.shape[-1]:,}")
