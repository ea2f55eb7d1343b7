"""config.json of a child is one truth: one declaration at the top, the KV cache's with its scales, and a dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.errors import PlanError
from tests.pipeline.parents import prepare, scalar, write_parent
from tests.pipeline.profiles.models import DENSE, FILES, NATIVE, dense_parent, native_parent, recipe, weights

STALE = {"quant_method": "fp8", "weight_block_size": [64, 64]}
UNDONE = """
[[family]]
name = "linears"
match = "model.layers.*.{self_attn,mlp}.*.{weight,weight_scale_inv}"
action = "dequantize"
source_block = [128, 128]
expect = 6
"""
PLACES = ["text_config", "llm_config", "language_config", "thinker_config", "a.b.c"]


def declared(parent: Path, text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(prepare(parent, text).plan.config)
    return found


def nested(place: str, what: dict[str, Any], name: str = "quantization_config") -> dict[str, Any]:
    for part in reversed(place.split(".")):
        what = {part: {"hidden_size": 256, **({name: what} if part == place.split(".")[-1] else what)}}
    return what


def said(config: Any, key: str) -> list[Any]:
    """Every value of `key` in a config, at any depth."""
    if not isinstance(config, dict):
        return []
    return [value for name, value in config.items() if name == key] + [
        found for value in config.values() for found in said(value, key)
    ]


@pytest.mark.parametrize("place", PLACES)
def test_a_declaration_below_the_top_goes_where_the_child_declares_its_own(
    place: str, tmp_path: Path
) -> None:
    """A stale [64, 64] inside would contradict the [128, 128] at the top."""
    parent = dense_parent(tmp_path / "parent", {**DENSE, **nested(place, STALE)})
    config = declared(parent, recipe("fp8"))
    assert said(config, "quantization_config") == [config["quantization_config"]]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert said(config, "hidden_size").count(256) >= 1


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_back_to_bf16_no_declaration_is_left_at_any_depth(name: str, tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    config = json.loads((parent / "config.json").read_text())
    inside = {**NATIVE["quantization_config"], "weight_block_size": [128, 128]}
    (parent / "config.json").write_text(json.dumps({**config, "text_config": {name: inside}}))
    child = declared(parent, recipe("fp8", UNDONE))
    assert said(child, "quantization_config") == said(child, "compression_config") == []


def with_kv_scales(folder: Path) -> Path:
    scale = "model.layers.0.self_attn.k_scale"
    stated = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    return write_parent(
        folder, {FILES[0]: {**weights(), scale: scalar(0.5)}}, config={**DENSE, "quantization_config": stated}
    )


KV_KEPT = """
[[family]]
name = "kv"
match = "**.k_scale"
action = "keep"
reason = "the cache's"
"""


def test_the_kv_caches_scheme_survives_with_its_scales(tmp_path: Path) -> None:
    config = declared(with_kv_scales(tmp_path / "parent"), recipe("compressed-tensors") + KV_KEPT)
    assert config["quantization_config"]["kv_cache_scheme"] == {"num_bits": 8, "type": "float"}


def test_a_profile_without_words_for_the_kv_caches_scheme_is_refused(tmp_path: Path) -> None:
    """Its calibrated cache would run at the scale 1."""
    with pytest.raises(PlanError, match=r"kv_cache_scheme and .*k_scale.*can't declare it"):
        declared(with_kv_scales(tmp_path / "parent"), recipe("fp8") + KV_KEPT)


def test_a_config_without_a_dtype_gets_that_of_its_weights(tmp_path: Path) -> None:
    bare = {key: value for key, value in DENSE.items() if "dtype" not in key}
    assert declared(dense_parent(tmp_path / "parent", bare), recipe("fp8"))["torch_dtype"] == "bfloat16"
    nested_dtype = {**bare, "text_config": {"dtype": "float16"}}
    assert "torch_dtype" not in declared(dense_parent(tmp_path / "other", nested_dtype), recipe("fp8"))


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_numbers_as_python_writes_them_pass_through(number: str, tmp_path: Path) -> None:
    parent = dense_parent(tmp_path / "parent")
    text = (parent / "config.json").read_text().rstrip().removesuffix("}")
    (parent / "config.json").write_text(text + f', "time_step_limit": [0.0, {number}]}}')
    assert f"{number}\n" in prepare(parent, recipe("fp8")).plan.config.decode()
