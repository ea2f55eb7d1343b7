"""What vLLM 0.33.0 would do with a checkpoint, said without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo.clean import mixed_child, nvfp4_parent
from tests.verify.zoo.loading import _keep_b, _six
from tests.verify.zoo.model import Model, codes, f32, scales


def _loads(model: Model, folder: Path, runtime: str | None = None) -> Report:
    model.manifest = None
    model.write(folder)
    return loads(Folder(folder), runtime)


def test_a_fused_group_treated_unevenly_is_said_in_the_loaders_words(tmp_path: Path) -> None:
    model = mixed_child()
    _keep_b(model)
    said = [
        f.got
        for f in _loads(model, tmp_path).findings
        if f.tensor.endswith("layers.0.self_attn.in_proj_qkvbfg_a")
    ]
    assert said == ["KDA in_proj: layers.0 q,k,v,f_a,g_a FP8 [32,32], b BF16: loader refuses"]


def test_the_patched_runtime_takes_what_the_stock_one_refuses(tmp_path: Path) -> None:
    model = mixed_child()
    _six(model)
    assert _loads(model, tmp_path, "patched").findings == []
    stock = _loads(model, tmp_path, "stock")
    refused = {f.tensor.rpartition(".")[2] for f in stock.findings if f.slug == "loader-refuses"}
    dequantized = {f.tensor.rpartition(".")[2] for f in stock.findings if f.slug == "loads-dequantized"}
    assert (refused, dequantized) == ({"in_proj_qkvbfg_a"}, {"o_proj"})


def test_the_parent_loads_as_vllm_ships(tmp_path: Path) -> None:
    report = _loads(nvfp4_parent(), tmp_path)
    assert report.facts["runtime"] == "vLLM 0.33.0 as it ships"
    assert report.findings == []


def test_the_draft_needs_its_aliases_only_as_vllm_ships(tmp_path: Path) -> None:
    model = mixed_child()
    entries = model.quantization["quantized_layers"]
    model.quantization["quantized_layers"] = {
        k: v for k, v in entries.items() if not k.startswith("model.layers.")
    }
    stock = _loads(model, tmp_path, "stock")
    assert any(f.tensor == "model.layers.2.mlp.experts.0.w13" for f in stock.findings)
    assert _loads(model, tmp_path, "patched").findings == []


@pytest.mark.parametrize(("algo", "axes", "verdict"), [("FP8_PB_WO", 4, True), ("FP8_PB_WO", 2, False)])
def test_block_fp8_of_modelopt_needs_a_scale_of_four_axes(
    algo: str, axes: int, verdict: bool, tmp_path: Path
) -> None:
    model = nvfp4_parent()
    module = "model.language_model.layers.0.mlp.down_proj"
    shard = model.find(f"{module}.weight")
    shard[f"{module}.weight"] = codes("d", 128, 128)
    shard[f"{module}.weight_scale"] = scales("d", *([1] * axes))
    entries = {name.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16}
               for name in model.names if model[name].dtype == "U8"}  # fmt: skip
    entries |= {name.replace("model.language_model.", "model."): entry for name, entry in entries.items()}
    entries[module] = {"quant_algo": algo}
    model.quantization.update(quant_algo="MIXED_PRECISION", quantized_layers=entries)
    report = _loads(model, tmp_path)
    assert [f.tensor for f in report.findings] == (
        [] if verdict else ["language_model.model.layers.0.mlp.down_proj"]
    )


def test_a_model_without_a_table_is_not_judged(tmp_path: Path) -> None:
    model = nvfp4_parent()
    assert model.config is not None
    model.config["model_type"] = "gpt2"
    report = _loads(model, tmp_path)
    assert list(report.not_checked) == ["loads"]


def test_scales_of_the_kv_cache_and_rotary_buffers_have_a_home(tmp_path: Path) -> None:
    model = nvfp4_parent()
    shard = model.find("lm_head.weight")
    for leaf in ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.rotary_emb.inv_freq"):
        shard[f"model.language_model.layers.0.{leaf}"] = f32(1.0)
    assert _loads(model, tmp_path).findings == []
