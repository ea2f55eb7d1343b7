"""Which module of SGLang 0.5.23 each tensor of a checkpoint belongs to, by the tables of `formats.sglang_families`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.formats.excludes import NAME_CHARS_MAX
from shardmill.verify.formats.sglang_modules import Branch, Family, Holds, Layers, Row, one_more
from shardmill.verify.questions.sglang_config import Method
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor

# Scales of the KV cache, which have a default, and buffers that SGLang computes itself.
PASSED_OVER = re.compile(r"\.(k_scale|v_scale|q_scale|[kv]_proj\.output_scale|rotary_emb\.inv_freq)$")
_NUMBERED = re.compile(r"^(\d{1,6})\.(.*)$")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_STACKED = re.compile(r"^(.*\.experts\.(?:gate_up|down)_proj)_(\w+)$")
Tables = list[tuple[dict[str, Row], Layers]]


@dataclass(slots=True)
class Module:
    """One module of SGLang and the tensors that it is given: part -> leaf -> tensors, of a bank one of each expert."""

    name: str
    listed: str
    holds: Holds
    parts: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def branch(self) -> Branch:
        if self.holds in ("bank", "stack"):
            return "expert"
        whole = not {"", "q_a", "kv_a"}.isdisjoint(self.parts)  # the MLA's are joined before they are loaded
        return "single" if whole else "fused"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for part, leaves in self.parts.items():
            yield from ((part, tensor) for tensor in leaves.get("weight", ()))

    def file(self) -> str:
        return next(iter(next(iter(self.parts.values())).values()))[0].file

    def groups(self) -> dict[str, list[str]]:
        """Prefix of its parameters -> the parts that fill one of them."""
        if self.holds not in ("bank", "stack"):
            return {"": list(self.parts)}
        found: dict[str, list[str]] = {}
        for part in self.parts:
            found.setdefault(f"{part.partition(' ')[0]}_", []).append(part)
        return found


def modules_of(checkpoint: Checkpoint, family: Family, method: Method) -> tuple[list[Module], list[Tensor]]:
    """Every module that the checkpoint has tensors for, and the tensors that none takes."""
    more = one_more("shared_experts") if _merges(checkpoint.config, method) else ()
    tables = [({row.name: row for row in (*layers.rows, *more)}, layers) for layers in family.layers]
    tops = {row.name: row for row in family.top}
    modules: dict[str, Module] = {}
    homeless: list[Tensor] = []
    drawn = _trunk_layers(checkpoint.config) if family.draft else 1 << 30
    for tensor in checkpoint.tensors.values():
        if len(tensor.name) > NAME_CHARS_MAX or PASSED_OVER.search(tensor.name):
            continue
        found = _place(tensor.name, tables, tops, drawn)
        if found is None:
            homeless.append(tensor)
            continue
        row, name, listed, leaf = found
        if name:
            module = modules.setdefault(name, Module(name, listed, row.holds))
            module.parts.setdefault(row.part, {}).setdefault(leaf, []).append(tensor)
    return list(modules.values()), homeless


def _merges(config: Mapping[str, Any], method: Method) -> bool:
    """Whether DeepSeek's class loads the shared expert as one more of its bank: of V3 and GLM-5 in their true sizes."""
    wide = config.get("n_routed_experts") == 256 and config.get("n_shared_experts") == 1
    return wide and config.get("model_type") in ("deepseek_v3", "glm_moe_dsa") and not method.apart


def _place(name: str, tables: Tables, tops: dict[str, Row], drawn: int) -> tuple[Row, str, str, str] | None:
    """(row, module, the name that its config is asked with, leaf) of a tensor; of the draft's the module is ""."""
    for own, leaf in _readings(name):
        if own in tops:
            row = tops[own]
            return row, row.module, row.listed or row.module, leaf
        for rows, layers in tables:
            match = (
                _NUMBERED.match(own.removeprefix(layers.prefix)) if own.startswith(layers.prefix) else None
            )
            if match is None:
                continue
            number, inner = match.groups()
            if int(number) >= drawn:
                return layers.rows[0], "", "", leaf
            inside = rows.get(_EXPERT.sub("#", inner))
            if inside is None:
                continue
            row = inside
            asked = row.listed or row.module
            listed = asked if layers.listed is None else f"{layers.listed}{number}.{asked}"
            return row, f"{layers.memory}{number}.{row.module}", listed, leaf
    return None


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """(module, leaf) that a tensor's name may mean: a raw parameter, its last word a leaf, a stacked bank's leaf."""
    own, _, leaf = name.rpartition(".")
    yield name, "weight"
    yield own, leaf
    stacked = _STACKED.match(name)
    if stacked:
        yield stacked[1], stacked[2]


def _trunk_layers(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    return value if type(value) is int else 1 << 30
