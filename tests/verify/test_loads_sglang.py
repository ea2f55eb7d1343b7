"""`verify loads --loader sglang`: what SGLang 0.5.23 drops in silence is found; beside other loaders it is a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill.verify.rules.findings import Report
from tests.verify.test_loads import Tensors
from tests.verify.test_loads import _ask as _ask_of

LAYER = "model.layers.0."
LINEARS = {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128, "self_attn.o_proj": 256}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _decoder(kind: str, scale: str, declared: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """One layer of attention in block FP8."""
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", (512, 256))}
    for name, rows in LINEARS.items():
        tensors[f"{LAYER}{name}.weight"] = ("F8_E4M3", (rows, 256))
        tensors[f"{LAYER}{name}.{scale}"] = ("F32", (rows // 128, 2))
    return tensors, {"model_type": kind, "num_hidden_layers": 1, "quantization_config": declared}


def _ask(tensors: Tensors, config: dict[str, Any], folder: Path, loader: str | None = "sglang") -> Report:
    folder.mkdir(exist_ok=True)
    return _ask_of(tensors, config, folder, loader=loader)


def _said(report: Report) -> set[tuple[str, str, str]]:
    return {(f.severity.name, f.slug, f.tensor) for f in report.findings}


def test_llama_drops_the_scales_of_block_fp8_and_qwen_takes_them(tmp_path: Path) -> None:
    said = _said(_ask(*_decoder("llama", "weight_scale_inv", BLOCKS), tmp_path / "llama"))
    assert said == {("ERROR", "loads-garbage", f"{LAYER}self_attn.{name}") for name in ("qkv_proj", "o_proj")}
    report = _ask(*_decoder("qwen2", "weight_scale_inv", BLOCKS), tmp_path / "qwen2")
    assert _said(report) == set()
    assert report.facts["SGLang 0.5.23"]["model.layers.#.self_attn.qkv_proj.weight_scale_inv: F32"] == 1


def test_what_sglang_drops_is_a_note_beside_the_others(tmp_path: Path) -> None:
    report = _ask(*_decoder("llama", "weight_scale_inv", BLOCKS), tmp_path, loader=None)
    noted = {f.tensor for f in report.findings if f.slug == "one-loader" and "SGLang 0.5.23" in f.got}
    assert noted == {f"{LAYER}self_attn.qkv_proj", f"{LAYER}self_attn.o_proj"}
    assert not [f for f in report.findings if f.severity.name == "ERROR"]


def test_a_half_excluded_fused_module_is_refused_by_its_name(tmp_path: Path) -> None:
    listed = BLOCKS | {"modules_to_not_convert": [f"{LAYER}self_attn.q_proj"]}
    report = _ask(*_decoder("qwen2", "weight_scale_inv", listed), tmp_path)
    assert [f.slug for f in report.findings] == ["loader-refuses"]
    assert "qkv_proj: some of its parts are excluded" in report.findings[0].got


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq of 3 bits"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo 'MXFP8'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:.*"]}}},
            "other targets",
        ),
    ],
)
def test_a_declaration_without_a_table_is_named(declared: dict[str, Any], why: str, tmp_path: Path) -> None:
    report = _ask(*_decoder("llama", "weight_scale", declared), tmp_path)
    assert why in report.not_checked["loads"]


def test_mixed_precision_that_says_nothing_of_the_cache_is_refused(tmp_path: Path) -> None:
    entries = {f"{LAYER}{name}": {"quant_algo": "NVFP4", "group_size": 16} for name in LINEARS}
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries}
    report = _ask(*_decoder("qwen3_moe", "weight_scale", declared), tmp_path)
    assert "wants kv_cache_scheme or kv_cache_quant_algo" in report.findings[0].got
