"""A parent that is block FP8 already: dequantized, reblocked, or passed on beside what is converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardmill.kernels.block_fp8 import decode
from shardmill.kernels.formats import f32_to_bf16
from shardmill.pipeline.errors import BuildError, PlanError, RecipeError
from shardmill.verify.commands.options import source_at
from shardmill.verify.questions.integrity import integrity
from tests.pipeline.parents import STAGES, build, change_tensor, prepare, why
from tests.pipeline.profiles.models import FILES, LINEAR, encoded, native_parent, recipe, weights

BOTH = LINEAR.replace('.*.weight"', '.*.{weight,weight_scale_inv}"')
DEQUANTIZE = BOTH.replace('"quantize"\nblock', '"dequantize"\nsource_block')
REBLOCK = DEQUANTIZE.replace('"dequantize"', '"reblock"\nblock = [32, 32]')
LINEAR_NAMES = [name for name in weights() if ".layers." in name]


def tensors_of(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint as raw bytes: name -> (dtype, shape, u8 array)."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def test_dequantize_gives_code_times_scale_rounded_once_and_leaves_no_scale(tmp_path: Path) -> None:
    build(native_parent(tmp_path / "parent"), tmp_path / "out", recipe("fp8", DEQUANTIZE))
    made = tensors_of(tmp_path / "out")
    for name in LINEAR_NAMES:
        codes, scales = encoded(weights()[name], 128)
        assert made[name] == ("BF16", codes.shape, f32_to_bf16(decode(codes, scales, (128, 128))).tobytes())
    assert not [name for name in made if "scale" in name]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_dequantized_values_equal_torch_and_deepseeks_formula(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    build(
        native_parent(tmp_path / "parent", block=32),
        tmp_path / "out",
        recipe("fp8", DEQUANTIZE.replace("128, 128", "32, 32")),
    )
    made = tensors_of(tmp_path / "out")
    for name in LINEAR_NAMES:
        codes, scales = encoded(weights()[name], 32)
        wide = torch.from_numpy(scales).repeat_interleave(32, 0).repeat_interleave(32, 1)
        R, C = codes.shape
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * wide[:R, :C]
        assert made[name][2] == values.bfloat16().view(torch.int16).numpy().tobytes()


def test_bf16_scales_are_read_as_the_numbers_that_they_are(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent", scale_dtype="BF16")
    build(parent, tmp_path / "out", recipe("fp8", DEQUANTIZE))
    name = LINEAR_NAMES[0]
    codes, scales = encoded(weights()[name], 128)
    cut = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert tensors_of(tmp_path / "out")[name][2] == f32_to_bf16(decode(codes, cut, (128, 128))).tobytes()


def test_reblocking_keeps_every_code_and_decodes_to_the_same_numbers(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    build(parent, tmp_path / "out", recipe("fp8", REBLOCK))
    before, after = tensors_of(parent), tensors_of(tmp_path / "out")
    for name in LINEAR_NAMES:
        assert after[name] == before[name]
        assert after[f"{name}_scale_inv"][1] == tuple(-(-side // 32) for side in after[name][1])
        assert np.array_equal(decoded(before, name, 128), decoded(after, name, 32))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["weight_block_size"] == [32, 32]
    assert "scale_fmt" not in stated, "the parent's scales are no powers of two, and stay what they were"


def decoded(tensors: dict[str, Any], name: str, block: int) -> Any:
    _, shape, data = tensors[name]
    _, grid, scales = tensors[f"{name}_scale_inv"]
    codes = np.frombuffer(data, np.uint8).reshape(shape)
    return decode(codes, np.frombuffer(scales, np.float32).reshape(grid), (block, block))


def test_one_block_renames_scales_for_another_profile(tmp_path: Path) -> None:
    same = REBLOCK.replace("block = [32, 32]", "block = [128, 128]")
    build(native_parent(tmp_path / "parent"), tmp_path / "out", recipe("compressed-tensors", same))
    made, native = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "parent")
    for name in LINEAR_NAMES:
        assert made[f"{name}_scale"] == native[f"{name}_scale_inv"]
    assert not [name for name in made if name.endswith("_scale_inv")]


@pytest.mark.parametrize("linears", [DEQUANTIZE, REBLOCK], ids=["dequantize", "reblock"])
def test_the_judge_finds_nothing_to_say(tmp_path: Path, linears: str) -> None:
    parent = native_parent(tmp_path / "parent")
    build(parent, tmp_path / "out", recipe("fp8", linears))
    report = integrity(source_at(str(tmp_path / "out")), source_at(str(parent)))
    assert [finding.slug for finding in report.findings] == []


def test_a_changed_scale_in_another_file_rewrites_the_weights_shard(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    build(parent, tmp_path / "out", recipe("fp8", DEQUANTIZE))
    change_tensor(parent / FILES[1], "model.layers.1.mlp.down_proj.weight_scale_inv")
    reasons = why(parent, tmp_path / "out", recipe("fp8", DEQUANTIZE))
    assert list(reasons) == [FILES[0]]
    assert "model.layers.1.mlp.down_proj.weight_scale_inv" in reasons[FILES[0]]


@pytest.mark.parametrize(
    ("linears", "reason"),
    [
        (DEQUANTIZE.replace("[128, 128]", "[64, 64]"), "blocks of \\[64,64\\] need F32 or BF16 \\[4, 4\\]"),
        (
            DEQUANTIZE.replace("{weight,weight_scale_inv}", "weight")
            + """
[[family]]
name = "scales"
match = "model.layers.**.weight_scale_inv"
action = "drop"
reason = "gone"
""",
            "are not in its family",
        ),
    ],
)
def test_scales_that_do_not_fit_their_weight_are_refused(tmp_path: Path, linears: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        prepare(native_parent(tmp_path / "parent"), recipe("fp8", linears))


def test_scales_whose_weight_lies_in_another_family_are_not_swallowed(tmp_path: Path) -> None:
    linears = (
        DEQUANTIZE.replace("*.{weight,weight_scale_inv}", "{q_proj.weight,*.weight_scale_inv}").replace(
            "expect = 6", "expect = 2"
        )
        + """
[[family]]
name = "others"
match = ["model.layers.*.self_attn.k_proj.weight", "model.layers.*.mlp.down_proj.weight"]
action = "keep"
reason = "to stay FP8"
"""
    )
    linears = linears.replace(
        "{self_attn,mlp}.{q_proj.weight,*.weight_scale_inv}", "{self_attn,mlp}.*.weight_scale_inv"
    )
    linears = linears.replace(
        'match = "model.layers.*.{self_attn,mlp}.*.weight_scale_inv"',
        'match = ["model.layers.*.self_attn.q_proj.weight", "model.layers.*.{self_attn,mlp}.*.weight_scale_inv"]',
    )
    with pytest.raises(PlanError, match=r"k_proj\.weight_scale_inv: would be consumed"):
        prepare(native_parent(tmp_path / "parent"), recipe("fp8", linears))


def test_a_larger_block_is_refused_since_it_cannot_keep_every_number(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="dequantize first"):
        prepare(native_parent(tmp_path / "parent"), recipe("fp8", REBLOCK.replace("[32, 32]", "[256, 256]")))


def test_a_recipe_without_the_stage_says_what_to_add(tmp_path: Path) -> None:
    text = recipe("fp8", DEQUANTIZE).replace("[[family]]", STAGES + "[[family]]", 1)
    with pytest.raises(RecipeError, match="rewrite must need it"):
        prepare(native_parent(tmp_path / "parent"), text)


def test_a_nan_code_is_refused_with_its_place(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    spoil(parent / FILES[0], "model.layers.0.mlp.down_proj.weight", 384 + 7, b"\x7f")
    with pytest.raises(BuildError, match=r"mlp.down_proj.weight: row 1, column 7 decodes to nan"):
        build(parent, tmp_path / "out", recipe("fp8", DEQUANTIZE))


def test_a_scale_that_is_not_positive_is_refused_with_its_block(tmp_path: Path) -> None:
    parent = native_parent(tmp_path / "parent")
    spoil(parent / FILES[1], "model.layers.1.self_attn.q_proj.weight_scale_inv", 4, b"\0\0\0\0")
    with pytest.raises(BuildError, match=r"scale of block \[0, 1\] is 0.0"):
        build(parent, tmp_path / "out", recipe("fp8", REBLOCK))


def spoil(file: Path, name: str, place: int, new: bytes) -> None:
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    at = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0] + place
    data[at : at + len(new)] = new
    file.write_bytes(data)


def test_fp8_layers_that_are_kept_share_the_declaration_of_those_that_are_made(tmp_path: Path) -> None:
    """A parent half FP8 can have its rest converted where the blocks agree."""
    parent = native_parent(tmp_path / "parent")
    keep = BOTH.replace('"quantize"\nblock = [128, 128]\nexpect = 6', '"keep"\nreason = "FP8 already"')
    convert = """
[[family]]
name = "joint"
match = "lm_head.weight"
action = "quantize"
block = [{b}, {b}]
expect = 1
"""
    with pytest.raises(PlanError, match="vocabulary"):
        prepare(parent, recipe("fp8", keep, convert.format(b=128)))
    build(parent, tmp_path / "out", recipe("modelopt-mixed", keep, convert.format(b=32)))
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "quantized_layers"
    ]
    assert layers["lm_head"]["group_size"] == 32
    assert layers["model.layers.0.mlp.down_proj"] == {"quant_algo": "FP8_BLOCK", "group_size": 128}


def test_the_output_can_be_read_by_the_safetensors_library(tmp_path: Path) -> None:
    build(native_parent(tmp_path / "parent"), tmp_path / "out", recipe("fp8", DEQUANTIZE))
    with safe_open(tmp_path / "out" / FILES[0], "np") as shard:
        assert shard.get_slice(LINEAR_NAMES[0]).get_dtype() == "BF16"
