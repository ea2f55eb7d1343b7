"""`shardmill plan --probe`: which families of a parent are copies of native block FP8."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.errors import CheckpointError
from tests.pipeline.parents import SHARDS, micro_tensors, write_parent, write_recipe

RECIPE = Path(__file__).parents[3] / "pipeline.toml"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardmill.pipeline.toy.sizes import SIZES
    from shardmill.pipeline.toy.write import toy_headers, write_parent

    folder = tmp_path_factory.mktemp("probe") / "parent"
    write_parent(folder, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    return folder


def test_a_probe_finds_the_native_families_and_no_other(tiny: Path) -> None:
    """All sampled blocks of MLA and MLP are proven native at [128,128], none of any other family at any block."""
    result = CliRunner().invoke(
        shardmill, ["plan", "-c", str(RECIPE), "--parent", str(tiny), "--probe", "--json"]
    )
    assert result.exit_code == 0, result.output
    probed = json.loads(result.output)["probe"]
    shares = {(each["family"], *each["block"]): each["exact"] / each["sampled"] for each in probed}
    native = {("MLA q_a/kv_a/q_b", 128, 128), ("shared experts + dense MLP", 128, 128)}
    assert {place for place, share in shares.items() if share == 1.0} == native
    assert {share for place, share in shares.items() if place not in native} == {0.0}
    assert ("KDA q/k/v + b/f_a/g_a", 32, 32) in shares
    assert all(each["sampled"] == 64 for each in probed)


def test_a_probe_draws_other_blocks_each_time_and_the_same_by_its_seed(tiny: Path) -> None:
    """So that nobody can make a parent whose sampled blocks alone are native; what was drawn can be drawn again."""

    def probed(*more: str) -> dict[str, Any]:
        words = ["plan", "-c", str(RECIPE), "--parent", str(tiny), "--json", *more]
        found: dict[str, Any] = json.loads(CliRunner().invoke(shardmill, words).output)
        return found

    one, other = probed("--probe"), probed("--probe")
    assert one["seed"] != other["seed"]
    assert probed("--probe", "--seed", str(one["seed"]))["probe"] == one["probe"]
    alone = ["plan", "-c", str(RECIPE), "--parent", str(tiny), "--seed", "1"]
    assert CliRunner().invoke(shardmill, alone).exit_code == 2


def test_a_probe_says_so_in_a_sentence(tiny: Path) -> None:
    result = CliRunner().invoke(shardmill, ["plan", "-c", str(RECIPE), "--parent", str(tiny), "--probe"])
    assert (
        "MLA q_a/kv_a/q_b: native FP8 at [128,128]: 100 % of 64 sampled blocks" in result.output.splitlines()
    )


def test_a_weight_that_is_not_finite_stops_a_probe_with_its_place(tmp_path: Path) -> None:
    """Every block that could be drawn holds one."""
    files = micro_tensors()
    name = "model.layers.0.attn.q.weight"
    files[SHARDS[0]][name] = ("BF16", (16, 10), b"\x80\x7f" * 160)
    parent, recipe = write_parent(tmp_path / "parent", files), write_recipe(tmp_path)
    result = CliRunner().invoke(shardmill, ["plan", "-c", str(recipe), "--parent", str(parent), "--probe"])
    assert isinstance(result.exception, CheckpointError)
    assert re.search(
        rf"{SHARDS[0]}: {name}: the weight at row \d+, column \d+ is inf; fix", str(result.exception)
    )
