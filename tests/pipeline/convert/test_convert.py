"""Conversions end to end: a parent in one format becomes a child in another, and every block is proven or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16
from shardmill.kernels.group_codes import GroupCodes
from shardmill.pipeline.errors import BuildError, PlanError, RecipeError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params, Setting
from shardmill.pipeline.formats.module import part_name
from tests.kernels.conftest import bell, words
from tests.pipeline.formats.matrices import targets
from tests.pipeline.parents import build, write_shard

ROWS, COLUMNS = 256, 384
RECIPE = """\
format = 1
name = "converted"
[output]
profile = "{profile}"{loaders}
[[family]]
name = "linears"
match = {globs}
action = "convert"
to = "{to}"
expect = {expect}
{keys}
[[family]]
name = "rest"
match = "**.norm.weight"
action = "keep"
reason = "a vector"
{more}
"""
NUMPY = {"F8_E4M3": np.uint8, "U8": np.uint8, "F8_E8M0": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64,
         "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # fmt: skip


def parent_of(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A parent of one file; tensors: name -> (dtype, array)."""
    folder.mkdir()
    held = {**tensors, "model.norm.weight": ("BF16", np.full(8, 0x3F80, np.uint16))}
    write_shard(folder / "model.safetensors", {n: (d, a.shape, a.tobytes()) for n, (d, a) in held.items()})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    return folder


def recipe(folder: Path, to: str, profile: str = "compressed-tensors", globs: Any = "**.*_proj.weight", expect: int = 1,
           keys: str = "", more: str = "") -> Path:  # fmt: skip
    path = folder / f"{to}.toml"
    loaders = "" if profile.startswith("modelopt") else '\nloaders = ["vllm"]'  # which reads every format
    text = RECIPE.format(
        profile=profile, loaders=loaders, globs=json.dumps(globs), to=to, expect=expect, keys=keys, more=more
    )
    path.write_text(text)
    return path


def arrays_of(folder: Path) -> dict[str, Any]:
    """Tensor -> its bits, of a child of one file."""
    path = folder / "model.safetensors"
    head = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    data = path.read_bytes()[8 + int.from_bytes(path.read_bytes()[:8], "little") :]
    return {
        name: np.frombuffer(data[slice(*row["data_offsets"])], NUMPY[row["dtype"]]).reshape(row["shape"])
        for name, row in head.items()
        if name != "__metadata__"
    }


def setting(name: str, profile: str, amax: Any = None, **params: Any) -> Setting:
    form = formats()[name]
    spelling = form.spelling(profile)
    assert spelling is not None
    return Setting(
        Params(**params), spelling, GroupCodes("numpy"), spelling.law or next(iter(form.laws), ""), amax
    )


def decoded(child: dict[str, Any], module: str, name: str, profile: str) -> Any:
    """The f32 numbers of a module of the child."""
    made = setting(name, profile)
    parts = {role: child[module + end] for role, end in made.spelling.ends.items() if module + end in child}
    return formats()[name].decode(parts, made)


MODULE = "model.layers.0.mlp.down_proj"
FUSED = """\
[[fused]]
name = "mlp"
match = "model.layers.*.mlp.{gate,up}_proj.weight"
runtime_names = ["gate_up_proj"]
"""


@pytest.mark.parametrize(("name", "profile"), targets())
def test_a_build_writes_what_the_format_encodes(tmp_path: Path, name: str, profile: str) -> None:
    """Each part of the child has the bytes that encoding the whole matrix at once gives, under the profile's names."""
    source = bell(41, ROWS, COLUMNS)
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", source)})
    build(parent, tmp_path / "out", recipe(tmp_path, name, profile))
    child, form = arrays_of(tmp_path / "out"), formats()[name]
    made = setting(name, profile, np.float32(np.abs(bf16_to_f32(source)).max()))
    assert form.encode is not None
    for role, array in form.encode(source, made).items():
        assert child[MODULE + made.spelling.ends[role]].tobytes() == array.tobytes(), role
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == {"modelopt-mixed": "modelopt", "modelopt": "modelopt_mixed"}.get(
        profile, profile
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as opened:
        assert f"{MODULE}{made.spelling.ends['codes']}" in opened.keys()  # noqa: SIM118


def mxfp4(seed: int, rows: int, columns: int, lowest: int, highest: int) -> dict[str, Any]:
    """Packed codes u8 [rows, C/2] and E8M0 scales u8 [rows, C/32] with exponents from lowest to highest."""
    exponents = (words(seed, rows, columns // 32) % (highest - lowest + 1) + lowest).astype(np.uint8)
    return {"codes": (words(seed + 1, rows, columns // 2) & 0xFF).astype(np.uint8), "scales": exponents}


def stored_mxfp4(parts: dict[str, Any], module: str = MODULE) -> dict[str, Any]:
    return {
        f"{module}.weight_packed": ("U8", parts["codes"]),
        f"{module}.weight_scale": ("U8", parts["scales"]),
    }


def conversion(out: Path) -> dict[str, Any]:
    (only,) = json.loads((out / "shardmill.manifest.json").read_text())["conversions"].values()
    return dict(only)


SOURCE = 'source = "mxfp4"\n'
GLOBS = ["**.*_proj.weight_packed", "**.*_proj.weight_scale"]


@pytest.mark.parametrize(
    ("to", "keys"),
    [("nvfp4", ""), ("mxfp8", ""), ("bf16", ""), ("fp8-block", "block = [1, 32]\n"), ("fp8-block", "")],
)
def test_mxfp4_goes_elsewhere_without_loss(tmp_path: Path, to: str, keys: str) -> None:
    """MXFP4 whose exponents fit the target's range decodes to the same numbers there, and each block is proven so."""
    parts = mxfp4(51, 128, 256, 120, 130)
    if to == "fp8-block":
        keys = keys or "block = [128, 128]\n"
    profile = "modelopt-mixed" if to in ("fp8-block", "bf16") and "[1," not in keys else "compressed-tensors"
    if "[1," in keys:
        pytest.skip("no profile declares blocks of one row")
    parent = parent_of(tmp_path / "parent", stored_mxfp4(parts))
    path = recipe(
        tmp_path,
        to,
        profile,
        GLOBS,
        keys=SOURCE + keys + "lossless = true\n" + ('numerics = "ue8m0/1"\n' if to == "fp8-block" else ""),
    )
    build(parent, tmp_path / "out", path)
    assert conversion(tmp_path / "out")["exact_blocks"] == conversion(tmp_path / "out")["blocks"] > 0
    expected = formats()["mxfp4"].decode(parts, setting("mxfp4", "compressed-tensors"))
    child = arrays_of(tmp_path / "out")
    got = bf16_to_f32(child[f"{MODULE}.weight"]) if to == "bf16" else decoded(child, MODULE, to, profile)
    assert np.array_equal(expected, got)


def test_what_loses_something_is_counted_and_refused(tmp_path: Path) -> None:
    """Of 1,024 groups 52 lie beyond E4M3's 18 octaves: a build counts the rest as exact, and `lossless` refuses."""
    parts = mxfp4(61, 64, 512, 120, 130)
    parts["scales"].reshape(-1)[:52] = 130 - 30
    parts["codes"] |= 0x11
    parent = parent_of(tmp_path / "parent", stored_mxfp4(parts))
    build(parent, tmp_path / "out", recipe(tmp_path, "nvfp4", globs=GLOBS, keys=SOURCE))
    counted = conversion(tmp_path / "out")
    assert (counted["blocks"], counted["exact_blocks"]) == (1024, 1024 - 52)
    with pytest.raises(BuildError, match=r"52 of 1024 blocks lose something as nvfp4"):
        build(
            parent, tmp_path / "no", recipe(tmp_path, "nvfp4", globs=GLOBS, keys=SOURCE + "lossless = true\n")
        )


def test_a_wide_block_of_mxfp8_is_no_block_fp8(tmp_path: Path) -> None:
    """A [128,128] block whose rows differ by 2^20 in scale has no common FP8 scale: it is refused."""
    codes = np.full((128, 128), 0x39, np.uint8)  # 1.125 everywhere
    scales = np.where(np.arange(128)[:, None] % 2, 127, 107).astype(np.uint8).repeat(4, axis=1)
    tensors = {f"{MODULE}.weight": ("F8_E4M3", codes), f"{MODULE}.weight_scale": ("U8", scales)}
    parent = parent_of(tmp_path / "parent", tensors)
    keys = 'source = "mxfp8"\nblock = [128, 128]\nnumerics = "ue8m0/1"\nlossless = true\n'
    path = recipe(
        tmp_path, "fp8-block", "modelopt-mixed", ["**.*_proj.weight", "**.*_proj.weight_scale"], keys=keys
    )
    with pytest.raises(BuildError, match="1 of 1 blocks lose something"):
        build(parent, tmp_path / "out", path)


@pytest.mark.parametrize("to", ["nvfp4", "fp8-tensor"])
def test_a_fused_group_has_one_number(tmp_path: Path, to: str) -> None:
    """Gate and up, which runtimes fuse, share the number that comes from the larger maximum of the two."""
    home = "model.layers.0.mlp"
    loud = (bell(72, ROWS, COLUMNS).astype(np.int32) + (3 << 7)).astype(np.uint16)  # eight times as large
    weights = {f"{home}.gate_proj": bell(71, ROWS, COLUMNS), f"{home}.up_proj": loud}
    parent = parent_of(tmp_path / "parent", {f"{n}.weight": ("BF16", w) for n, w in weights.items()})
    fused = FUSED
    build(parent, tmp_path / "out", recipe(tmp_path, to, expect=2, more=fused))
    child = arrays_of(tmp_path / "out")
    end = {"nvfp4": ".weight_global_scale", "fp8-tensor": ".weight_scale"}[to]
    assert child[f"{home}.gate_proj{end}"] == child[f"{home}.up_proj{end}"]
    sources = json.loads((tmp_path / "out" / "shardmill.manifest.json").read_text())["shards"][
        "model.safetensors"
    ]["sources"]
    assert set(sources) == {f"{name}.weight" for name in weights}


STACKED = [(name, profile) for name, profile in targets() if not formats()[name].surveys]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("to", "profile"), STACKED)
def test_a_stack_is_its_experts(tmp_path: Path, to: str, profile: str, transposed: bool) -> None:
    """In every format experts in one tensor, [E, out, in] or [E, in, out], have the parts that each has alone."""
    experts = bell(81, 3, 128, 256)
    stored = np.ascontiguousarray(experts.transpose(0, 2, 1)) if transposed else experts
    home = "model.layers.0.mlp.experts.down_proj"
    parent = parent_of(tmp_path / "parent", {home: ("BF16", stored)})
    keys = "transposed = true\n" if transposed else ""
    build(parent, tmp_path / "out", recipe(tmp_path, to, profile, globs="**.experts.down_proj", keys=keys))
    child, form, made = arrays_of(tmp_path / "out"), formats()[to], setting(to, profile)
    assert form.encode is not None
    alone = [form.encode(each, made) for each in experts]
    for role, end in made.spelling.ends.items():
        if role in alone[0]:
            whole = child[part_name(home, end, plain=True)]
            assert len(whole) == 3
            assert whole.tobytes() == b"".join(each[role].tobytes() for each in alone)
    if to != "bf16":
        _come_back(tmp_path, to, profile, home)


def _come_back(folder: Path, to: str, profile: str, home: str) -> None:
    """The stack is read back as BF16 under its own name: each expert's numbers, rounded once."""
    keys = f'source = "{to}"\n'
    held = [name for name in arrays_of(folder / "out") if name.startswith(home)]
    globs = ["**.experts.down_proj"] * (home in held) + ["**.experts.down_proj_*"]
    back = recipe(folder, "bf16", profile, globs=globs, keys=keys)
    build(folder / "out", folder / "back", back)
    made = setting(to, profile)
    child = arrays_of(folder / "out")
    for expert, values in enumerate(bf16_to_f32(arrays_of(folder / "back")[home])):
        parts = {
            role: child[part_name(home, end, plain=True)][expert] for role, end in made.spelling.ends.items()
        }
        numbers = formats()[to].decode(parts, made)
        assert np.array_equal(values, bf16_to_f32(f32_to_bf16(numbers)))


@pytest.mark.parametrize(("to", "profile"), targets())
def test_a_stack_unstacks_into_one_tensor_an_expert(tmp_path: Path, to: str, profile: str) -> None:
    """[E, in, gate + up] becomes experts.E.{gate,up}_proj, with the number of the expert's whole matrix."""
    experts = bell(82, 2, 256, 128)
    stored = np.ascontiguousarray(experts.transpose(0, 2, 1))
    home = "model.layers.0.mlp.experts"
    parent = parent_of(tmp_path / "parent", {f"{home}.gate_up_proj": ("BF16", stored)})
    keys = "transposed = true\nunstack = true\n"
    build(parent, tmp_path / "out", recipe(tmp_path, to, profile, globs="**.experts.gate_up_proj", keys=keys))
    child, form = arrays_of(tmp_path / "out"), formats()[to]
    assert form.encode is not None
    for number, expert in enumerate(experts):
        made = setting(to, profile, np.float32(np.abs(bf16_to_f32(expert)).max()))
        for name, rows in (("gate_proj", slice(0, 128)), ("up_proj", slice(128, 256))):
            for role, array in form.encode(np.ascontiguousarray(expert[rows]), made).items():
                assert child[f"{home}.{number}.{name}{made.spelling.ends[role]}"].tobytes() == array.tobytes()


def test_unfit_weights_and_words_are_refused_by_the_plan(tmp_path: Path) -> None:
    """Columns that are no whole groups, a profile without the word, an unknown format: each is told before a byte."""
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", bell(91, 8, 40))})
    with pytest.raises(PlanError) as refused:
        build(parent, tmp_path / "out", recipe(tmp_path, "mxfp8"))
    assert "40 columns, which are not whole groups of 32" in refused.value.problems[0]
    with pytest.raises(PlanError, match="the profile 'fp8' has no words for int8-channel"):
        build(parent, tmp_path / "out", recipe(tmp_path, "int8-channel", "fp8"))
    with pytest.raises(RecipeError, match="'fp7' is no format"):
        build(parent, tmp_path / "out", recipe(tmp_path, "fp7"))
    with pytest.raises(RecipeError, match="`lossless` should be true or false"):
        build(parent, tmp_path / "out", recipe(tmp_path, "mxfp8", keys='lossless = "yes"\n'))
    with pytest.raises(RecipeError, match="awq is only read"):
        build(parent, tmp_path / "out", recipe(tmp_path, "awq"))


def test_weights_that_share_a_reason_are_one_sentence(tmp_path: Path) -> None:
    """The first and how many more; 3,000 equal lines would hide the other problems."""
    tensors = {f"{MODULE}.{number}.weight": ("BF16", bell(91, 8, 40)) for number in range(9)}
    parent = parent_of(tmp_path / "parent", tensors)
    with pytest.raises(PlanError) as refused:
        build(parent, tmp_path / "out", recipe(tmp_path, "mxfp8", globs=f"{MODULE}.*.weight", expect=9))
    [problem] = refused.value.problems
    assert f"{MODULE}.0.weight in model.safetensors and 8 more: " in problem
