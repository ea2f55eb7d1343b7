"""Output profiles: how a loader wants the result named and declared. One row a profile.

A profile is what a published checkpoint says of itself; the codes and scales are the same under each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.recipe import Recipe
from pipeline.types import QuantizeBlock, TensorRef

Tensors = Mapping[str, TensorRef]
Conversions = Mapping[str, QuantizeBlock]  # weight name -> what is done with it
WEIGHT_SUFFIX = ".weight"

# Prefixes under which runtimes know the same module (vLLM 0.33.0, `hf_to_vllm_mapper` of glm4_1v).
_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """`declare(config, recipe, tensors, conversions)` returns the child's config and its number of entries."""

    name: str
    declare: Callable[[Mapping[str, Any], Recipe, Tensors, Conversions], tuple[dict[str, Any], int]]


def module_of(weight: str) -> str:
    """`a.b.weight` -> `a.b`."""
    return weight.removesuffix(WEIGHT_SUFFIX)


def declare_modelopt_mixed(
    config: Mapping[str, Any], recipe: Recipe, tensors: Tensors, conversions: Conversions
) -> tuple[dict[str, Any], int]:
    """ModelOpt's MIXED_PRECISION: one `quantized_layers` entry a quantised Linear, aliases included.

    The schema is vLLM 0.33.0's `ModelOptMixedPrecisionConfig`; `FP8_BLOCK` with an integer `group_size` (blocks are
    square) is the published child's name for an entry that its patched runtime dispatches.
    """
    stated = dict(config.get("quantization_config") or {"quant_method": "modelopt", "ignore": []})
    layers = dict(stated.get("quantized_layers") or {})
    layers.update(_nvfp4_entries(tensors))
    layers.update(
        {
            module_of(weight): {"quant_algo": "FP8_BLOCK", "group_size": action.block.rows}
            for weight, action in conversions.items()
        }
    )
    for alias in recipe.alias:
        for module in [name for name in layers if name.startswith(alias.prefix)]:
            layers[alias.alias + module.removeprefix(alias.prefix)] = layers[module]
    stated.pop("config_groups", None)
    stated["quant_algo"] = "MIXED_PRECISION"
    stated["ignore"] = _still_ignored(stated.get("ignore") or [], recipe, conversions)
    stated["quantized_layers"] = dict(sorted(layers.items()))
    return {**config, "quantization_config": stated}, len(layers)


PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (Profile("modelopt-mixed", declare_modelopt_mixed),)
}


def _nvfp4_entries(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Entries of the Linears that are packed NVFP4: U8 nibbles [R, C/2] beside E4M3 scales [R, C/group]."""
    entries: dict[str, dict[str, Any]] = {}
    for name, ref in tensors.items():
        if ref.dtype == "U8" and name.endswith(WEIGHT_SUFFIX):
            scale = tensors.get(name + "_scale")
            if scale is not None and scale.dtype == "F8_E4M3":
                group = 2 * ref.shape[1] // scale.shape[1]
                entries[module_of(name)] = {"quant_algo": "NVFP4", "group_size": group}
    return entries


def _still_ignored(ignore: Sequence[str], recipe: Recipe, conversions: Conversions) -> list[str]:
    """The `ignore` globs that hit no converted module under any of its names; loaders test exclusion first."""
    names = {name for weight in conversions for name in runtime_names(module_of(weight), recipe)}
    return [glob for glob in ignore if not any(_excludes(glob, name) for name in names)]


def runtime_names(module: str, recipe: Recipe) -> Iterable[str]:
    """The names that runtimes may give a checkpoint's module: as it is, under other prefixes, fused."""
    parent, _, own = module.rpartition(".")
    fused = [name for group in recipe.fused if own in group.members() for name in group.runtime_names]
    for name in (module, *(f"{parent}.{name}" for name in fused)):
        yield name
        for prefix, other in _PREFIXES:
            if name.startswith(prefix):
                yield other + name.removeprefix(prefix)


def _excludes(glob: str, module: str) -> bool:
    return fnmatchcase(module, glob) or ("*" not in glob and glob in module)
