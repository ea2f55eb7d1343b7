"""The profile `compressed-tensors`: float-quantized with the block strategy, read by vLLM, SGLang and transformers.

Schema: compressed-tensors 0.20 `QuantizationConfig`, its preset FP8_BLOCK; vLLM 0.33.0 `CompressedTensorsW8A8Fp8`.
Scales are `weight_scale`, F32. `ignore` names every Linear without codes; it is tested before the targets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params
from shardmill.pipeline.plan.profiles.child import (
    Child,
    blocks,
    entries,
    fused_names,
    module_of,
    passed_on_codes,
    passed_on_problems,
    sample,
    unquantized,
    vocabulary_problems,
)
from shardmill.pipeline.plan.profiles.names import in_memory
from shardmill.pipeline.types import BlockShape

_NAME = "compressed-tensors"
_BLOCK = BlockShape(128, 128)  # activations are quantized in groups of 128, by the preset and by its kernels


def problems(child: Child) -> list[str]:
    """Why the child can't be declared so; empty where it can."""
    if not child.conversions:
        return []
    found = sample(vocabulary_problems(child, _NAME)) + sample(passed_on_problems(child, _NAME, "_scale"))
    found += sample(
        f"{weight}: the profile {_NAME!r} knows blocks of {_BLOCK} alone, the recipe makes {block}; change it"
        for weight, block in blocks(child).items()
        if block != _BLOCK
    )
    return found


def declare(child: Child) -> tuple[dict[str, Any], int]:
    """The parent's config with our quantization_config; without any where no codes are left."""
    if not child.conversions:
        return dict(child.config), 0
    config = {key: value for key, value in child.config.items() if key != "quantization_config"}
    made = entries(child, _NAME)
    for weight in passed_on_codes(child):
        made[module_of(weight)] = ("fp8-block", _block_entry())
    if not made:
        return config, 0
    kept = unquantized(child)
    form, groups = _groups(made, child)
    stated = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
        "kv_cache_scheme": None,
    }
    return {**config, "quantization_config": stated}, len(kept)


def _block_entry() -> dict[str, Any]:
    spelling = formats()["fp8-block"].spelling(_NAME)
    assert spelling is not None
    assert spelling.entry is not None
    return spelling.entry(Params(block=(_BLOCK.rows, _BLOCK.cols)))


def _groups(made: Mapping[str, tuple[str, dict[str, Any]]], child: Child) -> tuple[str, dict[str, Any]]:
    """The checkpoint's format, and one group for each way in which modules are quantized.

    The largest group holds for every Linear. The others name their modules, which loaders look up first.
    """
    members: dict[str, list[str]] = defaultdict(list)
    by_text: dict[str, dict[str, Any]] = {}
    for module, (_, entry) in made.items():
        text = json.dumps(entry, sort_keys=True)
        by_text[text] = entry
        members[text].append(module)
    ordered = sorted(members, key=lambda text: (-len(members[text]), text))
    groups = {}
    for number, text in enumerate(ordered):
        named = sorted({name for module in members[text] for name in _names(module, child)})
        entry = dict(by_text[text])
        form = entry.pop("format")
        group = {"targets": named if number else ["Linear"], **entry}
        groups[f"group_{number}"] = {**group, "format": form} if len(ordered) > 1 else group
    forms = {by_text[text]["format"] for text in ordered}
    return (forms.pop() if len(forms) == 1 else "mixed-precision"), groups


def _names(module: str, child: Child) -> Iterator[str]:
    for name in (module, *fused_names(module, child.recipe)):
        yield from in_memory(name)
