"""Plain models turned into the quantized forms that SGLang reads: names, dtypes and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.verify.loaders.cases import Edit, edits
from tests.verify.loaders.sglang.models import Headers

BLOCK, GROUP = 128, 128
_KEPT = re.compile(
    r"embed|norm|lm_head|conv|\.gate\.|router|shared_expert_gate|visual|vision|multi_modal|indexer|in_proj_ba|e_score"
)
_BANK = re.compile(
    r"^(.*(?:\.experts\.(?:gate_up|down)_proj|block_sparse_moe\.(?:in|out)put_linear))(?:\.weight)?$"
)
LISTS = {"fp8": "modules_to_not_convert", "awq": "modules_to_not_convert"} | dict.fromkeys(
    ("compressed-tensors", "modelopt", "modelopt_mixed"), "ignore"
)
Leaves = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """One checkpoint: its config.json and its headers."""

    form: str
    edit: Edit
    config: dict[str, Any]
    headers: Headers


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _codes(*scales: tuple[str, str, tuple[int, ...]]) -> Callable[[int, int], Leaves]:
    return lambda rows, columns: {
        "weight": ("F8_E4M3", (rows, columns)),
        **{leaf: (dtype, shape) for leaf, dtype, shape in scales},
    }


def _nvfp4(rows: int, columns: int) -> Leaves:
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def _ct_nvfp4(rows: int, columns: int) -> Leaves:
    return {
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    }


def _gptq(rows: int, columns: int) -> Leaves:
    return _awq_like(columns // 8, rows, columns, rows) | {"g_idx": ("I32", (columns,))}


def _awq_like(first: int, second: int, columns: int, rows: int) -> Leaves:
    return {
        "qweight": ("I32", (first, second)),
        "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
    }


LEAVES: dict[str, Callable[[int, int], Leaves]] = {
    "fp8-block": lambda r, c: {**_codes()(r, c), "weight_scale_inv": ("F32", _blocks(r, c))},
    "fp8-static": _codes(("weight_scale", "F32", ()), ("input_scale", "F32", ())),
    "fp8-dynamic": _codes(("weight_scale", "F32", ())),
    "modelopt-fp8": _codes(("weight_scale", "F32", ()), ("input_scale", "F32", ())),
    "modelopt-nvfp4": _nvfp4,
    "modelopt-pbwo": lambda r, c: {
        **_codes()(r, c),
        "weight_scale": ("F32", (_blocks(r, c)[0], 1, _blocks(r, c)[1], 1)),
    },
    "ct-channel": lambda r, c: {**_codes()(r, c), "weight_scale": ("BF16", (r, 1))},
    "ct-tensor": _codes(("weight_scale", "BF16", (1,)), ("input_scale", "BF16", (1,))),
    "ct-block": lambda r, c: {**_codes()(r, c), "weight_scale": ("BF16", _blocks(r, c))},
    "ct-nvfp4": _ct_nvfp4,
    "ct-w4a16": lambda r, c: {
        "weight_packed": ("I32", (r, c // 8)),
        "weight_scale": ("BF16", (r, c // GROUP)),
        "weight_shape": ("I64", (2,)),
    },
    "gptq": _gptq,
    "awq": lambda r, c: _awq_like(c, r // 8, c, r),
}


def _arguments(**more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **more}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_TOKEN = _arguments(strategy="token", dynamic=True)
_FP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "ct-channel": _compressed("float-quantized", _arguments(strategy="channel"), _TOKEN),
    "ct-tensor": _compressed("float-quantized", _arguments(strategy="tensor"), _arguments(strategy="tensor")),
    "ct-block": _compressed(
        "float-quantized",
        _arguments(strategy="block", block_structure=[BLOCK, BLOCK]),
        _arguments(strategy="group", group_size=BLOCK, dynamic=True),
    ),
    "ct-nvfp4": _compressed(
        "nvfp4-pack-quantized", _arguments(**_FP4), _arguments(**_FP4) | {"dynamic": "local"}
    ),
    "ct-w4a16": _compressed(
        "pack-quantized", _arguments(num_bits=4, type="int", strategy="group", group_size=GROUP), None
    ),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
FORMS = ("plain", *CONFIGS, "modelopt-mixed", "modelopt-mixed pbwo", "modelopt pbwo alone")
WIDE_FORMS = ("plain", "fp8-block", "fp8-dynamic", "modelopt-nvfp4", "ct-w4a16")
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def parts(headers: Headers) -> tuple[list[str], list[str]]:
    """(modules that a tool quantizes, modules that it keeps)"""
    made, kept = [], []
    for name, (_, shape) in headers.items():
        bank = _BANK.match(name)
        if bank:
            kept.append(bank[1])
        elif name.endswith(".weight") and len(shape) == 2:
            (kept if _KEPT.search(name) else made).append(name.removesuffix(".weight"))
    return made, kept


def _mixed(module: str, form: str) -> str:
    """FP8 attention, by the tensor or by blocks, and NVFP4 for the rest, as MIXED_PRECISION is published."""
    attention = "modelopt-pbwo" if "pbwo" in form else "modelopt-fp8"
    return attention if "attn" in module or form.endswith("alone") else "modelopt-nvfp4"


def quantized(headers: Headers, form: str) -> tuple[Headers, dict[str, Any] | None, list[str], list[str]]:
    """(headers, quantization_config, modules that were quantized, modules that were kept)"""
    made, kept = parts(headers)
    if form == "plain":
        return headers, None, made, kept
    mixed = form.startswith("modelopt") and form not in CONFIGS
    chosen = {module: _mixed(module, form) if mixed else form for module in made}
    out: Headers = {}
    for name, (dtype, shape) in headers.items():
        module = name.removesuffix(".weight")
        if module not in chosen or module == name:
            out[name] = (dtype, shape)
            continue
        rows, columns = shape
        out |= {f"{module}.{leaf}": entry for leaf, entry in LEAVES[chosen[module]](rows, columns).items()}
    if not mixed:
        return out, dict(CONFIGS[form]), made, kept
    algos = {
        "modelopt-fp8": {"quant_algo": "FP8"},
        "modelopt-nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    }
    algos["modelopt-pbwo"] = {"quant_algo": "FP8_PB_WO", "group_size": BLOCK}
    layers = {module: algos[each] for module, each in chosen.items()}
    method = "modelopt_mixed" if "pbwo" in form else "modelopt"  # our own profile's word
    config = {"quant_method": method, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config["kv_cache_scheme"] = None  # without a word of the cache SGLang looks for another file
    return out, config, made, kept


def _lost(headers: Headers) -> Iterator[tuple[str, Headers]]:
    """The headers without one scale: of a whole module, of a part of a fused one, of one expert."""
    scales = sorted(name for name in headers if name.endswith(".weight_scale_inv"))
    for place in ("o_proj", "k_proj", "experts.3.", "experts.2.up_proj", "w2"):
        lost = next((name for name in scales if place in name), None)
        if lost is not None:
            yield place, {name: entry for name, entry in headers.items() if name != lost}


def mxfp4(headers: Headers) -> Headers:
    """gpt-oss as it is published: 32 codes of a row in 16 bytes, and a scale of each 32."""
    out: Headers = {}
    for name, (dtype, shape) in headers.items():
        if not _BANK.match(name):
            out[name] = (dtype, shape)
            continue
        experts, columns, rows = shape
        out[f"{name}_blocks"] = ("U8", (experts, rows, columns // 32, 16))
        out[f"{name}_scales"] = ("U8", (experts, rows, columns // 32))
    return out


def cases(name: str, config: dict[str, Any], headers: Headers, edited: int = 1) -> Iterator[Case]:
    """Every form of a model, each with its exclusion list as a tool writes it, emptied, and edited by chance."""
    for form in WIDE_FORMS if name.endswith("wide") else FORMS:
        if form.startswith("modelopt-mixed") and all("attn" in module for module in parts(headers)[0]):
            continue  # no experts and no MLP to be NVFP4
        out, declared, made, kept = quantized(headers, form)
        key = LISTS.get(declared["quant_method"]) if declared else None
        chosen = edits(f"{name} {form}", kept, made) if key else [Edit("as built")]
        for edit in [chosen[0]] if name.endswith("wide") else chosen:
            if edit.whole == "null" or edit.name in [f"random {i}" for i in range(edited, 2)]:
                continue
            listed = {key: edit.of(kept)} if key else {}
            found = config | ({"quantization_config": declared | listed} if declared else {})
            yield Case(form, edit, found, out)
        if form == "fp8-block" and declared:
            kept_config = config | {"quantization_config": declared | {key: kept}}
            yield from (
                Case("fp8-block, a scale lost", Edit(place), kept_config, less) for place, less in _lost(out)
            )
        if form == "modelopt-mixed" and declared:
            silent = {k: v for k, v in declared.items() if k != "kv_cache_scheme"}
            yield Case(f"{form}, no cache", Edit("as built"), config | {"quantization_config": silent}, out)
    if config["model_type"] == "gpt_oss":
        yield Case("mxfp4", Edit("as built"), config | {"quantization_config": _MXFP4}, mxfp4(headers))
        yield Case("mxfp4 floats", Edit("as built"), config | {"quantization_config": _MXFP4}, headers)
