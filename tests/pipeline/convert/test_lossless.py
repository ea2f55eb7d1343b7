"""Exact where exactness exists, proven by block: what keeps every number, what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.kernels.block_fp8 import decode
from shardmill.kernels.formats import E2M1_VALUES
from shardmill.kernels.group_codes import GroupCodes, unpack_nibbles
from shardmill.pipeline.commands.build import build as build_command
from shardmill.pipeline.commands.init import init as init_command
from shardmill.pipeline.commands.plan import plan as plan_command
from shardmill.pipeline.errors import BuildError, PlanError, RecipeError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import RECAST, Coded, Params, Setting
from shardmill.pipeline.formats.kept import recast_of, to_blocks
from shardmill.pipeline.stages.exact import exact_blocks
from tests.kernels.conftest import bell, words
from tests.pipeline.convert.test_convert import (
    GLOBS,
    MODULE,
    arrays_of,
    conversion,
    mxfp4,
    parent_of,
    recipe,
    setting,
    stored_mxfp4,
)
from tests.pipeline.parents import build

BOTH = ["**.*_proj.weight", "**.*_proj.weight_scale"]


def fp8_codes(seed: int, rows: int, columns: int) -> Any:
    """E4M3 codes of every kind but NaN, subnormals too."""
    drawn = (words(seed, rows, columns) & 0xFF).astype(np.uint8)
    return np.where(drawn & 0x7F == 0x7F, drawn ^ 1, drawn)


def counter_example() -> dict[str, Any]:
    """MXFP4 of one [128,128] block: scale byte 127 throughout, and one group of 0.5 under byte 110, which is 2^-18."""
    scales = np.full((128, 4), 127, np.uint8)
    scales[3, 2] = 110
    codes = np.full((128, 64), 0x77, np.uint8)  # 6 everywhere
    codes[3, 32:48] = 0x11  # 0.5
    return {"codes": codes, "scales": scales}


def counter_parent(folder: Path) -> tuple[Path, Path]:
    parent = parent_of(folder / "parent", stored_mxfp4(counter_example()))
    keys = 'source = "mxfp4"\nblock = [128, 128]\nnumerics = "ue8m0/1"\n'
    return parent, recipe(folder, "fp8-block", "fp8", GLOBS, keys=keys)


@pytest.mark.parametrize("numerics", ["ue8m0/1", "recast/1"])
def test_the_counter_example_of_lossless_mx_to_fp8_is_refused(tmp_path: Path, numerics: str) -> None:
    """17 octaves below the block's largest, 0.5 lies beyond E4M3's subnormals: vLLM's pull request 53709."""
    parent, path = counter_parent(tmp_path)
    path.write_text(path.read_text().replace("ue8m0/1", numerics))
    with pytest.raises(BuildError, match="1 of 1 blocks of 1 weights lose something"):
        build(parent, tmp_path / "out", path, lossless=True)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    build(parent, tmp_path / "out", path)
    assert (conversion(tmp_path / "out")["blocks"], conversion(tmp_path / "out")["exact_blocks"]) == (1, 0)


def test_plan_build_and_init_refuse_with_the_count(tmp_path: Path) -> None:
    """--lossless of each command; the plan reads what converts and writes nothing."""
    parent, path = counter_parent(tmp_path)
    given = ["-c", str(path), "--parent", str(parent), "--lossless"]
    planned = CliRunner().invoke(plan_command, given)
    assert isinstance(planned.exception, PlanError)
    assert "1 of 1 blocks of 1 weights lose something" in str(planned.exception)
    built = CliRunner().invoke(build_command, [*given, "--out", str(tmp_path / "out"), "--workers", "1"])
    assert isinstance(built.exception, BuildError)
    drafted = CliRunner().invoke(init_command, [str(parent), "-o", str(tmp_path / "n.toml"), "--to", "fp8-block",
                                                "--profile", "fp8", "--lossless"])  # fmt: skip
    assert isinstance(drafted.exception, PlanError), drafted.output
    assert "1 of 1 blocks" in str(drafted.exception)
    assert not (tmp_path / "n.toml").exists()


def test_a_lossless_plan_says_so_and_a_draft_holds_to_it(tmp_path: Path) -> None:
    """Where nothing is lost all three go through, and the draft says `lossless = true`."""
    parent = parent_of(tmp_path / "parent", stored_mxfp4(mxfp4(55, 128, 256, 120, 130)))
    path = tmp_path / "drafted.toml"
    drafted = CliRunner().invoke(init_command, [str(parent), "-o", str(path), "--to", "nvfp4", "--lossless",
                                                "--profile", "compressed-tensors"])  # fmt: skip
    assert drafted.exit_code == 0, drafted.exception
    assert "lossless = true" in path.read_text()
    given = ["-c", str(path), "--parent", str(parent), "--lossless"]
    assert CliRunner().invoke(plan_command, given).exit_code == 0
    built = CliRunner().invoke(build_command, [*given, "--out", str(tmp_path / "out"), "--workers", "1"])
    assert built.exit_code == 0, built.exception
    assert conversion(tmp_path / "out")["exact_blocks"] == 128 * 256 // 32


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """E8M0's byte 255 is NaN: no format can hold it, lossless or not."""
    parts = counter_example()
    parts["scales"][5, 1] = 255
    parent = parent_of(tmp_path / "parent", stored_mxfp4(parts))
    keys = 'source = "mxfp4"\nblock = [128, 128]\n'
    for to, profile in (("fp8-block", "fp8"), ("nvfp4", "compressed-tensors")):
        with pytest.raises(BuildError, match=r"nan|not finite"):
            build(parent, tmp_path / "out", recipe(tmp_path, to, profile, GLOBS, keys=keys))


def test_floats_that_are_rounded_are_counted_and_refused(tmp_path: Path) -> None:
    """A lossless build of fresh weights is refused with the count; what rounds without counting, before a byte."""
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", bell(3, 128, 256))})
    path = recipe(tmp_path, "fp8-block", "fp8")
    path.write_text(
        path.read_text().replace(
            'action = "convert"\nto = "fp8-block"', 'action = "quantize"\nblock = [128, 128]'
        )
    )
    with pytest.raises(BuildError, match="2 of 2 blocks of 1 weights lose something"):
        build(parent, tmp_path / "out", path, lossless=True)
    codes = {f"{MODULE}.weight": ("F8_E4M3", fp8_codes(4, 128, 128)),
             f"{MODULE}.weight_scale_inv": ("F32", np.ones((1, 1), np.float32))}  # fmt: skip
    other = parent_of(tmp_path / "codes", codes)
    text = path.read_text().replace('action = "quantize"\nblock', 'action = "dequantize"\nsource_block')
    path.write_text(text.replace('"**.*_proj.weight"', '"**.*_proj.{weight,weight_scale_inv}"'))
    with pytest.raises(PlanError, match="rounds to BF16 and counts nothing"):
        build(other, tmp_path / "other", path, lossless=True)


def test_e8m0_grids_become_f32_and_come_back(tmp_path: Path) -> None:
    """Codes and scales are the same numbers in both, and the way back gives the parent's very bytes."""
    codes = fp8_codes(21, 256, 256)
    scales = np.array([[120, 127], [100, 140]], np.uint8)
    tensors = {f"{MODULE}.weight": ("F8_E4M3", codes), f"{MODULE}.scale": ("F8_E8M0", scales)}
    parent = parent_of(tmp_path / "parent", tensors)
    keys = 'source = "fp8-block"\nlossless = true\n'
    build(
        parent,
        tmp_path / "f32",
        recipe(tmp_path, "fp8-block", "fp8", ["**.*_proj.weight", "**.*_proj.scale"], keys=keys),
    )
    there = arrays_of(tmp_path / "f32")
    assert np.array_equal(there[f"{MODULE}.weight"], codes)
    assert np.array_equal(
        there[f"{MODULE}.weight_scale_inv"], scales.astype(np.float64) * 0 + 2.0 ** (scales - 127.0)
    )
    assert conversion(tmp_path / "f32")["exact_blocks"] == 4
    keys += 'scale_dtype = "F8_E8M0"\n'
    build(
        tmp_path / "f32",
        tmp_path / "back",
        recipe(tmp_path, "fp8-block", "fp8", ["**.*_proj.{weight,weight_scale_inv}"], keys=keys),
    )
    back = arrays_of(tmp_path / "back")
    assert back[f"{MODULE}.weight"].tobytes() == codes.tobytes()
    assert back[f"{MODULE}.weight_scale_inv"].tobytes() == scales.tobytes()
    declared = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert declared["scale_fmt"] == "ue8m0"


def test_f32_grids_that_are_no_powers_of_two_are_counted(tmp_path: Path) -> None:
    """Of four scales one is 3 * 2^-9: as E8M0 that block is encoded anew and counted, and lossless refuses it."""
    scales = np.array([[0.5, 2.0], [3 * 2.0**-9, 1.0]], np.float32)
    tensors = {
        f"{MODULE}.weight": ("F8_E4M3", fp8_codes(22, 256, 256)),
        f"{MODULE}.weight_scale_inv": ("F32", scales),
    }
    parent = parent_of(tmp_path / "parent", tensors)
    keys = 'source = "fp8-block"\nscale_dtype = "F8_E8M0"\n'
    path = recipe(tmp_path, "fp8-block", "fp8", "**.*_proj.{weight,weight_scale_inv}", keys=keys)
    build(parent, tmp_path / "out", path)
    assert (conversion(tmp_path / "out")["blocks"], conversion(tmp_path / "out")["exact_blocks"]) == (4, 3)
    with pytest.raises(BuildError, match="1 of 4 blocks of 1 weights"):
        build(parent, tmp_path / "no", path, lossless=True)


def test_fp8_by_channel_becomes_fp8_by_block(tmp_path: Path) -> None:
    """A block whose rows share a scale, or differ by octaves that E4M3 has room for, is exact; others are counted."""
    scales = np.full((384, 1), 0.75, np.float32)
    scales[128:256:2] = 1.5  # an octave apart
    scales[256:] = (words(5, 128, 1) % 1000 + 1000).astype(np.float32) / 1024
    codes = fp8_codes(23, 384, 256)
    codes[128:256] &= 0xF8  # no mantissa and no subnormal but zero, so that an octave can be given
    codes[128:256] |= 0x20
    tensors = {f"{MODULE}.weight": ("F8_E4M3", codes), f"{MODULE}.weight_scale": ("F32", scales)}
    parent = parent_of(tmp_path / "parent", tensors)
    path = recipe(tmp_path, "fp8-block", "fp8", BOTH, keys='source = "fp8-channel"\n')
    build(parent, tmp_path / "out", path)
    assert (conversion(tmp_path / "out")["blocks"], conversion(tmp_path / "out")["exact_blocks"]) == (6, 4)
    assert conversion(tmp_path / "out")["numerics"] == "recast/1"
    with pytest.raises(BuildError, match="2 of 6 blocks of 1 weights"):
        build(parent, tmp_path / "no", path, lossless=True)


def test_changed_scales_are_counted(tmp_path: Path) -> None:
    """Of 1,024 MXFP8 scales 52 are larger than need be: encoded anew they change, re-declared none does."""
    codes = np.full((64, 512), 0x78, np.uint8)
    scales = np.full((64, 16), 127, np.uint8)
    codes.reshape(-1, 32)[:52] = 0x38  # 1 where 256 is
    tensors = {f"{MODULE}.weight": ("F8_E4M3", codes), f"{MODULE}.weight_scale": ("U8", scales)}
    parent = parent_of(tmp_path / "parent", tensors)
    keys = 'source = "mxfp8"\n'
    build(
        parent,
        tmp_path / "anew",
        recipe(tmp_path, "mxfp8", "modelopt", BOTH, keys=keys + 'numerics = "mxfp8/1"\n'),
    )
    anew = conversion(tmp_path / "anew")
    assert (anew["blocks"], anew["exact_blocks"], anew["changed_scales"]) == (1024, 1024, 52)
    build(parent, tmp_path / "same", recipe(tmp_path, "mxfp8", "modelopt", BOTH, keys=keys))
    assert "changed_scales" not in conversion(tmp_path / "same")
    child = arrays_of(tmp_path / "same")
    assert child[f"{MODULE}.weight"].tobytes() == codes.tobytes()
    assert child[f"{MODULE}.weight_scale"].tobytes() == scales.tobytes()


def test_recast_is_no_law_of_floats(tmp_path: Path) -> None:
    """There is nothing to keep."""
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", bell(3, 128, 128))})
    with pytest.raises(RecipeError, match="fp8-block has no 'recast/1'"):
        build(parent, tmp_path / "out", recipe(tmp_path, "fp8-block", "fp8", keys='numerics = "recast/1"\n'))
    with pytest.raises(RecipeError, match="F8_E8M0 holds powers of two"):
        build(
            parent, tmp_path / "out", recipe(tmp_path, "fp8-block", "fp8", keys='scale_dtype = "F8_E8M0"\n')
        )


# Laws, over whatever codes and exponents hypothesis draws.
BYTES = st.integers(0, 2**32 - 1)


def mxfp4_values(parts: dict[str, Any]) -> Any:
    """The numbers of MXFP4 parts by f64, without the pipeline's decoder."""
    return E2M1_VALUES[unpack_nibbles(parts["codes"])].astype(np.float64) * np.repeat(
        2.0 ** (parts["scales"].astype(np.float64) - 127), 32, axis=1
    )


@settings(max_examples=25, deadline=None)
@given(BYTES, st.integers(60, 150), st.integers(0, 40))
def test_an_mxfp4_block_is_exact_in_fp8_wherever_a_power_of_two_makes_it_so(
    seed: int, lowest: int, width: int
) -> None:
    """`recast/1` calls exact just what is, and finds the scale where one of 80 powers of two would do."""
    parts = mxfp4(seed, 4, 64, lowest, lowest + width)
    source = setting("mxfp4", "compressed-tensors")
    values = formats()["mxfp4"].decode(parts, source)
    assert np.array_equal(values, mxfp4_values(parts))
    made = Setting(Params((2, 64)), formats()["fp8-block"].spellings[0], GroupCodes("numpy"), RECAST)
    codes, scales, exact = to_blocks(Coded(formats()["mxfp4"], parts, source, values), made, (2, 64))
    same = (decode(codes, scales, (2, 64)) == values).reshape(2, -1).all(axis=1)
    assert np.array_equal(exact[:, 0], same)
    for block in range(2):
        numbers = mxfp4_values(parts)[2 * block : 2 * block + 2]
        possible = any(
            np.array_equal(
                (numbers / 2.0**k).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
                * 2.0**k,
                numbers,
            )
            for k in range(lowest - 127 - 12, lowest + width - 127 + 4)
        )
        assert bool(exact[block, 0]) == possible


@settings(max_examples=25, deadline=None)
@given(BYTES, st.integers(40, 200), st.integers(0, 30))
def test_the_count_of_nvfp4_is_that_of_the_numbers(seed: int, lowest: int, width: int) -> None:
    """Of MXFP4 groups as many are exact in NVFP4 as decode to the same f64 numbers; within 17 octaves all are."""
    parts = mxfp4(seed, 4, 64, lowest, lowest + width)
    source, target = setting("mxfp4", "compressed-tensors"), setting("nvfp4", "modelopt")
    form = formats()["nvfp4"]
    way = recast_of(formats()["mxfp4"], form, target.law)
    assert way is not None
    assert way.survey is not None
    surveyed = Setting(target.params, target.spelling, target.codes, target.law, way.survey(parts))
    values = formats()["mxfp4"].decode(parts, source)
    made = way.encode(Coded(formats()["mxfp4"], parts, source, values), surveyed)
    scales = made["scales"].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(made["global"][0])
    numbers = E2M1_VALUES[unpack_nibbles(made["codes"])].astype(np.float64) * np.repeat(scales, 16, axis=1)
    same = (numbers == mxfp4_values(parts)).reshape(-1, 32).all(axis=1)
    assert exact_blocks(values, form.decode(made, surveyed), (1, 32)) == (8, int(same.sum()))
    if width <= 17:
        assert same.all()


@settings(max_examples=20, deadline=None)
@given(BYTES, st.lists(st.sampled_from([0.5, 1.0, 2.0, 0.75, 1.1]), min_size=4, max_size=4))
def test_rows_of_one_scale_are_exact_by_block(seed: int, row_scales: list[float]) -> None:
    """FP8 by channel: what is called exact decodes to the same numbers, and rows of one scale always are."""
    parts = {"codes": fp8_codes(seed, 4, 32), "scales": np.array(row_scales, np.float32).reshape(4, 1)}
    form = formats()["fp8-channel"]
    source = Setting(Params(), form.spellings[0], GroupCodes("numpy"), "")
    values = form.decode(parts, source)
    made = Setting(Params((2, 16)), formats()["fp8-block"].spellings[0], GroupCodes("numpy"), RECAST)
    codes, scales, exact = to_blocks(Coded(form, parts, source, values), made, (2, 16))
    same = (decode(codes, scales, (2, 16)) == values).reshape(2, 2, 2, 16).all(axis=(1, 3))
    assert np.array_equal(exact, same)
    for pair in range(2):
        if row_scales[2 * pair] == row_scales[2 * pair + 1]:
            assert exact[pair].all()
