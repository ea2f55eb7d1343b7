"""The profile `modelopt-mixed`: ModelOpt's MIXED_PRECISION, one entry a quantized Linear, so that anything mixes.

The schema is vLLM 0.33.0's `ModelOptMixedPrecisionConfig`. `FP8_BLOCK` with an integer `group_size` (blocks are
square) is the published child's name for an entry that its patched runtime dispatches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any

from shardmill.pipeline.actions import Reblock
from shardmill.pipeline.plan.profiles.child import (
    Child,
    blocks,
    entries,
    fused_names,
    is_packed,
    module_of,
    passed_on_codes,
    sample,
    unquantized,
    vocabulary_problems,
)
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import Shape

# What ModelOpt's own files say: its exporter the first; its converters the second, on which SGLang gates a mix.
METHODS = ("modelopt", "modelopt_mixed")
HF_QUANT_FILE = "hf_quant_config.json"
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose layout the file has; loaders look for the name

# Prefixes under which runtimes know the same module (vLLM 0.33.0, `hf_to_vllm_mapper` of glm4_1v).
_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
)


def problems(child: Child) -> list[str]:
    """Why the child can't be declared so; empty where it can."""
    found = sample(
        f"{weight}: the profile 'modelopt-mixed' declares square blocks alone, the recipe makes {block}"
        for weight, block in blocks(child).items()
        if block.rows != block.cols
    )
    if _is_ours(child) or not child.conversions:
        return found
    return found + sample(_foreign(child))


def _is_ours(child: Child) -> bool:
    """Whether the parent is plain, or quantized as ModelOpt declares it."""
    return child.stated.get("quant_method") in (None, *METHODS)


def _foreign(child: Child) -> Iterator[str]:
    """What the parent quantized under another method, and what no entry of ours can speak for."""
    method = child.stated.get("quant_method")
    known = set(blocks(child))
    for name in passed_on_codes(child):
        if name not in known or name + "_scale_inv" not in child.tensors:
            yield f"{name}: is FP8 of the parent's method {method!r} without a block and its scales; dequantize it"
    for name, ref in child.tensors.items():
        if is_packed(name, ref) and name not in child.conversions:
            yield f"{name}: is packed by the parent's {method!r}, which 'modelopt-mixed' can't declare beside FP8"


def declare(child: Child) -> tuple[dict[str, Any], int]:
    """The child's config and its number of `quantized_layers` entries, aliases included."""
    return _declared(child, "modelopt-mixed", "FP8_BLOCK")


def declare_stock(child: Child) -> tuple[dict[str, Any], int]:
    """The same in the words of unpatched runtimes: FP8_PB_WO, and no exclusion but of what has no entry.

    SGLang takes "modelopt_mixed" as it is, and reads the file beside config.json where a config does not say that.
    """
    config, count = _declared(child, "modelopt", "FP8_PB_WO")
    stated = config.get("quantization_config")
    if isinstance(stated, dict) and count and child.conversions:
        ours = {"quant_method": "modelopt_mixed", "ignore": unquantized(child)}
        config = {**config, "quantization_config": {**stated, **ours}}
    return config, count


def beside_stock(config: Mapping[str, Any]) -> dict[str, bytes]:
    """hf_quant_config.json, which TensorRT-LLM reads: the same declaration as ModelOpt's exporter writes it."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") not in METHODS:
        return {}
    layers = stated.get("quantized_layers") or {}
    groups = {entry.get("group_size") for entry in layers.values() if "NVFP4" in entry["quant_algo"]}
    said = {
        "quant_algo": stated["quant_algo"],
        "kv_cache_quant_algo": _KV_ALGOS.get(str((stated.get("kv_cache_scheme") or {}).get("num_bits"))),
        **({"group_size": max(groups)} if groups else {}),
        "quantized_layers": layers,
        "exclude_modules": stated["ignore"],
    }
    text = json.dumps({"producer": _PRODUCER, "quantization": said}, indent=2, ensure_ascii=False)
    return {HF_QUANT_FILE: text.encode() + b"\n"}


_KV_ALGOS = {"8": "FP8", "4": "NVFP4"}


def stock_problems(child: Child) -> list[str]:
    """Why unpatched runtimes can't be given the child: their block is [128,128], and its scales have four axes."""
    found = sample(vocabulary_problems(child, "modelopt"))
    for weight, action in child.conversions.items():
        if isinstance(action, Reblock):
            found.append(
                f"{weight}: the profile 'modelopt' has scales of four axes, which reblock does not write; quantize it"
            )
            break
    found += sample(
        f"{weight}: the profile 'modelopt' knows blocks of [128,128] alone, the recipe makes {block}"
        for weight, block in blocks(child).items()
        if (block.rows, block.cols) != (128, 128)
    )
    return found + problems(child)


def _declared(child: Child, profile: str, algo: str) -> tuple[dict[str, Any], int]:
    recipe, stated = child.recipe, child.stated
    if not _is_ours(child) and not child.conversions:
        return dict(child.config), 0
    if stated.get("quant_method") not in METHODS:
        stated = {"quant_method": "modelopt", "ignore": unquantized(child)}
    said = stated.get("quantized_layers")
    layers = dict(said) if isinstance(said, dict) else {}
    layers.update(_nvfp4_entries(child))
    for weight in child.conversions:
        layers.pop(module_of(weight), None)
    layers.update(
        {
            module_of(weight): {"quant_algo": algo, "group_size": block.rows}
            for weight, block in blocks(child).items()
        }
    )
    layers.update({module: entry for module, (_, entry) in entries(child, profile).items()})
    for alias in recipe.alias:
        for module in [name for name in layers if name.startswith(alias.prefix)]:
            layers[alias.alias + module.removeprefix(alias.prefix)] = layers[module]
    stated.pop("config_groups", None)
    stated["quant_algo"] = "MIXED_PRECISION"
    stated["ignore"] = _still_ignored(_texts(stated.get("ignore")), child)
    stated["quantized_layers"] = dict(sorted(layers.items()))
    return {**child.config, "quantization_config": stated}, len(layers)


def _nvfp4_entries(child: Child) -> dict[str, dict[str, Any]]:
    """Entries of the Linears that are packed NVFP4: U8 nibbles [R, C/2] beside E4M3 scales [R, C/group]."""
    found: dict[str, dict[str, Any]] = {}
    entries: dict[int, dict[str, Any]] = {}  # one for all modules that share it
    for name, ref in child.tensors.items():
        if ref.dtype != "U8":
            continue
        scale = child.tensors.get(name + "_scale")
        if scale is None or scale.dtype != "F8_E4M3" or name in child.conversions:
            continue
        if group := _group(ref.shape, scale.shape):
            entry = entries.setdefault(group, {"quant_algo": "NVFP4", "group_size": group})
            found[module_of(name)] = entry
    return found


@lru_cache  # the experts of a checkpoint have few shapes
def _group(packed: Shape, scales: Shape) -> int | None:
    """Columns that share one scale: two nibbles a byte of `packed` [R, C/2], one scale of `scales` [R, C/group].

    None where the two are no such pair.
    """
    if not len(packed) == len(scales) == 2 or packed[0] != scales[0] or not scales[1]:
        return None
    columns, groups = 2 * packed[1], scales[1]
    return columns // groups if columns % groups == 0 else None


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _still_ignored(ignore: Sequence[str], child: Child) -> list[str]:
    """The `ignore` globs that hit no converted module under any of its names; loaders test exclusion first."""
    names = {name for weight in child.conversions for name in runtime_names(module_of(weight), child.recipe)}
    return [glob for glob in ignore if not _excludes(glob, names)]


def runtime_names(module: str, recipe: Recipe) -> Iterable[str]:
    """The names that runtimes may give a checkpoint's module: as it is, under other prefixes, fused."""
    for name in (module, *fused_names(module, recipe)):
        yield name
        for prefix, other in _PREFIXES:
            if name.startswith(prefix):
                yield other + name.removeprefix(prefix)


def _excludes(glob: str, modules: Iterable[str]) -> bool:
    """Whether the glob hits any of `modules`; one without a star does so as a part of the name."""
    if "*" not in glob and any(glob in module for module in modules):
        return True
    hits = re.compile(translate(glob)).match
    return any(map(hits, modules))
