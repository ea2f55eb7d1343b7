"""What a loader of the profile can't read is refused by plan with its reason, unless the recipe names who must."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.formats import formats
from tests.pipeline.parents import Tensor, bf16, prepare, write_parent
from tests.pipeline.profiles.models import FILES

EXPERT = "model.layers.0.mlp.experts.{}.down_proj"
RECIPE = """\
format = 1
name = "small"
[output]
profile = "{profile}"
{loaders}
[[family]]
name = "all"
match = "**.{{down,o}}_proj.weight"
action = "convert"
to = "{to}"
expect = 3
[[family]]
name = "norm"
match = "model.norm.weight"
action = "keep"
reason = "a vector"
"""
UNREAD = ("fp8-block", "mxfp8", "nvfp4", "int8-channel")  # experts of these, under compressed-tensors


def parent(folder: Path) -> Path:
    """Two experts and a dense Linear."""
    tensors: dict[str, Tensor] = {f"{EXPERT.format(e)}.weight": bf16(f"e{e}", 128, 128) for e in range(2)}
    tensors["model.layers.0.self_attn.o_proj.weight"] = bf16("o", 128, 128)
    tensors["model.norm.weight"] = bf16("norm", 128)
    return write_parent(folder, {FILES[0]: tensors}, config={"model_type": "qwen3_moe"})


def plan(folder: Path, profile: str, to: str, loaders: str = "") -> None:
    prepare(parent(folder / "parent"), RECIPE.format(profile=profile, to=to, loaders=loaders))


@pytest.mark.parametrize("to", UNREAD)
def test_experts_that_transformers_cannot_read_are_refused_with_the_way_out(tmp_path: Path, to: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(tmp_path, "compressed-tensors", to)
    assert EXPERT.format(0) in str(refused.value)
    assert 'write `loaders = ["vllm", "sglang"]` under [output]' in str(refused.value)
    assert "o_proj" not in str(refused.value)


@pytest.mark.parametrize("to", UNREAD)
def test_a_recipe_that_names_its_loaders_is_planned(tmp_path: Path, to: str) -> None:
    plan(tmp_path, "compressed-tensors", to, 'loaders = ["vllm"]')


@pytest.mark.parametrize("to", ["fp8-channel", "fp8-tensor", "mxfp4", "int4-group"])
def test_experts_that_it_reads_are_planned(tmp_path: Path, to: str) -> None:
    plan(tmp_path, "compressed-tensors", to)


def test_fp8_per_tensor_under_fp8_has_a_scale_that_transformers_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="weight_scale_inv alone"):
        plan(tmp_path, "fp8", "fp8-tensor")


def test_a_loader_that_the_profile_is_not_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no 'transformers' reads the profile 'modelopt'; choose from vllm"):
        plan(tmp_path, "modelopt", "nvfp4", 'loaders = ["transformers"]')


def test_init_drafts_what_plan_refuses_and_says_so(tmp_path: Path) -> None:
    """The draft names the loaders in a comment; without its # the draft is planned."""
    made, recipe = parent(tmp_path / "parent"), tmp_path / "r.toml"
    words = ["init", str(made), "--out", str(recipe), "--profile", "compressed-tensors", "--to", "nvfp4"]
    assert CliRunner().invoke(shardmill, words).exit_code == 0
    assert "# Plan refuses this: " in recipe.read_text()
    with pytest.raises(PlanError, match="weight_global_scale"):
        prepare(made, recipe.read_text())
    prepare(made, recipe.read_text().replace("# loaders", "loaders"))


def test_init_writes_scales_that_a_loader_keeps(tmp_path: Path) -> None:
    """Under compressed-tensors a draft of FP8 or INT8 with F32 scales names the law whose scales are BF16 numbers."""
    made, recipe = parent(tmp_path / "parent"), tmp_path / "r.toml"
    for to, law in (("fp8", "amax-bf16/1"), ("fp8-channel", "amax-bf16/1"), ("int8-channel", "int8-bf16/1")):
        words = [
            "init",
            str(made),
            "--out",
            str(recipe),
            "--profile",
            "compressed-tensors",
            "--to",
            to,
            "--force",
        ]
        assert CliRunner().invoke(shardmill, words).exit_code == 0
        assert f'numerics = "{law}"' in recipe.read_text()


def test_every_drafted_law_is_one_of_its_formats() -> None:
    for form in formats().values():
        assert {each.drafted for each in form.spellings} <= {"", *form.laws}
