"""What each profile writes and how it names it; what it has no words for is refused before a byte is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.plan.profiles import PROFILES
from tests.pipeline.parents import bf16, build, prepare, published, write_parent
from tests.pipeline.profiles.models import (
    FILES,
    LINEAR,
    LM_HEAD,
    dense_parent,
    native_parent,
    recipe,
    weights,
)

QUANTIZED = "model.layers.0.self_attn.q_proj"


def config_of(out: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


def test_an_unknown_profile_is_a_problem_of_the_recipe_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r":4: .*'fp9' is no profile; choose from .*fp8"):
        prepare(dense_parent(tmp_path / "parent"), recipe("fp9"))


def test_fp8_declares_one_block_and_every_float_matrix_sorted(tmp_path: Path) -> None:
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("fp8"))
    assert config_of(tmp_path / "out")["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }


def test_fp8_says_ue8m0_only_where_every_scale_is_a_power_of_two(tmp_path: Path) -> None:
    parent = dense_parent(tmp_path / "parent")
    build(parent, tmp_path / "all", recipe("fp8", LINEAR + 'numerics = "ue8m0/1"\n'))
    assert config_of(tmp_path / "all")["quantization_config"]["scale_fmt"] == "ue8m0"
    mixed = (
        LINEAR.replace(".{self_attn,mlp}.", ".mlp.").replace("expect = 6", "expect = 2")
        + """
numerics = "ue8m0/1"
[[family]]
name = "attention"
match = "model.layers.*.self_attn.*.weight"
action = "quantize"
block = [128, 128]
expect = 4
"""
    )
    build(parent, tmp_path / "some", recipe("fp8", mixed))
    assert "scale_fmt" not in config_of(tmp_path / "some")["quantization_config"]


def test_compressed_tensors_declares_the_block_strategy_and_names_scales_weight_scale(tmp_path: Path) -> None:
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("compressed-tensors"))
    stated = config_of(tmp_path / "out")["quantization_config"]
    weights = stated["config_groups"]["group_0"]["weights"]
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "float-quantized")
    assert (weights["strategy"], weights["block_structure"]) == ("block", [128, 128])
    assert stated["ignore"] == ["lm_head", "model.embed_tokens"]
    with safe_open(tmp_path / "out" / FILES[0], "np") as shard:
        scale = shard.get_slice(f"{QUANTIZED}.weight_scale")
        assert (scale.get_dtype(), scale.get_shape()) == ("F32", [2, 2])


def test_codes_and_scales_are_the_same_bits_under_every_profile(tmp_path: Path) -> None:
    parent, seen = dense_parent(tmp_path / "parent"), {}
    for profile in PROFILES:
        build(parent, tmp_path / profile, recipe(profile))
        manifest = json.loads((tmp_path / profile / "shardmill.manifest.json").read_text())
        digests = manifest["shards"][FILES[0]]["tensors"]
        seen[profile] = {name.replace("_scale_inv", "_scale"): digest for name, digest in digests.items()}
    assert seen["fp8"] == seen["compressed-tensors"] == seen["modelopt-mixed"]


@pytest.mark.parametrize(
    ("profile", "linears", "head", "reason"),
    [
        (
            "fp8",
            LINEAR,
            LM_HEAD.replace('"keep"', '"quantize"\nblock = [128, 128]\nexpect = 1'),
            "vocabulary",
        ),
        (
            "compressed-tensors",
            LINEAR,
            LM_HEAD.replace('"keep"', '"quantize"\nblock = [128, 128]\nexpect = 1'),
            "vocabulary",
        ),
        (
            "compressed-tensors",
            LINEAR.replace("128, 128", "32, 32"),
            LM_HEAD,
            r"knows blocks of \[128,128\] alone",
        ),
        ("fp8", LINEAR.replace("128, 128", "64, 128"), LM_HEAD, "square"),
        ("modelopt-mixed", LINEAR.replace("128, 128", "64, 128"), LM_HEAD, "square"),
        (
            "fp8",
            LINEAR.replace(".{self_attn,mlp}.", ".mlp.").replace("expect = 6", "expect = 2")
            + LINEAR.replace(".{self_attn,mlp}.", ".self_attn.")
            .replace("expect = 6", "expect = 4")
            .replace("128, 128", "32, 32")
            .replace('"linears"', '"attention"'),
            LM_HEAD,
            "one weight_block_size",
        ),
        ("fp8", LINEAR + 'numerics = "amx/1"\n', LM_HEAD, "'amx/1' are not known; choose from amax/1"),
    ],
)
def test_what_a_profile_has_no_words_for_is_refused_at_plan_time_with_the_reason(
    tmp_path: Path, profile: str, linears: str, head: str, reason: str
) -> None:
    head = head.replace('reason = "loaders want floats"\n', "") if "quantize" in head else head
    with pytest.raises(PlanError, match=reason):
        prepare(dense_parent(tmp_path / "parent"), recipe(profile, linears, head))


def test_packed_experts_are_refused_by_the_profiles_that_cannot_declare_them(tmp_path: Path) -> None:
    tensors = {**weights(), "model.norm.weight": ("U8", (4, 4), bytes(16))}
    parent = write_parent(tmp_path / "parent", {FILES[0]: tensors}, config={})
    for profile in ("fp8", "compressed-tensors"):
        with pytest.raises(PlanError, match=r"model\.norm\.weight: is packed U8"):
            prepare(parent, recipe(profile))


def test_a_recipe_that_converts_nothing_passes_the_config_on(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    keep = LINEAR.replace('.*.weight"', '.*.{weight,weight_scale_inv}"').replace('"quantize"', '"keep"')
    keep = keep.replace("block = [128, 128]\nexpect = 6", 'reason = "FP8 already"')
    for profile in ("fp8", "compressed-tensors"):
        build(parent, tmp_path / profile, recipe(profile, keep))
        assert config_of(tmp_path / profile) == json.loads((parent / "config.json").read_text())
        ours, theirs = published(tmp_path / profile), published(parent)
        assert all(ours[file] == theirs[file] for file in FILES)


def test_stacked_experts_are_listed_by_their_module(tmp_path: Path) -> None:
    tensors = {**weights(), "model.layers.0.mlp.experts.gate_up_proj": bf16("stack", 2, 8, 256)}
    parent = write_parent(tmp_path / "parent", {FILES[0]: tensors}, config={})
    kept = LM_HEAD.replace(
        '"lm_head.weight"', '["lm_head.weight", "model.layers.*.mlp.experts.gate_up_proj"]'
    )
    build(parent, tmp_path / "out", recipe("fp8", head=kept))
    stated = config_of(tmp_path / "out")["quantization_config"]
    assert "model.layers.0.mlp.experts" in stated["modules_to_not_convert"]


def test_a_module_that_holds_codes_is_not_listed_for_an_odd_parameter_beside_them(tmp_path: Path) -> None:
    """Kimi's A_log has four axes; a loader takes a listed module for all that lies in it, o_proj too."""
    tensors = {**weights(), "model.layers.0.self_attn.A_log": bf16("a", 1, 1, 4, 1)}
    parent = write_parent(tmp_path / "parent", {FILES[0]: tensors}, config={})
    kept = LM_HEAD.replace('"lm_head.weight"', '["lm_head.weight", "model.layers.*.self_attn.A_log"]')
    linears = LINEAR.replace(".*.weight", ".*_proj.weight")
    build(parent, tmp_path / "out", recipe("fp8", linears, kept))
    stated = config_of(tmp_path / "out")["quantization_config"]
    assert "model.layers.0.self_attn.A_log" in stated["modules_to_not_convert"]
    assert "model.layers.0.self_attn" not in stated["modules_to_not_convert"]


def test_what_is_kept_is_listed_by_the_names_that_runtimes_fuse_it_under_too(tmp_path: Path) -> None:
    kept = LM_HEAD.replace(
        '"lm_head.weight"', '["lm_head.weight", "model.layers.*.self_attn.{q,k}_proj.weight"]'
    )
    linears = LINEAR.replace("{self_attn,mlp}", "mlp").replace("expect = 6", "expect = 2")
    fused = """
[[fused]]
name = "attention"
match = "model.layers.*.self_attn.{q,k}_proj.weight"
runtime_names = ["qk_proj"]
"""
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("fp8", linears, kept + fused))
    listed = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.qk_proj"} <= set(listed)
