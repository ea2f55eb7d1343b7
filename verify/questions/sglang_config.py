"""Which quantization method SGLang 0.5.23 gives a module by config.json: how it reads lists, fused names and kinds.

Each method matches its exclusion list in a way of its own, against the name that the class asks with. Followed are
`fp8` (is_layer_skipped in quantization/utils.py), ModelOpt (modelopt_quant.py), compressed-tensors
(compressed_tensors/utils.py), GPTQ and AWQ in the forms that Marlin takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.formats.excludes import GLOBS_MAX
from shardmill.verify.formats.sglang_methods import ALGOS, FORMATS
from shardmill.verify.formats.sglang_modules import Family, Holds
from shardmill.verify.questions.sglang_lists import (
    RefusedError,
    by_glob,
    by_suffix,
    every_part,
    is_skipped,
    listed_under,
    rename,
    renamed,
)
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint

NAME = "SGLang 0.5.23"
MIXED = "MIXED_PRECISION"
MARLIN_BITS = {"gptq": (4, 8), "awq": (4,)}
MARLIN_GROUPS = (-1, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Asked:
    """A module as a class asks its config for a method."""

    name: str
    holds: Holds


@dataclass(frozen=True, slots=True)
class Method:
    """A declaration as SGLang reads it."""

    algo: Callable[[Asked], str]  # "" for a float; raises RefusedError
    block: tuple[int, int] = (128, 128)
    sizes: Mapping[str, list[int]] = field(default_factory=dict)  # of q, k and v, where one tensor holds them
    apart: bool = False  # shared experts stay modules of their own

    def joint(self, module: str) -> list[int]:
        return self.sizes.get(module.rpartition(".")[2], [])


def method_of(checkpoint: Checkpoint, family: Family) -> Method:
    """Raises UnaskedError for a declaration that no table follows."""
    quantization = checkpoint.quantization
    if not quantization:
        return Method(lambda asked: "")
    method = str(quantization.get("quant_method") or "modelopt")
    reader = READERS.get(method)
    if reader is None:
        raise UnaskedError(f"no table of what {NAME} makes of quant_method {method[:60]!r}")
    algo = reader(quantization, family)
    if quantization.get("quant_algo") == MIXED and not {"kv_cache_scheme", "kv_cache_quant_algo"} & set(
        quantization
    ):
        algo = _of_other_file(checkpoint)
    block = quantization.get("weight_block_size") or _block_structure(quantization) or [128, 128]
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise UnaskedError(f"config.json gives a block of {str(block)[:40]}")
    return Method(
        _of_linears(algo), (block[0], block[1]), _sizes(checkpoint.config), _keeps_apart(quantization)
    )


def _keeps_apart(quantization: Mapping[str, Any]) -> bool:
    """Where routed experts have fewer bits than shared ones: packed integers, and NVFP4 that excludes the shared."""
    algo, form = str(quantization.get("quant_algo")), quantization.get("format")
    listed = listed_under(quantization, "ignore", "exclude_modules")
    excluded = any("shared_expert" in name and "shared_expert_gate" not in name for name in listed)
    return form == "pack-quantized" or ("NVFP4" in algo and excluded)


def _of_other_file(checkpoint: Checkpoint) -> Callable[[Asked], str]:
    """MIXED_PRECISION without a word of the KV cache: SGLang reads hf_quant_config.json in its place."""
    if "hf_quant_config.json" in checkpoint.files:
        raise UnaskedError(
            f"no table of what {NAME} makes of hf_quant_config.json in the place of config.json"
        )

    def of(asked: Asked) -> str:
        raise RefusedError(
            "MIXED_PRECISION wants kv_cache_scheme or kv_cache_quant_algo, null or not, in config.json"
        )

    return of


def _of_linears(algo: Callable[[Asked], str]) -> Callable[[Asked], str]:
    return lambda asked: "" if asked.holds == "float" else algo(asked)


def _sizes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Rows of q, k and v and of gate and up, as config.json gives them."""
    text = config.get("text_config")
    place = text if isinstance(text, dict) else config
    hidden, heads = place.get("hidden_size"), place.get("num_attention_heads")
    if not (type(hidden) is int and type(heads) is int and heads > 0):
        return {}
    groups = place.get("num_key_value_heads")
    groups = groups if type(groups) is int else heads
    head = place.get("head_dim")
    head = head if type(head) is int else hidden // heads
    inner = place.get("intermediate_size")
    return {
        "qkv_proj": [heads * head, groups * head, groups * head],
        "gate_up_proj": [inner, inner] if type(inner) is int else [],
        **_delta_net(place),
    }


def _delta_net(place: Mapping[str, Any]) -> dict[str, list[int]]:
    """Rows of the parts of Qwen3-Next's projections: q, k, v and z, and b and a."""
    keys = [
        place.get(f"linear_{part}")
        for part in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    ]
    if not all(type(key) is int for key in keys):
        return {}
    key, key_dim, value, value_dim = (int(str(each)) for each in keys)
    rows = [key * key_dim] * 2 + [value * value_dim] * 2
    return {"in_proj_qkvz": rows, "in_proj_ba": [value] * 2}


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    return next((weights.get("block_structure") for weights, _, _ in _groups(quantization)), None)


def _fp8(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    listed = listed_under(quantization, "ignored_layers", "modules_to_not_convert")
    bare = [name.removeprefix("model.").rstrip(".") for name in listed]
    names = renamed([each for name in bare for each in (name, f"model.{name}")], family)
    static = quantization.get("activation_scheme") == "static"
    algo = "fp8 by tensor, static" if static else "fp8 by tensor"
    if quantization.get("weight_block_size"):
        algo = "fp8 by block"

    def of(asked: Asked) -> str:
        return "" if asked.holds == "head" or is_skipped(asked.name, names, family.packed) else algo

    return of


def _modelopt(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    algo = str(quantization.get("quant_algo"))
    if algo not in ALGOS:
        raise UnaskedError(f"no table of what {NAME} makes of quant_algo {algo[:60]!r}")
    listed = renamed(listed_under(quantization, "ignore", "exclude_modules"), family)
    if family.renames:
        listed += [name.removeprefix("language_model.") for name in listed]
    excluded = by_glob(listed)
    entries = quantization.get("quantized_layers")
    mixed = _mixed(entries if isinstance(entries, dict) else {}, family) if algo == MIXED else None
    if mixed and quantization.get("quant_method") != "modelopt_mixed" and not _has_nvfp4(entries):
        raise UnaskedError(f"no table of what {NAME} makes of {MIXED} without NVFP4")

    def of(asked: Asked) -> str:
        resolved = mixed(asked.name) if mixed else algo
        skipped = asked.holds not in ("bank", "stack") and is_skipped(asked.name, listed, family.packed)
        return "" if skipped or excluded(asked.name) else resolved

    return of


def _has_nvfp4(entries: Any) -> bool:
    rows = entries.values() if isinstance(entries, dict) else ()
    return any(isinstance(row, dict) and row.get("quant_algo") in ("NVFP4", "W4A16_NVFP4") for row in rows)


def _mixed(entries: Mapping[str, Any], family: Family) -> Callable[[str], str]:
    """The algorithm that a map of layers gives a name: its own entry, its parts', or the first one below it."""
    algos = {
        rename(name, family): str(row.get("quant_algo", "")).upper()
        for name, row in entries.items()
        if isinstance(row, dict)
    }
    others = sorted(set(algos.values()) - {"FP8", "NVFP4", "W4A16_NVFP4", "FP8_PB_WO", "FP8_BLOCK_SCALES"})
    if others:
        raise UnaskedError(f"no table of what {NAME} makes of {MIXED} with {', '.join(others)[:60]}")
    below: dict[str, str] = {}
    for name, algo in algos.items():
        while "." in name:
            name = name.rpartition(".")[0]
            below.setdefault(name, algo)

    def of(name: str) -> str:
        spellings = _spellings(name)
        own = next((algos[each] for each in spellings if each in algos), None)
        if own is not None:
            return own
        base, _, last = name.rpartition(".")
        parts = {
            algos[f"{each}.{part}"]
            for each in _spellings(base)
            for part in family.packed.get(last, ())
            if f"{each}.{part}" in algos
        }
        if len(parts) > 1:
            raise RefusedError(f"{name}: its parts have {' and '.join(sorted(parts))}")
        if parts:
            return parts.pop()
        return next((below[each] for each in spellings if each in below), "")

    return of


def _spellings(name: str) -> list[str]:
    """The keys under which an entry of the map is looked for."""
    found = [name]
    if name.endswith(".lm_head"):
        found.append("lm_head")
    for old, news in (
        ("language_model.model.", ("model.language_model.",)),
        ("model.language_model.", ("language_model.model.", "model.")),
        ("model.", ("model.language_model.",)),
    ):
        if name.startswith(old):
            return found + [new + name.removeprefix(old) for new in news]
    return found


def _groups(quantization: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Any, Mapping[str, Any]]]:
    """(weights, input_activations, the group) of each group."""
    groups = quantization.get("config_groups")
    found = (
        [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    )
    return [(_table(group.get("weights")), group.get("input_activations"), group) for group in found]


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _compressed(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    groups = _groups(quantization)
    if len(groups) != 1 or groups[0][2].get("targets") != ["Linear"]:
        raise UnaskedError(
            f"no table of what {NAME} makes of compressed-tensors with other targets than Linear"
        )
    algo = _scheme(*groups[0], str(groups[0][2].get("format") or quantization.get("format")))
    ignored = by_suffix(renamed(listed_under(quantization, "ignore"), family))

    def of(asked: Asked) -> str:
        if asked.holds == "head":
            return ""
        if asked.holds in ("bank", "stack"):
            found = {ignored(f"{asked.name}.0.{part}") for part in ("gate_proj", "up_proj", "down_proj")}
            if len(found) > 1:
                raise RefusedError(f"{asked.name}: some of its projections are excluded and some are not")
            return "" if found.pop() else algo
        parts = None if ignored(asked.name, False) else every_part(asked.name, family.packed, ignored)
        return "" if (ignored(asked.name) if parts is None else parts) else algo

    return of


def _scheme(weights: Mapping[str, Any], inputs: Any, group: Mapping[str, Any], form: str) -> str:
    strategy, kind, bits = weights.get("strategy"), weights.get("type"), weights.get("num_bits")
    activations = _table(inputs)
    if form == "float-quantized" and kind == "float" and bits == 8 and inputs:
        if strategy == "block":
            return "float-quantized, block"
        if strategy in ("tensor", "channel"):
            return "float-quantized" if activations.get("dynamic") else "float-quantized, static"
    if form == "nvfp4-pack-quantized" and inputs:
        return form
    plain = weights.get("symmetric", True) and not weights.get("actorder")
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and not inputs and plain:
        return form
    raise UnaskedError(
        f"no table of what {NAME} makes of compressed-tensors {form[:40]!r} with {str(strategy)[:20]} weights"
        if form in FORMATS
        else f"no table of what {NAME} makes of compressed-tensors format {form[:60]!r}"
    )


def _gptq(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    _check_marlin(quantization, "gptq")
    if quantization.get("sym") is not True or quantization.get("dynamic") or quantization.get("lm_head"):
        raise UnaskedError(f"no table of what {NAME} makes of GPTQ with sym false, dynamic or lm_head")
    return lambda asked: "" if asked.holds == "head" else "gptq"


def _awq(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    _check_marlin(quantization, "awq")
    listed = listed_under(quantization, "modules_to_not_convert")
    if len(listed) > GLOBS_MAX:
        raise UnaskedError(
            f"config.json excludes {len(listed):,} names, each of which is looked for in every module's"
        )
    return lambda asked: "" if asked.holds == "head" or any(name in asked.name for name in listed) else "awq"


def _mxfp4(quantization: Mapping[str, Any], family: Family) -> Callable[[Asked], str]:
    """Experts are MXFP4 whatever a list says; of other classes than gpt-oss's nothing is known here."""
    if "gpt_oss" not in family.types:
        raise UnaskedError(f"no table of what {NAME} makes of quant_method 'mxfp4' but for gpt_oss")
    return lambda asked: "mxfp4" if asked.holds == "stack" else ""


def _check_marlin(quantization: Mapping[str, Any], method: str) -> None:
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if bits not in MARLIN_BITS[method] or group not in MARLIN_GROUPS:
        got = f"{str(bits)[:20]} bits, {str(group)[:20]} a group"
        raise UnaskedError(f"no table of what {NAME} makes of {method} of {got}")


READERS: Mapping[str, Callable[[Mapping[str, Any], Family], Callable[[Asked], str]]] = {
    "fp8": _fp8,
    **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"), _modelopt),
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
