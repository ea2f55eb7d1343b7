"""Scales of an FP8 KV cache: one number a layer for keys and one for values, calibrated and stored beside the weights.

| name | published by | declared as |
|---|---|---|
| `self_attn.k_scale`, `v_scale` | llm-compressor, AutoFP8 | `kv_cache_scheme`: an object, or "static" |
| `self_attn.k_proj.k_scale`, `v_proj.v_scale` | ModelOpt | `kv_cache_quant_algo`, `kv_cache_scheme` |
| `self_attn.k_proj.output_scale` | AutoFP8's first releases | `kv_cache_scheme` |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

_LEAVES = ("k_scale", "v_scale", "q_scale", "prob_output_scale", "output_scale")
_KEYS_OR_VALUES = re.compile(r"\b([kv])(_proj\.output)?_scale$")
CONFIG = "config.json"


def cache_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scales of keys, values, queries and probabilities, by name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith("_scale") and name.rpartition(".")[2] in _LEAVES and tensor.dtype in FLOATS
    }


def cache_faults(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """A layer without the scale that its siblings have; a declaration without scales, or scales without one."""
    scales = {name: tensor for name, tensor in cache_scales(tensors).items() if _KEYS_OR_VALUES.search(name)}
    declared = _static_scheme(quantization)
    if not scales:
        if declared and quantization.get("quant_method") == "compressed-tensors":
            expected = "k_scale and v_scale of each attention layer"
            yield Finding(
                "kv-scheme-unscaled", CONFIG, "", expected, "a static kv_cache_scheme, no such tensor"
            )
        return
    if not declared and not quantization.get("kv_cache_scheme"):
        first = next(iter(scales.values()))
        got = f"{len(scales):,} such tensors, the first {first.name}"
        yield Finding("kv-undeclared", first.file, first.name, "kv_cache_scheme or kv_cache_quant_algo", got)
    yield from _missing(scales, tensors)


def _static_scheme(quantization: Mapping[str, Any]) -> bool:
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return scheme.get("dynamic") is not True
    return scheme == "static" or bool(quantization.get("kv_cache_quant_algo"))


def _missing(scales: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Attention layers have the scales that their siblings have; draft layers behind the last one may have none."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in scales.items():
        parent, leaf = _attention(name)
        found.setdefault(parent, {})[leaf] = tensor
    wanted: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for parent, leaves in found.items():
        wanted.setdefault(kind_of(parent), set()).update(leaves)
        last[kind_of(parent)] = max(last.get(kind_of(parent), 0), _layer(parent))
    for name, tensor in tensors.items():
        if name.endswith((".k_proj.weight", ".k_proj.weight_packed", ".k_proj.qweight", ".qkv_proj.weight")):
            parent = name.rpartition(".")[0].rpartition(".")[0]
            if kind_of(parent) in wanted and _layer(parent) <= last[kind_of(parent)]:
                found.setdefault(parent, {})
                found[parent].setdefault("", tensor)
    for parent, leaves in found.items():
        for leaf in sorted(wanted[kind_of(parent)] - leaves.keys()):
            file = next(iter(leaves.values())).file
            expected = "the scale, as its siblings in other layers have"
            yield Finding("kv-scale-missing", file, f"{parent}.{leaf}", expected, "none")


def _attention(name: str) -> tuple[str, str]:
    """(the attention module, the scale's name within it)"""
    parent, _, leaf = name.rpartition(".")
    if parent.endswith(("k_proj", "v_proj", "qkv_proj", ".attn")):
        parent, _, module = parent.rpartition(".")
        leaf = f"{module}.{leaf}"
    return parent, leaf


def _layer(parent: str) -> int:
    numbers = re.findall(r"(?<=\.)\d{1,9}(?=\.|$)", parent)
    return int(numbers[0]) if numbers else 0
