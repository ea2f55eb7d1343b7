"""The profile `compressed-tensors`: float-quantized with the block strategy, read by vLLM, SGLang and transformers.

Schema: compressed-tensors 0.20 `QuantizationConfig`, its preset FP8_BLOCK; vLLM 0.33.0 `CompressedTensorsW8A8Fp8`.
Scales are `weight_scale`, F32. `ignore` names every Linear without codes; it is tested before the targets.
"""

from __future__ import annotations

from typing import Any

from shardmill.pipeline.plan.profiles.child import (
    Child,
    blocks,
    passed_on_problems,
    sample,
    unquantized,
    vocabulary_problems,
)
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
    if not blocks(child):
        return config, 0
    kept = unquantized(child)
    stated = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "dynamic": False,
                    "strategy": "block",
                    "block_structure": [_BLOCK.rows, _BLOCK.cols],
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "dynamic": True,
                    "strategy": "group",
                    "group_size": _BLOCK.cols,
                },
                "output_activations": None,
            }
        },
        "ignore": kept,
        "kv_cache_scheme": None,
    }
    return {**config, "quantization_config": stated}, len(kept)
