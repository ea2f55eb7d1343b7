"""`verify reproduce` makes every numerics of the pipeline again by code of its own, and names what it can't make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.kernels.formats import bf16_to_f32
from shardmill.pipeline.formats import formats
from shardmill.verify.formats.laws import NUMERICS
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.kernels.conftest import bell
from tests.pipeline.convert.test_convert import (
    FUSED,
    GLOBS,
    MODULE,
    SOURCE,
    mxfp4,
    parent_of,
    recipe,
    stored_mxfp4,
)
from tests.pipeline.formats.matrices import targets
from tests.pipeline.parents import build
from tests.pipeline.repairs.test_repairs import HEAD, RECONCILE, REST, expert, write_parent
from tests.pipeline.repairs.test_repairs import build as build_repaired

# The weights are hard: outliers in every row.
LOOSE = Limits(
    dict.fromkeys(Limits().error, 0.5),
    dict.fromkeys(Limits().gain, 0.2),
    dict.fromkeys(Limits().cosine, 0.8),
    clipped=0.2,
    zeros=0.7,
)
ROWS, COLUMNS = 12, 128
HOME = "model.layers.0.mlp"


def _hard(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Any:
    """BF16 bits of a bell, with zeros of both signs, a faint row, a loud row and outliers."""
    bits = bell(seed, rows, columns).copy()
    bits[0], bits[1], bits[2, 32:96] = 0, 0x8000, 0
    bits[3] -= 40 << 7
    bits[4] += 6 << 7
    bits[5::7, ::61] += 5 << 7
    return bits


def _stored(bits: Any, dtype: str) -> tuple[str, Any]:
    values = bf16_to_f32(bits)
    return {"BF16": (dtype, bits), "F16": (dtype, values.astype(np.float16)), "F32": (dtype, values)}[dtype]


def _asked(folder: Path, **named: Any) -> Report:
    return reproduce(Folder(folder / "out"), Folder(folder / "parent"), **{"blocks": None, **named})


def _holds(folder: Path) -> None:
    """Every block is compared, none differs, nothing is left out."""
    report = _asked(folder)
    compared, total = str(report.facts["blocks"]).replace(",", "").split()[0:3:2]
    assert (report.findings, report.not_checked, compared) == ([], {}, total)
    assert int(total) > 0
    _no_alarm(folder)


ABOUT_A_TOY = {"dtype-unsaid", "nothing-quantized"}  # the parent is one Linear and a norm


def _no_alarm(folder: Path) -> None:
    """The other questions about the pair find no fault either."""
    child, parent = Folder(folder / "out"), Folder(folder / "parent")
    for report in (integrity(child, parent), roundtrip(child, parent, LOOSE)):
        faults = [f for f in report.findings if f.severity != "info" and f.slug not in ABOUT_A_TOY]
        assert faults == []


def _altered(folder: Path) -> None:
    """A bit of any converted tensor, changed wherever it is, is a finding."""
    path = folder / "out" / "model.safetensors"
    clean = path.read_bytes()
    length = int.from_bytes(clean[:8], "little")
    for name, row in json.loads(clean[8 : 8 + length]).items():
        if name == "__metadata__" or name.endswith(("norm.weight", "weight_shape")):
            continue
        begin, end = row["data_offsets"]
        place = 8 + length + begin + (end - begin) * 5 // 9
        path.write_bytes(clean[:place] + bytes([clean[place] ^ 1]) + clean[place + 1 :])
        slugs = {finding.slug for finding in _asked(folder).findings}
        assert "block-differs" in slugs, name
    path.write_bytes(clean)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("name", "profile"), targets())
def test_every_format_is_made_again_from_floats_of_every_dtype(
    tmp_path: Path, name: str, profile: str, dtype: str
) -> None:
    parent_of(tmp_path / "parent", {f"{MODULE}.weight": _stored(_hard(41), dtype)})
    build(tmp_path / "parent", tmp_path / "out", recipe(tmp_path, name, profile))
    _holds(tmp_path)
    if dtype == "BF16":
        _altered(tmp_path)


@pytest.mark.parametrize(
    ("name", "law"), [(name, law) for name in ("fp8-block", "fp8-channel") for law in formats()[name].laws]
)
def test_every_law_of_fp8_is_made_again(tmp_path: Path, name: str, law: str) -> None:
    parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", _hard(42))})
    build(
        tmp_path / "parent",
        tmp_path / "out",
        recipe(
            tmp_path,
            name,
            "fp8" if name == "fp8-block" else "compressed-tensors",
            keys=f'numerics = "{law}"\nblock = [32, 32]\n',
        ),
    )
    _holds(tmp_path)
    _altered(tmp_path)


def test_the_judge_knows_every_law_that_the_pipeline_has() -> None:
    assert {law for form in formats().values() for law in form.laws} <= NUMERICS


@pytest.mark.parametrize("to", ["nvfp4", "fp8-tensor"])
def test_the_number_of_a_fused_group_is_made_again_from_all_its_weights(tmp_path: Path, to: str) -> None:
    weights = {f"{HOME}.gate_proj": bell(71, ROWS, COLUMNS), f"{HOME}.up_proj": _hard(72)}
    parent_of(tmp_path / "parent", {f"{n}.weight": ("BF16", w) for n, w in weights.items()})
    build(tmp_path / "parent", tmp_path / "out", recipe(tmp_path, to, expect=2, more=FUSED))
    _holds(tmp_path)
    assert _asked(tmp_path).facts["numbers of a whole weight"] == "2 made again"
    _altered(tmp_path)


@pytest.mark.parametrize(
    ("to", "profile", "keys"),
    [
        ("nvfp4", "compressed-tensors", ""),
        ("nvfp4", "modelopt-mixed", ""),
        ("mxfp8", "compressed-tensors", ""),
        ("bf16", "modelopt-mixed", ""),
        ("fp8-block", "modelopt-mixed", 'block = [128, 128]\nnumerics = "ue8m0/1"\n'),
        ("int4-group", "compressed-tensors", "group = 64\n"),
    ],
)
@pytest.mark.parametrize("lowest", [120, 100])
def test_what_was_mxfp4_is_made_again(tmp_path: Path, to: str, profile: str, keys: str, lowest: int) -> None:
    """The closed form of NVFP4 too, and the groups beyond its window, which are encoded anew."""
    parts = mxfp4(51, 16, 128, lowest, 130)
    parent_of(tmp_path / "parent", stored_mxfp4(parts), {"quantization_config": CT_MXFP4})
    build(tmp_path / "parent", tmp_path / "out", recipe(tmp_path, to, profile, GLOBS, keys=SOURCE + keys))
    _holds(tmp_path)


CT_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        }
    },
}
FP8_PARENT = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
NATIVE = """\
format = 1
name = "native"
[output]
profile = "{profile}"
[[family]]
name = "linears"
match = ["**.*_proj.weight", "**.*_proj.weight_scale_inv"]
source_block = [64, 64]
expect = 1
{keys}
[[family]]
name = "rest"
match = "**.norm.weight"
action = "keep"
reason = "a vector"
"""


@pytest.mark.parametrize(
    ("profile", "keys"),
    [
        ("fp8", 'action = "dequantize"\n'),
        ("fp8", 'action = "reblock"\nblock = [16, 16]\n'),
        ("compressed-tensors", 'action = "convert"\nto = "bf16"\nsource = "fp8-block"\n'),
        ("compressed-tensors", 'action = "convert"\nto = "int8-channel"\nsource = "fp8-block"\n'),
    ],
)
def test_what_was_block_fp8_is_made_again(tmp_path: Path, profile: str, keys: str) -> None:
    codes = (np.arange(150 * 200, dtype=np.uint32) * 2_654_435_761 >> 9).astype(np.uint8).reshape(150, 200)
    codes[(codes & 0x7F) == 0x7F] = 0x11
    scales = (1 + np.arange(12, dtype=np.float32).reshape(3, 4)) * np.float32(1e-3)
    tensors = {f"{MODULE}.weight": ("F8_E4M3", codes), f"{MODULE}.weight_scale_inv": ("F32", scales)}
    parent_of(tmp_path / "parent", tensors, {"quantization_config": FP8_PARENT})
    path = tmp_path / "native.toml"
    path.write_text(NATIVE.format(profile=profile, keys=keys))
    build(tmp_path / "parent", tmp_path / "out", path)
    _holds(tmp_path)
    _altered(tmp_path)


@pytest.mark.parametrize("square", [False, True])
def test_a_stack_that_was_stored_transposed_is_made_again(tmp_path: Path, square: bool) -> None:
    """Where rows and columns are as many, the recipe in the manifest alone says that they changed places."""
    experts = bell(81, 3, 32, 32 if square else 64)
    stored = np.ascontiguousarray(experts.transpose(0, 2, 1))
    parent_of(tmp_path / "parent", {f"{HOME}.experts.down_proj": ("BF16", stored)})
    text = recipe(tmp_path, "mxfp8", globs="**.experts.down_proj", keys="transposed = true\n")
    build(tmp_path / "parent", tmp_path / "out", text)
    _holds(tmp_path)
    _altered(tmp_path)


def test_a_stack_is_made_again_expert_by_expert(tmp_path: Path) -> None:
    experts = _hard(82, 3 * 8, 96).reshape(3, 8, 96)
    parent_of(tmp_path / "parent", {f"{HOME}.experts.down_proj.weight": ("BF16", experts)})
    build(
        tmp_path / "parent", tmp_path / "out", recipe(tmp_path, "mxfp8", globs="**.experts.down_proj.weight")
    )
    _holds(tmp_path)
    _altered(tmp_path)


def test_experts_that_were_taken_out_of_a_stack_are_named(tmp_path: Path) -> None:
    stored = np.ascontiguousarray(bell(83, 2, 128, 256))
    parent_of(tmp_path / "parent", {f"{HOME}.experts.gate_up_proj": ("BF16", stored)})
    text = recipe(tmp_path, "mxfp8", globs="**.experts.gate_up_proj", keys="unstack = true\n")
    build(tmp_path / "parent", tmp_path / "out", text)
    report = _asked(tmp_path)
    assert report.findings == []
    assert [topic for topic in report.not_checked if "not recomputed" in topic] == [
        "4 tensors, not recomputed"
    ]


def test_a_sample_draws_blocks_and_numbers_of_whole_weights_and_prints_its_seed(tmp_path: Path) -> None:
    parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", _hard(44))})
    build(tmp_path / "parent", tmp_path / "out", recipe(tmp_path, "nvfp4"))
    report = _asked(tmp_path, blocks=20)
    assert str(report.facts["blocks"]).startswith("20 of 96 compared")
    assert report.facts["numbers of a whole weight"] == "1 made again"
    assert type(report.facts["seed"]) is int
    assert integrity(Folder(tmp_path / "out"), Folder(tmp_path / "parent")).findings == []


@pytest.fixture
def repaired(tmp_path: Path) -> Path:
    """An NVFP4 expert whose gate was ten times finer than its up, reconciled in `out`."""
    one = expert(0, 2.0**-12, 10 * 2.0**-12)
    shard = {**one, "norm": ("F32", np.ones(4, np.float32))}
    write_parent(tmp_path / "parent", {"model.safetensors": shard})
    build_repaired(tmp_path / "parent", tmp_path / "out", HEAD + RECONCILE.replace("8", "4") + REST)
    return tmp_path


def test_a_reconciled_pair_is_made_again(repaired: Path) -> None:
    report = _asked(repaired)
    assert (report.findings, report.facts["repairs"]) == ([], "1 of 1 made again, 0 differ")


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2"])
def test_what_the_manifest_calls_a_repair_must_be_one(repaired: Path, leaf: str) -> None:
    path = repaired / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + length])[f"experts.0.gate_proj.{leaf}"]["data_offsets"][0]
    data[8 + length + begin] ^= 1
    path.write_bytes(data)
    assert [finding.slug for finding in _asked(repaired).findings] == ["block-differs"]
