"""The profile `modelopt`: what stock servers gate on, in config.json and in hf_quant_config.json beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardmill.pipeline.plan.profiles.modelopt import HF_QUANT_FILE
from tests.pipeline.parents import build, prepare
from tests.pipeline.profiles.models import dense_parent, recipe
from tests.pipeline.profiles.test_unread import RECIPE, parent


def files(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json and hf_quant_config.json declare."""
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    return config, json.loads((out / HF_QUANT_FILE).read_text())


def test_blocks_are_stock_words_under_the_method_that_sglang_gates_on(tmp_path: Path) -> None:
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("modelopt"))
    config, beside = files(tmp_path / "out")
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt_mixed", "MIXED_PRECISION")
    assert {entry["quant_algo"] for entry in config["quantized_layers"].values()} == {"FP8_PB_WO"}
    assert config["ignore"] == ["lm_head", "model.embed_tokens"]
    assert beside["producer"]["name"] == "modelopt"
    said = beside["quantization"]
    assert said["quantized_layers"] == config["quantized_layers"]
    assert (said["exclude_modules"], said["kv_cache_quant_algo"]) == (config["ignore"], None)


def test_nvfp4_states_its_group(tmp_path: Path) -> None:
    made = parent(tmp_path / "parent")
    build(made, tmp_path / "out", RECIPE.format(profile="modelopt", to="nvfp4", loaders=""))
    said = files(tmp_path / "out")[1]["quantization"]
    assert said["group_size"] == 16
    assert {entry["quant_algo"] for entry in said["quantized_layers"].values()} == {"W4A16_NVFP4"}


def test_the_file_goes_with_the_profile(tmp_path: Path) -> None:
    """Built again under another profile, the folder has no hf_quant_config.json."""
    made = dense_parent(tmp_path / "parent")
    build(made, tmp_path / "out", recipe("modelopt"))
    build(made, tmp_path / "out", recipe("fp8"))
    assert not (tmp_path / "out" / HF_QUANT_FILE).exists()


def test_ours_keeps_its_word_and_lists_what_has_no_codes(tmp_path: Path) -> None:
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("modelopt-mixed"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert config["ignore"] == ["lm_head", "model.embed_tokens"]
    assert not (tmp_path / "out" / HF_QUANT_FILE).exists()


def test_a_child_of_it_is_a_parent_of_it(tmp_path: Path) -> None:
    """What says modelopt_mixed is taken for ModelOpt's own, and passed on whole."""
    made = parent(tmp_path / "parent")
    build(made, tmp_path / "out", RECIPE.format(profile="modelopt", to="nvfp4", loaders=""))
    again = prepare(tmp_path / "out", RECIPE_OF_NOTHING)
    config = json.loads(again.plan.config)["quantization_config"]
    assert config["quant_method"] == "modelopt_mixed"
    assert len(config["quantized_layers"]) == 3


RECIPE_OF_NOTHING = """\
format = 1
name = "again"
[output]
profile = "modelopt-mixed"
[[family]]
name = "all"
match = "**"
action = "keep"
reason = "as it is"
"""
