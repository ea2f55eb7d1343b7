"""The profile `fp8`: fine-grained FP8 as DeepSeek published it, read by vLLM, SGLang and transformers unpatched.

Schema: transformers 5 `FineGrainedFP8Config` and vLLM 0.33.0 `Fp8Config`. One `weight_block_size` holds for the whole
checkpoint; `modules_to_not_convert` names what has no codes. `scale_fmt` "ue8m0" says that every scale is a power of
two, so that a loader may narrow it without a second rounding.
"""

from __future__ import annotations

from typing import Any

from shardmill.pipeline.actions import Conversion, Convert
from shardmill.pipeline.plan.profiles.child import (
    Child,
    blocks,
    is_quantizing,
    passed_on_problems,
    sample,
    unquantized,
    vocabulary_problems,
)

_UE8M0 = "ue8m0/1"


def problems(child: Child) -> list[str]:
    """Why the child can't be declared so; empty where it can, and where nothing changes but files."""
    if not child.conversions:
        return []
    found = sample(vocabulary_problems(child, "fp8")) + sample(passed_on_problems(child, "fp8", "_scale_inv"))
    whole = [weight for weight, action in child.conversions.items() if is_quantizing(action)]
    if whole and blocks(child):
        found.append(
            f"{whole[0]}: the profile 'fp8' can't declare FP8 per tensor beside block FP8; choose one"
        )
    by_block = {block: weight for weight, block in blocks(child).items()}
    if len(by_block) > 1:
        examples = ", ".join(f"{block} at {weight}" for block, weight in by_block.items())
        found.append(
            f"the profile 'fp8' has one weight_block_size for the whole checkpoint, the recipe makes {len(by_block)} "
            f"({examples}); give all one block, or keep some"
        )
    for block, weight in by_block.items():
        if block.rows != block.cols:
            found.append(
                f"{weight}: loaders of the profile 'fp8' need square blocks, the recipe makes {block}"
            )
    return found


def declare(child: Child) -> tuple[dict[str, Any], int]:
    """The parent's config with our quantization_config; without any where no codes are left."""
    if not child.conversions:
        return dict(child.config), 0
    config = {key: value for key, value in child.config.items() if key != "quantization_config"}
    sizes = set(blocks(child).values())
    if not sizes and not any(map(is_quantizing, child.conversions.values())):
        return config, 0
    kept = unquantized(child)
    if not sizes:
        whole = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**config, "quantization_config": {**whole, "modules_to_not_convert": kept}}, len(kept)
    (block,) = sizes
    stated: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block.rows, block.cols],
        "modules_to_not_convert": kept,
    }
    if _all_powers_of_two(child):
        stated["scale_fmt"] = "ue8m0"
    return {**config, "quantization_config": stated}, len(kept)


def _has_powers_of_two(action: Conversion) -> bool:
    return action.numerics == _UE8M0 or (isinstance(action, Convert) and action.scale_dtype == "F8_E8M0")


def _all_powers_of_two(child: Child) -> bool:
    passed_on = set(blocks(child)) - set(child.conversions)
    before = child.stated.get("scale_fmt") == "ue8m0"
    made = [action for action in child.conversions.values() if action.encodes or isinstance(action, Convert)]
    carried = bool(passed_on) or len(made) < len(blocks(child)) - len(
        passed_on
    )  # reblocked scales are the parent's
    return all(_has_powers_of_two(action) for action in made) and (before or not carried)
