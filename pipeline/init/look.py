"""What headers say of each tensor: its row in the vocabulary, and which modules are quantized already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardmill.pipeline.init.place import is_elsewhere, language_homes
from shardmill.pipeline.init.vocabulary import ROWS, Row
from shardmill.pipeline.plan.profiles.child import FLOATS, is_packed
from shardmill.pipeline.plan.sources import CODES_DTYPE, SCALE_DTYPES, scales_of
from shardmill.pipeline.recipe.globs import GlobSet, expand
from shardmill.pipeline.types import Parent, TensorRef

PACKED = Row(
    "packed weights", (), "already packed by the parent, with its scales: passed through byte for byte"
)
NATIVE = Row("FP8 already", (), "the parent's own FP8, with its scales: passed through byte for byte")
VECTORS = Row("vectors", (), "biases, norms and numbers: no matrix")
STACKS = Row(
    "stacks", (), "more than two axes: convolutions, or experts in one tensor, which no block covers"
)
OTHERS = Row("other dtypes", (), "neither float nor known as quantized: passed through")
TOWER = Row(
    "towers by place",
    (),
    "not among the language model's layers: runtimes build other towers, encoders and drafts unquantized",
)
UNKNOWN = Row(
    "unknown", (), "not known to `shardmill init`: kept as it is; see whether it is a Linear that can convert"
)


def rows_of(parent: Parent) -> dict[str, Row]:
    """Tensor -> the row that speaks for it. Packed and FP8 modules first, then names, then shapes."""
    tensors = parent.tensors
    homes = children(tensors)
    quantized = dict(_quantized_modules(tensors))
    found = {}
    by_name = _by_name(tensors, homes, str(text_config(parent.config).get("model_type")))
    language = language_homes(homes, tensors)
    for name, ref in tensors.items():
        module = _module_of(name, quantized)
        if module is not None:
            found[name] = quantized[module]
        else:
            row = by_name.get(name) or _by_shape(ref)
            matrix = len(ref.shape) > 1 and row.stock and row.reason in (None, UNKNOWN.reason)
            found[name] = TOWER if matrix and is_elsewhere(name, language) else row
    return found


def children(names: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the first parts of what lies in it: `a.b` -> {`q_proj`, `A_log`}."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            found[".".join(parts[:end])].add(parts[end])
    return found


def home_of(weight: str) -> tuple[str, str]:
    """`a.b.q_proj.weight` -> (`a.b`, `q_proj`); `a.b.A_log` -> (`a.b`, `A_log`)."""
    home, _, own = weight.removesuffix(".weight").rpartition(".")
    return home, own


def _by_name(tensors: Iterable[str], homes: Mapping[str, set[str]], model_type: str) -> dict[str, Row]:
    rows = [(glob, row) for row in ROWS for written in row.globs for glob in expand(written)]
    matcher = GlobSet([glob for glob, _ in rows])
    found = {}
    for name in tensors:
        for place in matcher.matches(name):
            row = rows[place][1]
            fits = not row.model_types or model_type in row.model_types
            if fits and (row.beside is None or row.beside in homes[home_of(name)[0]]):
                found[name] = row
                break
    return found


def _by_shape(ref: TensorRef) -> Row:
    if ref.dtype not in FLOATS:
        return OTHERS
    if len(ref.shape) < 2:
        return VECTORS
    return UNKNOWN if len(ref.shape) == 2 else STACKS


def _quantized_modules(tensors: Mapping[str, TensorRef]) -> Iterator[tuple[str, Row]]:
    for name, ref in tensors.items():
        if ref.dtype == CODES_DTYPE and scales_of(ref, tensors):
            scales = scales_of(ref, tensors)
            if scales is not None and scales.dtype in SCALE_DTYPES and len(scales.shape) <= 2:
                yield name.rpartition(".")[0], NATIVE
        elif is_packed(name, ref):
            yield (
                name.rpartition(".")[0] if not name.endswith("_blocks") else name.removesuffix("_blocks"),
                PACKED,
            )


def _module_of(name: str, quantized: Mapping[str, Row]) -> str | None:
    """The quantized module that a tensor belongs to; a bias beside the codes is none of theirs."""
    if name.endswith("bias"):
        return None
    module = name.rpartition(".")[0]
    stacked = name.removesuffix("_blocks").removesuffix("_scales")
    return next((key for key in (module, stacked) if key in quantized), None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
