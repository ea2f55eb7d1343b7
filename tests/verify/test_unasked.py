"""A question about two checkpoints of which nothing can be compared is a wrong call, not a clean answer."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from tests.verify.zoo.clean import mixed_child, plain
from tests.verify.zoo.llama import whole
from tests.verify.zoo.model import Blob


@pytest.mark.parametrize("question", ["roundtrip", "reproduce"])
def test_a_parent_that_shares_nothing_is_refused_as_usage(question: str, tmp_path: Path) -> None:
    plain().write(tmp_path / "child")
    (tmp_path / "parent").mkdir()
    asked = [question, str(tmp_path / "child"), "--parent", str(tmp_path / "parent")]
    result = CliRunner().invoke(verify, asked)
    assert result.exit_code == 2
    assert f"nothing was compared: {tmp_path / 'parent'} holds no weights;" in result.output


def _json(*asked: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(verify, [*map(str, asked), "--json"])
    return result.exit_code, json.loads(result.stdout)


def _of_no_known_model(folder: Path) -> None:
    """A sound checkpoint of a model for which no loader has a table."""
    whole().write(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_all_names_what_it_could_not_ask_and_strict_makes_it_an_exit_of_1(tmp_path: Path) -> None:
    _of_no_known_model(tmp_path)
    code, value = _json("all", tmp_path)
    assert (code, set(value["not_asked"])) == (0, {"loads", "roundtrip", "reproduce", "signature"})
    assert value["facts"]["loads"]["verdict"].startswith("not asked, because ")
    assert _json("all", tmp_path, "--strict")[0] == 1


def test_loads_of_a_model_without_a_table_could_not_be_asked(tmp_path: Path) -> None:
    _of_no_known_model(tmp_path)
    code, value = _json("loads", tmp_path)
    assert (code, value["status"]) == (2, "not asked")


def test_weights_of_a_form_that_nobody_knows_are_counted_and_never_clean(tmp_path: Path) -> None:
    model = whole()
    name = "model.layers.0.mlp.up_proj.weight"
    model.shards["model.safetensors"][name] = Blob("I32", (128, 128), bytes(4 * 128 * 128))
    model.write(tmp_path)
    code, value = _json("integrity", tmp_path)
    assert (code, value["status"]) == (0, "partial")
    assert value["coverage"]["not_judged"] == {"I32 of no known form": 1}
    assert _json("integrity", tmp_path, "--strict")[0] == 1
    shown = CliRunner().invoke(verify, ["integrity", str(tmp_path)]).output
    assert shown.startswith("not judged: 1 of 35 weights (I32 of no known form)")


UNKNOWN: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "quanto": {"weight._data": ("I8", (128, 128)), "weight._scale": ("F32", (128, 1))},
    "HQQ": {"W_q": ("U8", (64, 128)), "scale": ("F16", (1, 128)), "zero": ("F16", (1, 128))},
    "torchao": {"weight.tensor_impl.int_data": ("I8", (128, 128))},
    "AQLM": {"codes": ("I16", (128, 16, 1)), "codebooks": ("F16", (1, 256, 1, 8))},
    "VPTQ": {"indices": ("I32", (1, 128, 64))},
    "SpQR": {"dense_weights": ("I64", (512,)), "row_offsets": ("I32", (129,))},
    "EXL2": {"q_weight": ("I32", (32, 128)), "q_scale": ("I32", (8, 16)), "q_invperm": ("I16", (128,))},
    "EXL3": {"trellis": ("I16", (8, 8, 64)), "suh": ("F16", (128,))},
    "Marlin": {"B": ("I32", (8, 256)), "s": ("F16", (1, 128)), "workspace": ("I32", (128,))},
    "codes of no name": {"absmaxx": ("F32", (128,)), "codes8": ("F8_E4M3", (128, 128))},
    "complex": {"weight": ("C64", (128, 128))},
    "unsigned": {"weight": ("U16", (128, 128))},
    "powers": {"weight": ("F8_E8M0", (128, 128))},
    "FP4 without a scale": {"weight": ("F4", (128, 128))},
    "FP6": {"weight": ("F6_E2M3", (128, 128)), "weight_scale": ("F8_E8M0", (128, 4))},
    "FNUZ": {"weight": ("F8_E4M3FNUZ", (128, 128)), "weight_scale": ("F32", ())},
    "a small one": {"weight": ("I8", (4, 4))},
}
BITS = {"F4": 4, "F6_E2M3": 6, "I16": 16, "U16": 16, "F16": 16, "I32": 32, "F32": 32, "I64": 64, "C64": 64}


@pytest.mark.parametrize("tool", UNKNOWN)
def test_a_weight_under_any_name_and_of_any_dtype_is_counted(tool: str, tmp_path: Path) -> None:
    """One weight of a form that nobody knows is one that is not judged, in text, in JSON and under --strict."""
    model = whole()
    shard = model.shards["model.safetensors"]
    shard.pop("model.layers.0.mlp.up_proj.weight")
    for leaf, (dtype, shape) in UNKNOWN[tool].items():
        data = b"\x3c" * (prod(shape) * BITS.get(dtype, 8) // 8)
        shard[f"model.layers.0.mlp.up_proj.{leaf}"] = Blob(dtype, shape, data)
    model.write(tmp_path)
    _, value = _json("integrity", tmp_path)
    assert sum(value["coverage"]["not_judged"].values()) == 1
    assert _json("integrity", tmp_path, "--strict")[0] == 1
    assert CliRunner().invoke(verify, ["integrity", str(tmp_path)]).output.startswith("not judged: 1 of ")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("model.rotary.position_ids", "I64", (1, 512)),
        ("model.layers.0.attn.bias", "BOOL", (1, 1, 64, 64)),
        ("model.bn.num_batches_tracked", "I64", ()),
        ("model.layers.0.relative_position_index", "I64", (49, 49)),
        ("model.layers.0.mlp.gate.tid2eid", "I64", (256, 6)),
    ],
)
def test_a_buffer_of_whole_numbers_is_no_weight(
    name: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = whole()
    data = bytes(range(1, 9)) * (prod(shape) if dtype == "I64" else prod(shape) // 8)
    model.shards["model.safetensors"][name] = Blob(dtype, shape, data)
    model.write(tmp_path)
    assert _json("integrity", tmp_path)[1]["coverage"]["not_judged"] == {}


def test_headers_alone_judge_a_weight_in_part(tmp_path: Path) -> None:
    whole().write(tmp_path)
    _, value = _json("integrity", tmp_path, "--headers-only")
    assert (value["status"], value["coverage"]["judged"]) == ("partial", {})


def test_origin_without_a_parent_is_not_asked(tmp_path: Path) -> None:
    """The traits are listed, and no formula was compared: that is no clean answer."""
    mixed_child().write(tmp_path / "child")
    result = CliRunner().invoke(verify, ["origin", str(tmp_path / "child")])
    assert (result.exit_code, "origin: not asked" in result.output) == (2, True)
    assert "block FP8: scales in" in result.output, result.output


def test_all_says_each_reason_once_in_the_block_of_its_question(tmp_path: Path) -> None:
    """What was checked is a line for each question; one that was not asked has a single line in all."""
    _of_no_known_model(tmp_path)
    lines = CliRunner().invoke(verify, ["all", str(tmp_path)]).output.splitlines()
    assert [line for line in lines if line.startswith("roundtrip")] == [
        "roundtrip: not asked, because no --parent was given"
    ]
    assert sum("'nobodys'" in line for line in lines) == 1
    assert "checked: lint: structure, names, scales, decoded sizes" in lines
    assert not any(line.startswith(("not asked", "checked: loads")) for line in lines)


def test_a_place_without_weights_is_asked_nothing_more(tmp_path: Path) -> None:
    code, value = _json("all", tmp_path)
    assert (code, [finding["rule"] for finding in value["findings"]]) == (1, ["SM029"])
    assert {value["not_asked"][question] for question in ("lint", "loads", "roundtrip", "reproduce")} == {
        "there are no weights here"
    }


@pytest.mark.parametrize("config", [None, "{}"])
def test_a_config_that_names_no_model_is_said_to_name_none(config: str | None, tmp_path: Path) -> None:
    plain().write(tmp_path)
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    reason = _json("loads", tmp_path)[1]["not_asked"]["loads"]
    assert (reason.count("no config.json names a model_type"), "None" in reason) == (1, False)
