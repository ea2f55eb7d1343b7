"""Experts against each other and against the config: one shape for a part in all experts of a layer, and its width."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from shardmill.verify.formats.declared import CONFIG
from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

Shape = tuple[int, ...]

_ROWS = ("gate_proj", "up_proj", "w1", "w3")  # parts whose rows are the experts' width
_TOWER = re.compile(r"(^|\.)(vision|visual|audio|talker|mtp|draft)")
NAMED_MAX = 20


def expert_faults(names: Names) -> Iterator[Finding]:
    config = names.text_config
    experts = names.count("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    taken = names.count("num_experts_per_tok", "moe_top_k", "moe_k")
    if 0 < experts < taken:
        said = f"at most {experts:,}, the experts of a layer"
        yield Finding("config-shape", CONFIG, "num_experts_per_tok", said, f"{taken:,}")
    shapes = _shapes(names)
    yield from _odd_ones(shapes)
    yield from _width(shapes, config)


def _shapes(names: Names) -> dict[tuple[str, str], list[tuple[Shape, Tensor]]]:
    """(bank, part) -> the shape of each expert's weight, decoded."""
    found: dict[tuple[str, str], list[tuple[Shape, Tensor]]] = {}
    for name, tensor in names.checkpoint.tensors.items():
        if not name.endswith((".weight", ".weight_packed")) or ".experts." not in name:
            continue
        bank, _, rest = name.partition(".experts.")
        number, _, own = rest.partition(".")
        part, _, leaf = own.partition(".")
        if "." in leaf or not number.isdigit() or "layers." not in bank:
            continue
        linear = names.linears.get(name.removesuffix(f".{leaf}"))
        known = linear is not None and linear.weight is not None and linear.kind not in ("other", "bare")
        if known and linear is not None and linear.kind != "int-pack":
            shape = linear.shape
        elif linear is None and tensor.dtype in FLOATS:
            shape = tensor.shape
        else:
            continue
        found.setdefault((f"{bank}.experts", part), []).append((shape, tensor))
    return found


def _odd_ones(shapes: dict[tuple[str, str], list[tuple[Shape, Tensor]]]) -> Iterator[Finding]:
    left = NAMED_MAX
    for (bank, part), rows in shapes.items():
        counted = Counter(shape for shape, _ in rows)
        if len(counted) < 2:
            continue
        usual, count = counted.most_common(1)[0]
        for shape, tensor in rows:
            if shape != usual and 2 * count > len(rows) and left:
                left -= 1
                expected = f"{list(usual)}, as {count:,} experts of {bank} have for {part}"
                yield Finding("sibling-shape", tensor.file, tensor.name, expected, str(list(shape)))


def _width(shapes: dict[tuple[str, str], list[tuple[Shape, Tensor]]], config: Any) -> Iterator[Finding]:
    """The rows of gate and up in every routed expert are the width that the config states."""
    said = config.get("moe_intermediate_size", config.get("expert_ffn_hidden_size"))
    if type(said) is not int or said <= 0:
        return
    rows = [
        (shape, tensor)
        for (bank, part), found in shapes.items()
        if part in _ROWS and not _TOWER.search(bank) and "shared" not in bank
        for shape, tensor in found[:1]
    ]
    if rows and all(len(shape) == 2 and shape[0] != said for shape, _ in rows):
        shape, tensor = rows[0]
        expected = f"moe_intermediate_size {said:,}, as {CONFIG} says"
        yield Finding("config-shape", tensor.file, tensor.name, expected, f"{shape[0]:,} rows")
