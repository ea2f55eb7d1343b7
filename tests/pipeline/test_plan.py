"""The plan: the real checkpoint comes out right to the byte, from headers alone, and planning is pure."""

from __future__ import annotations

import builtins
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.plan.facts import plan_json
from shardmill.pipeline.plan.plan import make_plan
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.stages.classify import classify
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.toy.config import config
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers
from shardmill.pipeline.types import Parent
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import RECIPE, prepare, write_recipe

# weights: number, BF16 bytes, FP8 bytes, scale bytes, block; from the parent's published layout
FAMILIES = {
    "KDA q/k/v + b/f_a/g_a": (204, 6_934_233_088, 3_467_116_544, 13_543_424, [32, 32]),
    "o_proj": (46, 3_892_314_112, 1_946_157_056, 475_136, [128, 128]),
    "MLA q_a/kv_a/q_b": (36, 805_306_368, 402_653_184, 98_304, [128, 128]),
    "shared experts + dense MLP": (138, 3_070_230_528, 1_535_115_264, 374_784, [128, 128]),
    "lm_head": (1, 1_268_776_960, 634_388_480, 154_880, [128, 128]),
    "vision Linears": (124, 1_090_519_040, 545_259_520, 133_120, [128, 128]),
}
REWRITTEN = (
    "1 4 7 9 12 15 18 20 21 23 26 29 32 34 37 40 43 45 48 51 54 56 57 59 62 65 68 70 73 76 79 81 84 87 "
    "90 92 95 98 101 103 106 109 112 114 115 117 120"
)


def plan_of(recipe: Recipe, parent: Parent) -> Plan:
    return make_plan(recipe, parent, classify(Checkpoint(recipe, parent.folder), parent))


@pytest.fixture(scope="module")
def real() -> Parent:
    """The real parent as its headers declare it; no file stands behind it."""
    size = SIZES["headers"]
    headers = tuple(toy_headers(size))
    stats = {header.shard: (header.file_bytes, 0, 0, 0) for header in headers} | {
        "tokenizer.json": (9, 0, 0, 0)
    }
    return Parent(
        Path("/nowhere"), headers, stats, config(size.dimensions), ("tokenizer.json",), {}, single=False
    )


@pytest.fixture(scope="module")
def with_vision(real: Parent) -> Plan:
    return plan_of(load(ROOT / "pipeline.toml"), real)


@pytest.fixture(scope="module")
def without_vision(real: Parent) -> Plan:
    return plan_of(load(ROOT / "recipes" / "glm-5.3-flash-bf16-vision.toml"), real)


def test_the_real_parent_is_what_was_published(real: Parent, with_vision: Plan) -> None:
    assert plan_json(with_vision, real)["parent"] == {
        "files": 121,
        "tensors": 150_226,
        "tensor_bytes": 194_644_952_184,
        "file_bytes": 194_665_046_744,
    }


def test_the_real_child_comes_out_to_the_byte(real: Parent, with_vision: Plan) -> None:
    facts = plan_json(with_vision, real)
    assert facts["converted"] == 549
    assert facts["config_entries"] == 38_572
    assert facts["output"] == {
        "files": 121,
        "tensors": 150_775,
        "tensor_bytes": 186_129_041_784,
        "file_bytes": 186_149_208_800,
    }


def test_without_vision_the_real_child_comes_out_to_the_byte(real: Parent, without_vision: Plan) -> None:
    facts = plan_json(without_vision, real)
    assert (facts["converted"], facts["config_entries"]) == (425, 38_448)
    assert facts["output"] == {
        "files": 121,
        "tensors": 150_651,
        "tensor_bytes": 186_674_168_184,
        "file_bytes": 186_694_322_008,
    }


def test_pieces_of_a_file_that_is_passed_on_are_made_when_they_are_asked_for(
    real: Parent, with_vision: Plan
) -> None:
    """A plan holds none for them; each is its own source, and all are there, in file order."""
    passed_on = [shard for shard in with_vision.shards if not shard.rewritten]
    assert [shard.made for shard in passed_on] == [()] * 74
    headers = {header.shard: header for header in real.headers}
    for shard in passed_on:
        assert shard.header is headers[shard.file]
        assert [(piece.ref, piece.part) for piece in shard.pieces] == [
            (ref, "bytes") for ref in shard.header.tensors
        ]
        assert all(piece.source is piece.ref and piece.action.kind == "copy" for piece in shard.pieces)


def test_forty_seven_files_are_rewritten_and_the_others_passed_on(with_vision: Plan) -> None:
    assert [shard.file for shard in with_vision.shards if shard.rewritten] == [
        f"model-{int(number):05d}-of-00120.safetensors" for number in REWRITTEN.split()
    ]


def test_each_converting_family_has_the_published_bytes(real: Parent, with_vision: Plan) -> None:
    families = plan_json(with_vision, real)["families"]
    assert {
        name: tuple(facts[key] for key in ("tensors", "bytes_before", "bytes_after", "scale_bytes", "block"))
        for name, facts in families.items()
        if facts["action"] == "quantize"
    } == FAMILIES


def test_families_add_up_to_the_whole(real: Parent, with_vision: Plan) -> None:
    """What the families come to before and after is the parent's and the output's tensor bytes."""
    families = with_vision.families
    assert sum(family.tensors for family in families) == len(real.tensors)
    assert sum(family.bytes_before for family in families) == real.tensor_bytes
    assert sum(family.bytes_after + family.scale_bytes for family in families) == with_vision.tensor_bytes
    assert all(family.reason for family in families if family.action == "keep")


def test_the_vision_switch_touches_shard_120_alone(with_vision: Plan, without_vision: Plan) -> None:
    """Every other shard has the same key in both plans: nothing of it would be made again."""
    keys = [{shard.file: shard.key for shard in plan.shards} for plan in (with_vision, without_vision)]
    assert [file for file in keys[0] if keys[0][file] != keys[1][file]] == [
        "model-00120-of-00120.safetensors"
    ]


def test_a_weights_scales_stand_in_its_own_file(with_vision: Plan) -> None:
    for weight in with_vision.conversions:
        assert with_vision.weight_map[weight] == with_vision.weight_map[f"{weight}_scale_inv"]


def test_the_parents_names_are_all_there(real: Parent, with_vision: Plan) -> None:
    scales = {f"{weight}_scale_inv" for weight in with_vision.conversions}
    assert with_vision.weight_map.keys() == real.tensors.keys() | scales
    assert with_vision.dropped == ()


def test_plan_json_holds_what_the_issue_names(real: Parent, with_vision: Plan) -> None:
    facts = plan_json(with_vision, real)
    assert facts.keys() >= {
        "parent",
        "output",
        "converted",
        "families",
        "files_rewritten",
        "config_entries",
        "key",
    }
    assert len(facts["files_rewritten"]) == 47
    assert json.loads(json.dumps(facts)) == facts


def test_the_plan_says_at_which_tensor_parallel_sizes_the_child_loads(
    real: Parent, with_vision: Plan
) -> None:
    """The reason names a weight whose share ends inside a block."""
    loads = plan_json(with_vision, real)["loads_at"]
    assert (loads["1"], loads["2"]) == ("yes", "yes")
    assert loads["4"] == "lm_head.weight: 38720 rows a rank, not a multiple of the block's 128"
    assert loads["8"] != "yes"


def test_config_entries_and_quantized_tensors_agree_in_both_directions(
    real: Parent, with_vision: Plan
) -> None:
    """One entry a quantized Linear, the draft's twice; experts NVFP4, converted ones FP8_BLOCK with their block."""
    layers = json.loads(with_vision.config)["quantization_config"]["quantized_layers"]
    kda = re.compile(r"self_attn\.(q|k|v|b|f_a|g_a)_proj\.weight$")
    expected: dict[str, dict[str, Any]] = {}
    for name, ref in real.tensors.items():
        module = name.removesuffix(".weight")
        if ref.dtype == "U8":
            expected[module] = {"quant_algo": "NVFP4", "group_size": 16}
        elif name in with_vision.conversions:
            expected[module] = {"quant_algo": "FP8_BLOCK", "group_size": 32 if kda.search(name) else 128}
    draft = "model.language_model.layers.45."
    expected |= {
        name.replace(draft, "model.layers.45."): fact
        for name, fact in expected.items()
        if name.startswith(draft)
    }
    assert layers == expected
    assert len(layers) == with_vision.config_entries


def test_config_keeps_all_but_what_the_conversion_changes(real: Parent, with_vision: Plan) -> None:
    """quant_algo MIXED_PRECISION, config_groups gone, quantized_layers added, fewer ignores; the rest as it was."""
    before, after = dict(real.config), json.loads(with_vision.config)
    stated, declared = dict(before.pop("quantization_config")), after.pop("quantization_config")
    assert after == before
    assert declared.pop("quant_algo") == "MIXED_PRECISION"
    assert set(declared.pop("ignore")) < set(stated.pop("ignore"))
    declared.pop("quantized_layers")
    stated.pop("config_groups")
    stated.pop("quant_algo")
    assert declared == stated


def test_ignore_globs_that_hit_a_converted_module_are_dropped_and_no_others(
    real: Parent, with_vision: Plan
) -> None:
    kept = json.loads(with_vision.config)["quantization_config"]["ignore"]
    modules = [name.removesuffix(".weight") for name in with_vision.conversions]
    aliases = [name.replace("model.language_model.", "language_model.model.") for name in modules]
    aliases += [name.replace("model.visual.", "visual.") for name in modules]
    hit = [glob for glob in kept if any(fnmatchcase(name, glob) for name in modules + aliases)]
    assert hit == []
    gone = set(real.config["quantization_config"]["ignore"]) - set(kept)
    assert gone >= {
        "lm_head",
        "*.self_attn.in_proj_qkvbfg_a",
        "*.self_attn.fused_qkv_a_proj",
        "*.mlp.gate_up_proj",
    }
    assert gone >= {"model.visual.*", "visual.*", "*.visual.*", "*.self_attn.q_proj", "*.self_attn.o_proj"}
    assert {"*.self_attn.kv_b_proj", "*.eh_proj", "*.mlp.gate", "model.language_model.embed_tokens"} <= set(
        kept
    )


def test_without_vision_its_ignore_globs_stay(without_vision: Plan) -> None:
    kept = json.loads(without_vision.config)["quantization_config"]["ignore"]
    assert {"model.visual.*", "visual.*"} <= set(kept)


def test_planning_is_pure(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe and headers give the same plan, and no file, clock, chance or environment is asked."""
    recipe, first = load(write_recipe(parent.parent)), prepare(parent)

    def forbidden(*args: object, **named: object) -> None:
        raise AssertionError(f"planning touched the world: {args}")

    with monkeypatch.context() as patch:
        for place, name in [(builtins, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")]:
            patch.setattr(place, name, forbidden)
        for place, name in [(os, "getenv"), (os, "urandom"), (time, "time"), (time, "time_ns")]:
            patch.setattr(place, name, forbidden)
        again = plan_of(recipe, replace(first.parent, folder=Path("/elsewhere")))
    assert again == first.plan
    assert canonical(plan_json(again, first.parent)) == canonical(plan_json(first.plan, first.parent))


def test_the_key_changes_with_whatever_can_change_a_byte(parent: Path) -> None:
    """Block, numerics, a carried file's name, config, header: each gives another key. The parent's place does not."""
    first = prepare(parent).plan
    changes = {
        "block": RECIPE.replace("[8, 8]", "[4, 4]"),
        "numerics": RECIPE.replace("block = [8, 8]", 'block = [8, 8]\nnumerics = "ue8m0/1"'),
        "revision": RECIPE.replace("0123456789abcdef0123456789abcdef01234567", "f" * 40),
    }
    keys = {what: prepare(parent, text).plan.key for what, text in changes.items()}
    (parent / "NOTICE").write_text("new")
    keys["carried"] = prepare(parent).plan.key
    (parent / "NOTICE").unlink()
    config = json.loads((parent / "config.json").read_text())
    (parent / "config.json").write_text(json.dumps({**config, "eps": 1e-05}))
    keys["config"] = prepare(parent).plan.key
    (parent / "config.json").write_text(json.dumps(config))
    assert len({first.key, *keys.values()}) == 1 + len(keys)
    moved = parent.rename(parent.with_name("moved"))
    assert prepare(moved).plan == first


def test_a_shards_key_names_only_what_is_in_it(parent: Path) -> None:
    first, other = prepare(parent).plan, prepare(parent, RECIPE.replace("[8, 8]", "[4, 4]")).plan
    changed = [a.file for a, b in zip(first.shards, other.shards, strict=True) if a.key != b.key]
    assert changed == ["model-00003-of-00003.safetensors"]


def test_a_dropped_family_leaves_no_tensor_and_an_emptied_shard_leaves_no_file(parent: Path) -> None:
    text = RECIPE.replace(
        'match = ["model.layers.*.norm.weight", "model.embed.weight"]', 'match = "model.layers.*.norm.weight"'
    )
    text += '\n[[family]]\nname = "embed"\nmatch = "model.embed.weight"\naction = "drop"\nreason = "x"\n'
    text = text.replace(
        "{weight,weight_scale,weight_scale_2,input_scale}", "{weight,weight_scale,weight_scale_2}"
    )
    text += '\n[[family]]\nname = "in"\nmatch = "**.input_scale"\naction = "drop"\nreason = "x"\n'
    plan = prepare(parent, text).plan
    assert "model-input-scales.safetensors" not in [shard.file for shard in plan.shards]
    assert plan.dropped[0] == "model.embed.weight"
    assert len(plan.dropped) == 5
    assert not set(plan.dropped) & plan.weight_map.keys()


CASES: Mapping[str, tuple[str, str, str]] = {
    "rows that ranks cannot share": (
        "tensor_parallel = [1, 2]",
        "tensor_parallel = [3]",
        "16, is not divisible by 3 ranks",
    ),
    "half a block a rank": (
        "tensor_parallel = [1, 2]",
        "tensor_parallel = [8]",
        "2 rows a rank, not a multiple",
    ),
    "a block that is not square": ("block = [8, 8]", "block = [8, 4]", "square"),
    "unknown numerics": ("block = [8, 8]", 'block = [8, 8]\nnumerics = "amax/9"', "'amax/9' are not known"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_loader_could_load_is_refused(parent: Path, case: str) -> None:
    old, new, words = CASES[case]
    with pytest.raises(PlanError, match=words):
        prepare(parent, RECIPE.replace(old, new))
