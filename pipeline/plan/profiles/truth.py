"""config.json tells one truth: a quantization is declared once, at the top, and nothing else in it contradicts that.

Multimodal models nest a declaration under `text_config`, `llm_config`, `thinker_config` and the like, and older
compressed-tensors files call it `compression_config`. A loader reads whichever it finds first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.types import TensorRef

if TYPE_CHECKING:
    from shardmill.pipeline.plan.profiles.child import Child

DECLARED = "quantization_config"
_NAMES = (DECLARED, "compression_config")
_KV = "kv_cache_scheme"
_KV_SCALES = ("k_scale", "v_scale", "kv_scale")
_WITH_KV = ("compressed-tensors", "modelopt", "modelopt_mixed")  # methods that have the word
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DEPTH_MAX = 8


def declarations(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Every declaration of a quantization in a config, the outermost first."""
    yield from (value for name in _NAMES if isinstance(value := config.get(name), dict) and value)
    if depth < _DEPTH_MAX:
        for key, value in config.items():
            if key not in _NAMES and isinstance(value, dict):
                yield from declarations(value, depth + 1)


def stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of its quantization, wherever it says so; {} where it says nothing."""
    return dict(next(declarations(config), {}))


def one_truth(config: Mapping[str, Any], child: Child, parent: Mapping[str, TensorRef]) -> dict[str, Any]:
    """The config that a profile declared, without another declaration in it, with the KV cache's and a dtype.

    Raises PlanError where calibrated scales of the KV cache would be left without their declaration.
    """
    if not child.conversions:
        return dict(config)
    bare = _without(config, keep=config.get(DECLARED))
    declared = {**bare, **_with_kv(bare, child)}
    return {**_dtype(declared, parent), **declared}


def _without(config: Mapping[str, Any], keep: Any, depth: int = 0) -> dict[str, Any]:
    """`config` without declarations, but for the one to keep at its top."""
    left = {}
    for key, value in config.items():
        if key in _NAMES and (isinstance(value, dict) or value is None):
            if keep is not None and key == DECLARED:
                left[key] = value
        elif isinstance(value, dict) and depth < _DEPTH_MAX:
            left[key] = _without(value, None, depth + 1)
        else:
            left[key] = value
    return left


def _with_kv(config: Mapping[str, Any], child: Child) -> dict[str, Any]:
    """The declaration with the parent's KV cache scheme, where its scales are there still."""
    scheme = child.stated.get(_KV)
    scales = [name for name in child.tensors if name.rpartition(".")[2] in _KV_SCALES]
    if not scheme or not scales:
        return {}
    own = config.get(DECLARED) or {}
    if own.get("quant_method") not in _WITH_KV:
        sentence = (
            f"config.json declares a {_KV} and {scales[0]} holds its scale ({len(scales)} in all), but the profile "
            f"{child.recipe.output.profile!r} can't declare it: choose 'compressed-tensors' or 'modelopt-mixed', "
            f"or drop these scales"
        )
        raise PlanError([sentence])
    return {DECLARED: {**own, _KV: scheme}}


def _dtype(config: Mapping[str, Any], parent: Mapping[str, TensorRef]) -> dict[str, Any]:
    """The dtype of what is not quantized, where the config states none."""
    nested = [value for value in config.values() if isinstance(value, dict)]
    if any(each.get(key) for each in (config, *nested) for key in ("dtype", "torch_dtype")):
        return {}
    held = Counter[str]()
    for name, ref in parent.items():
        if ref.dtype in _TORCH and not name.endswith(("_scale", "_scale_inv", "_scale_2")):
            held[ref.dtype] += ref.bytes
    dtype = held.most_common(1)[0][0] if held else "BF16"
    return {"torch_dtype": _TORCH[dtype]}
