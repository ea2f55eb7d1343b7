"""`init` decides as a person would: known names by their meaning, odd shapes and unknown names kept and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.init.draft import RecipeDraft, draft
from shardmill.pipeline.init.names import by_pattern, globs_for
from shardmill.pipeline.plan.types import FamilySummary
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.recipe.globs import GlobSet, expand
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers, write_parent
from shardmill.pipeline.types import Shape
from tests.pipeline.init.layouts import Tensor, parent_of
from tests.pipeline.profiles.models import dense_parent

ROOT = Path(__file__).parents[3]
LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "toy"
    write_parent(folder, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    return folder


def init(*arguments: str) -> Any:
    return CliRunner().invoke(shardmill, ["init", *arguments], catch_exceptions=False)


def families(made: RecipeDraft) -> dict[str, FamilySummary]:
    return {family.name: family for family in made.plan.families if family.tensors}


def bf16(shapes: dict[str, Shape], at: str = LAYER) -> list[Tensor]:
    return [(at + name, "BF16", shape) for name, shape in shapes.items()]


ATTENTION: dict[str, Shape] = {
    "self_attn.q_proj.weight": (512, 256),
    "self_attn.k_proj.weight": (256, 256),
    "self_attn.v_proj.weight": (256, 256),
    "self_attn.o_proj.weight": (256, 512),
    "input_layernorm.weight": (256,),
}


def drafted(tensors: list[Tensor], profile: str = "fp8", **config: Any) -> RecipeDraft:
    return draft(parent_of("made", config, tensors), "made", profile)


def test_on_the_toy_parent_it_plans_what_the_shipped_recipe_plans(toy: Path, tmp_path: Path) -> None:
    assert init(str(toy), "-o", str(tmp_path / "drafted.toml")).exit_code == 0
    ours = prepare(recipes.load(tmp_path / "drafted.toml"), toy)
    shipped = prepare(recipes.load(ROOT / "pipeline.toml"), toy)
    assert actions(ours) == actions(shipped)
    assert [shard.key for shard in ours.plan.shards] == [shard.key for shard in shipped.plan.shards]
    assert (ours.plan.config, ours.plan.loads) == (shipped.plan.config, shipped.plan.loads)


def actions(prepared: Any) -> dict[str, Any]:
    """Tensor -> what is done with it, to the last option."""
    return {each.source.name: each.action for each in prepared.products["assignments"]}


def test_what_it_does_not_know_it_keeps_and_says(tmp_path: Path) -> None:
    strange = bf16({**ATTENTION, "mixer.in_proj_qkvz.weight": (1024, 256), "mixer.gain": (4, 4)})
    made = drafted(strange)
    assert families(made)["unknown"].action == "keep"
    assert made.unknown == ("model.layers.*.mixer.gain", "model.layers.*.mixer.in_proj_qkvz.weight")


def test_fused_rows_that_end_inside_a_block_keep_the_whole_group() -> None:
    """GLM-4.5-Air's first MLP is 10,944 wide: gate would end in the middle of the block that up begins in."""
    ragged = {
        "mlp.gate_proj.weight": (192, 256),
        "mlp.up_proj.weight": (192, 256),
        "mlp.down_proj.weight": (256, 256),
    }
    made = families(drafted(bf16({**ATTENTION, **ragged})))
    assert (
        made["dense MLP of odd shape"].tensors,
        made["dense MLP"].tensors,
    ) == (2, 1)


@pytest.mark.parametrize(
    ("homes", "called"),
    [
        (("mlp",), "dense MLP"),
        (("feed_forward",), "dense MLP"),
        (("mlp.shared_experts",), "shared experts"),
        (("mlp.shared_expert",), "shared experts"),
        (("mlp.shared_experts", "mlp"), "shared experts + dense MLP"),
    ],
)
def test_a_family_is_called_what_its_tensors_are(homes: tuple[str, ...], called: str) -> None:
    """A model without shared experts, or without a dense MLP, has no family that names them."""
    made = families(
        drafted(bf16({**ATTENTION, **{f"{home}.down_proj.weight": (256, 256) for home in homes}}))
    )
    assert [name for name in made if "MLP" in name or "shared" in name] == [called]


def test_columns_that_end_inside_a_block_are_kept() -> None:
    made = families(drafted(bf16({**ATTENTION, "mlp.down_proj.weight": (256, 200)})))
    assert made["dense MLP of odd shape"].action == "keep"


def test_a_group_with_a_member_that_cannot_convert_is_kept_whole() -> None:
    tensors = bf16({name: shape for name, shape in ATTENTION.items() if "v_proj" not in name})
    tensors.append((LAYER + "self_attn.v_proj.weight", "I64", (256, 256)))
    made = families(drafted(tensors))
    assert made["attention q/k/v of odd shape"].tensors == 2


def test_one_expert_matrix_that_does_not_fit_keeps_its_whole_bank() -> None:
    experts = {
        f"mlp.experts.{expert}.{matrix}_proj.weight": shape
        for expert in range(2)
        for matrix, shape in (("gate", (256, 256)), ("up", (256, 256)), ("down", (256, 200)))
    }
    made = families(drafted(bf16({**ATTENTION, **experts})))
    assert (made["routed experts"].action, made["routed experts"].tensors) == ("keep", 6)


def test_layers_of_two_kinds_are_told_apart_by_their_numbers() -> None:
    """In Kimi-Linear a q_proj is KDA's in some layers and MLA's in others."""
    kda: dict[str, Shape] = {
        f"self_attn.{x}_proj.weight": (256, 256) for x in ("q", "k", "v", "b", "f_a", "g_a")
    }
    mla: dict[str, Shape] = {
        "self_attn.q_proj.weight": (256, 256),
        "self_attn.kv_a_proj_with_mqa.weight": (256, 256),
    }
    tensors = [*bf16(kda), *bf16(mla, "model.layers.1."), *bf16(kda, "model.layers.2.")]
    tensors += [(f"model.layers.{layer}.self_attn.A_log", "F32", (2,)) for layer in (0, 2)]
    made = drafted(tensors, "modelopt-mixed")
    assert 'match = "model.layers.1.self_attn.q_proj.weight"' in made.text
    assert '"model.layers.{0,2}.self_attn.q_proj.weight"' in made.text
    assert 'match = "model.layers.{0,2}.self_attn.{q,k,v,b,f_a,g_a}_proj.weight"' in made.text


def test_a_small_block_is_taken_only_where_the_profile_has_many(tmp_path: Path) -> None:
    kda: dict[str, Shape] = {f"self_attn.{x}_proj.weight": (256, 256) for x in ("q", "k", "v", "f_a", "g_a")}
    tensors = [
        *bf16({**kda, "self_attn.b_proj.weight": (64, 256)}),
        (LAYER + "self_attn.A_log", "F32", (64,)),
    ]
    mixed = families(drafted(tensors, "modelopt-mixed"))["KDA q/k/v + b/f_a/g_a"]
    assert (mixed.action, mixed.block) == ("quantize", (32, 32))
    assert families(drafted(tensors))["KDA q/k/v + b/f_a/g_a of odd shape"].action == "keep"


def test_kv_heads_are_dealt_out_no_finer_than_they_are() -> None:
    grouped = {**ATTENTION, "self_attn.q_proj.weight": (1024, 256), "self_attn.o_proj.weight": (256, 1024)}
    made = drafted(bf16(grouped), num_attention_heads=8, num_key_value_heads=2)
    assert "shares = 2" in made.text
    assert [at.reason for at in made.plan.loads] == [None, None, None, None]
    one = {**grouped, "self_attn.k_proj.weight": (128, 256), "self_attn.v_proj.weight": (128, 256)}
    mixed = drafted(bf16(one), "modelopt-mixed", num_attention_heads=8, num_key_value_heads=1)
    assert families(mixed)["attention q/k/v"].block == (128, 128)


@pytest.mark.parametrize(
    "packed",
    [
        [("w.weight", "U8", (8, 64)), ("w.weight_scale", "F8_E4M3", (8, 8)), ("w.weight_scale_2", "F32", ())],
        [
            ("mlp.experts.gate_up_proj_blocks", "U8", (2, 8, 64)),
            ("mlp.experts.gate_up_proj_scales", "U8", (2, 8, 4)),
        ],
        [
            ("w.weight_packed", "I32", (8, 64)),
            ("w.weight_scale", "BF16", (8, 4)),
            ("w.weight_shape", "I64", (2,)),
        ],
    ],
    ids=["nvfp4", "mxfp4", "int4"],
)
def test_packed_weights_pass_through_with_their_scales(packed: list[Tensor]) -> None:
    tensors = [
        *((LAYER + name, dtype, shape) for name, dtype, shape in packed),
        (LAYER + "norm.weight", "BF16", (8,)),
    ]
    made = families(drafted(tensors))
    assert made["packed weights"].tensors == len(packed)
    assert made["packed weights"].action == "keep"


@pytest.mark.parametrize("profile", ["fp8", "compressed-tensors", "modelopt-mixed"])
def test_beside_mxfp4_experts_nothing_more_is_quantized_and_the_config_stays(profile: str) -> None:
    """gpt-oss: no profile declares MXFP4 and block FP8 in one checkpoint."""
    packed: list[Tensor] = [
        (LAYER + "mlp.experts.gate_up_proj_blocks", "U8", (2, 8, 8, 16)),
        (LAYER + "mlp.experts.gate_up_proj_scales", "U8", (2, 8, 8)),
    ]
    made = drafted([*bf16(ATTENTION), *packed], profile, quantization_config={"quant_method": "mxfp4"})
    assert families(made)["float Linears"].tensors == 4
    assert made.plan.conversions == {}


@pytest.mark.parametrize("profile", ["fp8", "compressed-tensors", "modelopt-mixed"])
def test_beside_fp8_with_one_scale_a_tensor_nothing_more_is_quantized(profile: str) -> None:
    tensors: list[Tensor] = [
        *bf16(ATTENTION),
        (LAYER + "mlp.up_proj.weight", "F8_E4M3", (256, 256)),
        (LAYER + "mlp.up_proj.weight_scale", "F32", ()),
    ]
    made = drafted(tensors, profile, quantization_config={"quant_method": "fbgemm_fp8"})
    assert made.plan.conversions == {}


def test_block_fp8_passes_through_or_goes_back_to_bf16(tmp_path: Path) -> None:
    tensors = [
        *bf16({"input_layernorm.weight": (256,)}),
        (LAYER + "mlp.up_proj.weight", "F8_E4M3", (256, 256)),
        (LAYER + "mlp.up_proj.weight_scale_inv", "F32", (2, 2)),
    ]
    parent = parent_of("native", {"quantization_config": {"weight_block_size": [128, 128]}}, tensors)
    assert families(draft(parent, "x", "fp8"))["FP8 already"].tensors == 2
    assert families(draft(parent, "x", "fp8", "bf16"))["FP8 back to BF16"].action == "dequantize"


def test_the_recipe_in_the_way_is_not_written_over(tmp_path: Path) -> None:
    parent, recipe = dense_parent(tmp_path / "parent"), tmp_path / "pipeline.toml"
    recipe.write_text("mine")
    result = CliRunner().invoke(shardmill, ["init", str(parent), "-o", str(recipe)])
    assert "exists already" in str(result.exception)
    assert recipe.read_text() == "mine"
    assert init(str(parent), "-o", str(recipe), "--force").exit_code == 0


def test_json_tells_families_sizes_and_what_is_unknown(tmp_path: Path) -> None:
    facts = json.loads(
        init(str(dense_parent(tmp_path / "p")), "-o", str(tmp_path / "r.toml"), "--json").stdout
    )
    assert facts["unknown"] == []
    assert facts["families"]["lm_head"][0] == "keep"
    assert facts["loads_at"]["1"] == "yes"


names = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 3),
        st.sampled_from(["q_proj", "k_proj", "x"]),
        st.integers(0, 2),
    ),
    min_size=1,
    unique=True,
).map(lambda parts: [f"{a}.{i}.{b}.{j}.weight" for a, i, b, j in parts])


@given(names, st.data())
def test_globs_match_exactly_the_names_that_they_were_made_for(
    everything: list[str], data: st.DataObject
) -> None:
    chosen = set(data.draw(st.lists(st.sampled_from(everything), min_size=1)))
    written = globs_for(sorted(chosen), by_pattern(everything))
    matcher = GlobSet([glob for each in written for glob in expand(each)])
    assert {name for name in everything if matcher.matches(name)} == chosen
