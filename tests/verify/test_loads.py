"""What vLLM 0.33.0 and transformers 5.24 would do with a checkpoint, said without them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path

import pytest

from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report, Severity
from tests.verify.zoo.clean import mixed_child, nvfp4_parent
from tests.verify.zoo.loading import _keep_b, _six
from tests.verify.zoo.model import Model, codes, f32, scales

Tensors = dict[str, tuple[str, tuple[int, ...]]]


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


H = 7168


def _deepseek(kept: Iterable[str] = ()) -> tuple[Tensors, dict[str, object]]:
    """A layer of DeepSeek-V3 as published, without its data: kv_a of 576 rows in 5 blocks, lm_head in BF16."""
    at = "model.layers.0."
    coded = {
        "self_attn.q_a_proj": (1536, H),
        "self_attn.q_b_proj": (24576, 1536),
        "self_attn.kv_b_proj": (32768, 512),
    }
    coded |= {"self_attn.kv_a_proj_with_mqa": (576, H), "self_attn.o_proj": (H, 16384)}
    coded |= {"mlp.gate_proj": (18432, H), "mlp.up_proj": (18432, H), "mlp.down_proj": (H, 18432)}
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (129280, H)),
        "lm_head.weight": ("BF16", (129280, H)),
    }
    tensors |= {"model.norm.weight": ("BF16", (H,)), f"{at}self_attn.kv_a_layernorm.weight": ("BF16", (512,))}
    for name, (rows, columns) in coded.items():
        if name in kept:
            tensors[f"{at}{name}.weight"] = ("BF16", (rows, columns))
            continue
        tensors[f"{at}{name}.weight"] = ("F8_E4M3", (rows, columns))
        tensors[f"{at}{name}.weight_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return tensors, {"model_type": "deepseek_v3", "num_hidden_layers": 1, "quantization_config": quantization}


def _ask(tensors: Tensors, config: dict[str, object], folder: Path, loader: str | None = None) -> Report:
    """The question of a checkpoint whose data are a hole."""
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return loads(Folder(folder), loader=loader)


def _errors(report: Report) -> list[str]:
    return [f"{f.slug} {f.tensor}" for f in report.findings if f.severity is Severity.ERROR]


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_deepseek_in_its_true_shapes_loads_everywhere(kind: str, tmp_path: Path) -> None:
    tensors, config = _deepseek()
    report = _ask(tensors, {**config, "model_type": kind}, tmp_path)
    assert _errors(report) == []
    assert [key for key in report.facts["modules"] if "fused_qkv_a_proj: FP8 [128,128]" in key]  # type: ignore[attr-defined]
    cpu = [f.got for f in report.findings if f.slug == "transformers-refuses"]
    assert len(cpu) == 1
    assert "576 does not divide into 5 blocks" in cpu[0]


def test_a_weight_left_in_bf16_is_garbage_in_both_loaders_unless_it_is_listed(tmp_path: Path) -> None:
    tensors, config = _deepseek(kept=["self_attn.o_proj"])
    o_proj = "model.layers.0.self_attn.o_proj"
    assert _errors(_ask(tensors, config, tmp_path)) == [f"loads-garbage {o_proj}"] * 2
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", o_proj]  # type: ignore[index]
    assert _errors(_ask(tensors, config, tmp_path)) == []


def _gemma(ignore: list[str]) -> tuple[Tensors, dict[str, object]]:
    layer = "language_model.model.layers.0."
    tower = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    tensors: Tensors = {"language_model.model.embed_tokens.weight": ("BF16", (512, 256))}
    tensors |= {
        f"{tower}.weight": ("BF16", (256, 128)),
        f"{layer}mlp.down_proj.weight": ("F8_E4M3", (256, 512)),
    }
    tensors[f"{layer}mlp.down_proj.weight_scale"] = ("BF16", (2, 4))
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ignore}
    quantization["config_groups"] = {"group_0": group}  # type: ignore[assignment]
    return tensors, {"model_type": "gemma3", "quantization_config": quantization}


def test_a_list_in_published_names_is_found_where_the_loader_matches_names_in_memory(tmp_path: Path) -> None:
    tower = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    published = _ask(*_gemma(["lm_head", tower]), tmp_path)
    assert _errors(published) == ["loads-garbage model.vision_tower.encoder.layers.0.mlp.fc1"]
    in_memory = _ask(*_gemma(["lm_head", "re:.*vision_tower.*"]), tmp_path)
    assert _errors(in_memory) == []
    assert not [name for name in in_memory.not_checked if name.startswith("vLLM")]


def test_a_tied_head_that_no_list_names_is_garbage_under_compressed_tensors(tmp_path: Path) -> None:
    report = _ask(*_gemma(["re:.*vision_tower.*"]), tmp_path)
    assert _errors(report) == ["loads-garbage lm_head"]


def test_a_bank_listed_under_its_published_name_alone_is_found_in_both_loaders(tmp_path: Path) -> None:
    """GraniteMoE: what the file calls input_linear is block_sparse_moe.experts in memory."""
    at = "model.layers.0.block_sparse_moe."
    tensors: Tensors = {f"{at}input_linear.weight": ("BF16", (4, 512, 256))}
    tensors |= {
        f"{at}output_linear.weight": ("BF16", (4, 256, 256)),
        f"{at}router.layer.weight": ("BF16", (4, 256)),
    }
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantization["modules_to_not_convert"] = ["lm_head", f"{at}input_linear", f"{at}output_linear"]  # type: ignore[assignment]
    config = {"model_type": "granitemoe", "num_hidden_layers": 1, "quantization_config": quantization}
    found = _ask(tensors, config, tmp_path)
    assert {f.slug for f in found.findings if f.severity is Severity.ERROR} == {"loads-garbage"}
    assert {"vLLM" in f.got for f in found.findings} == {True, False}
    quantization["modules_to_not_convert"] = ["lm_head", f"{at}experts"]  # type: ignore[assignment]
    assert _errors(_ask(tensors, config, tmp_path)) == []


def test_an_architecture_without_a_table_is_not_asked_and_named(tmp_path: Path) -> None:
    tensors, config = _deepseek()
    config["model_type"] = "seed_oss"
    report = _ask(tensors, config, tmp_path)
    assert report.not_checked["SGLang 0.5.23"].startswith(
        "not asked, because no table of SGLang 0.5.23's modules"
    )
    alone = _ask(tensors, config, tmp_path, loader="sglang")
    assert list(alone.not_checked) == ["loads"]
    assert "loads" not in alone.checked


def test_an_exclusion_that_could_run_for_ever_is_not_tried(tmp_path: Path) -> None:
    tensors, config = _deepseek()
    config["quantization_config"]["modules_to_not_convert"] = ["(a+)+$"]  # type: ignore[index]
    report = _ask(tensors, config, tmp_path, loader="transformers")
    assert "too costly" in report.not_checked["loads"]


def test_a_weight_of_no_axes_is_refused_and_no_traceback(tmp_path: Path) -> None:
    tensors, config = _deepseek()
    tensors["model.layers.0.self_attn.o_proj.weight"] = ("F8_E4M3", ())
    assert "loader-refuses model.layers.0.self_attn.o_proj" in _errors(_ask(tensors, config, tmp_path))
