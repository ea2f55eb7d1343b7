"""Faults next to known ones: in a tower, in an expert, in a wrapper's config, in a folder beside the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.source import Folder
from tests.verify.zoo.llama import LAYERS, whole
from tests.verify.zoo.model import Blob, Model, bf16, shard_bytes

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3\n"
Change = Callable[[Model], object]


def _slugs(folder: Path) -> set[str]:
    return {
        finding.slug
        for report in (lint(Folder(folder)), integrity(Folder(folder)))
        for finding in report.findings
        if finding.severity != "info"
    }


def _wrapped(key: str) -> Model:
    """A language model whose config is a part of a wrapper's."""
    model = whole()
    assert model.config is not None
    text = dict(model.config)
    model.config = {"model_type": "wrapper", "dtype": "bfloat16", key: text}
    if key == "thinker_config":
        model.config[key] = {"text_config": text}
    for name in model.names:
        model.rename(name, f"language_model.{name}")
    return model


def _text(model: Model, key: str) -> dict[str, Any]:
    assert model.config is not None
    part: dict[str, Any] = model.config[key]
    return part.get("text_config", part)


def with_towers() -> Model:
    model = whole()
    assert model.config is not None
    model.config["vision_config"] = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "patch_size": 14,
    }
    model.config["audio_config"] = {"encoder_layers": 4, "d_model": 64, "encoder_ffn_dim": 128}
    shard = model.shards["model.safetensors"]
    for block in range(4):
        for name in (f"visual.blocks.{block}.norm1", f"audio_tower.layers.{block}.self_attn_layer_norm"):
            shard[f"{name}.weight"] = bf16(name, 64)
        for name in (f"visual.blocks.{block}.mlp.fc1", f"audio_tower.layers.{block}.fc1"):
            shard[f"{name}.weight"] = bf16(name, 128, 64)
    shard["visual.patch_embed.proj.weight"] = bf16("patch", 64, 3, 14, 14)
    return model


def with_experts() -> Model:
    model = whole()
    assert model.config is not None
    model.config.update(
        model_type="qwen3_moe", num_experts=4, moe_intermediate_size=64, num_experts_per_tok=2
    )
    shard = model.shards["model.safetensors"]
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        for part in ("gate", "up", "down"):
            del shard[f"{mlp}.{part}_proj.weight"]
        shard[f"{mlp}.gate.weight"] = bf16(f"{mlp}.gate", 4, 128)
        for expert in range(4):
            for part, shape in (("gate", (64, 128)), ("up", (64, 128)), ("down", (128, 64))):
                name = f"{mlp}.experts.{expert}.{part}_proj.weight"
                shard[name] = bf16(name, *shape)
    return model


def _part(key: str, **values: object) -> Change:
    return lambda model: model.config[key].update(values) if model.config else None


def _top(**values: object) -> Change:
    return lambda model: model.config.update(values) if model.config else None


def _halved(model: Model) -> None:
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    model.shards["model.safetensors"][name] = bf16("half", 32, 128)


def _without(front: str) -> Change:
    return lambda model: [model.drop(name) for name in list(model.names) if name.startswith(front)]


@pytest.mark.parametrize("base", [with_towers, with_experts])
def test_the_sound_one_is_clean(base: Callable[[], Model], tmp_path: Path) -> None:
    base().write(tmp_path)
    assert _slugs(tmp_path) == set()


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_part_of_a_wrappers_config_is_held_to_the_tensors(key: str, tmp_path: Path) -> None:
    model = _wrapped(key)
    model.write(tmp_path / "sound")
    assert "config-shape" not in _slugs(tmp_path / "sound")
    _text(model, key)["intermediate_size"] = 999
    model.write(tmp_path / "other")
    assert "config-shape" in _slugs(tmp_path / "other")


@pytest.mark.parametrize(
    ("base", "change", "slug"),
    [
        (with_towers, _part("vision_config", depth=5), "layer-missing"),
        (with_towers, _part("vision_config", depth=3), "layer-beyond"),
        (with_towers, _part("vision_config", hidden_size=96), "config-shape"),
        (with_towers, _part("vision_config", intermediate_size=256), "config-shape"),
        (with_towers, _part("vision_config", patch_size=16), "config-shape"),
        (with_towers, _part("audio_config", encoder_layers=5), "layer-missing"),
        (with_towers, _part("audio_config", d_model=96), "config-shape"),
        (with_towers, _part("audio_config", encoder_ffn_dim=256), "config-shape"),
        (with_towers, _without("visual.blocks.1."), "layer-missing"),
        (with_towers, _without("audio_tower.layers.1."), "layer-missing"),
        (with_experts, _halved, "sibling-shape"),
        (with_experts, _top(moe_intermediate_size=96), "config-shape"),
        (with_experts, _top(num_experts_per_tok=9), "config-shape"),
        (whole, _top(hidden_size=3, num_attention_heads=4), "config-shape"),
    ],
)  # fmt: skip
def test_a_number_of_the_config_that_no_tensor_has_is_found(
    base: Callable[[], Model], change: Change, slug: str, tmp_path: Path
) -> None:
    model = base()
    change(model)
    model.write(tmp_path)
    assert slug in _slugs(tmp_path)


@pytest.mark.parametrize(
    ("file", "data", "slug"),
    [
        ("model.safetensors.index.fp8.json", b'{"weight_map": {"x": "gone.safetensors"}}', "stale-index"),
        ("Tokenizer.json", b"{}", "names-alike"),
        ("Model.safetensors", shard_bytes({"x": bf16("x", 8)}), "names-alike"),
        ("chat_template.jinja", POINTER, "not-the-file"),
        ("model-00001-of-00002.safetensors", POINTER, "not-the-file"),
        ("tokenizer.model", b"\xef\xbb\xbf<html>Sign in</html>", "not-the-file"),
        ("vocab.json", b"<!-- x --><!DOCTYPE html><html></html>", "not-the-file"),
    ],
)
def test_what_lies_beside_the_weights_is_named(file: str, data: bytes, slug: str, tmp_path: Path) -> None:
    whole().write(tmp_path)
    (tmp_path / file).write_bytes(data)
    assert slug in _slugs(tmp_path)


def _with_dense(folder: Path, data: bytes) -> None:
    whole().write(folder)
    rows = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes(
        shard_bytes({"linear.weight": Blob("BF16", (64, 64), data)})
    )


def test_a_module_in_a_folder_is_judged_and_counted(tmp_path: Path) -> None:
    _with_dense(tmp_path, bf16("dense", 64, 64).data)
    report = integrity(Folder(tmp_path))
    assert report.findings == []
    assert report.coverage.total == len(whole().names) + 1
    assert integrity(Folder(tmp_path), read_data=False).coverage.in_part.total() == report.coverage.total


def test_nan_in_a_module_in_a_folder_is_found(tmp_path: Path) -> None:
    _with_dense(tmp_path, b"\xc0\x7f" * 4096)
    assert "nan-value" in {finding.slug for finding in integrity(Folder(tmp_path)).findings}


@pytest.mark.parametrize("leaf", ["lora_A.weight", "ia3_l", "prompt_embeddings"])
def test_an_adapter_is_said_to_be_one(leaf: str, tmp_path: Path) -> None:
    tensors = {f"base_model.layers.0.q_proj.{leaf}": bf16("a", 8, 8)}
    (tmp_path / "adapter_model.safetensors").write_bytes(shard_bytes(tensors))
    assert "this is an adapter" in integrity(Folder(tmp_path)).not_checked["the model"]


@pytest.mark.parametrize(
    ("file", "data", "said"),
    [
        ("x.gguf", b"GGUF" + bytes(60), "a GGUF file (llama.cpp)"),
        ("pytorch_model.bin", b"PK\x03\x04" + bytes(60), "a zip archive"),
        ("model.safetensors.index.json", b"{}", "an index"),
        ("weights", POINTER, "a Git LFS pointer"),
        ("notes.txt", b"words", "give a checkpoint's folder"),
    ],
)
def test_a_file_in_place_of_a_folder_is_named(file: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(data)
    result = CliRunner().invoke(verify, ["all", str(tmp_path / file)])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("file", "said"), [("m.engine", "TensorRT"), ("m.tflite", "TensorFlow Lite"), ("m.zip", "archives")]
)
def test_a_folder_of_other_files_is_named(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(bytes(60))
    (finding,) = [f for f in lint(Folder(tmp_path)).findings if f.slug == "no-weights"]
    assert said in finding.got
