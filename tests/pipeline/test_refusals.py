"""What is not understood is refused: in one sentence, by name, and before any byte is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.pipeline.errors import BuildError, CheckpointError, PlanError, RecipeError, ShardmillError
from shardmill.pipeline.manifest.store import STATE_FOLDER
from tests.pipeline.parents import (
    INDEX,
    RECIPE,
    SCALES,
    SHARDS,
    Tensor,
    bf16,
    build,
    e4m3,
    f32,
    listing,
    micro_tensors,
    packed,
    prepare,
    published,
    write_index,
    write_parent,
    write_recipe,
    write_shard,
)

Files = dict[str, dict[str, Tensor]]


def refused(parent: Path, out: Path, kind: type[ShardmillError], recipe: str = RECIPE) -> str:
    """The message with which a build into `out` is refused; nothing is written there nor in the parent."""
    before = listing(parent), listing(out), out.exists()
    with pytest.raises(kind) as refusal:
        build(parent, out, recipe)
    assert (listing(parent), listing(out), out.exists()) == before
    return str(refusal.value)


RECIPES: dict[str, tuple[str, str, type[ShardmillError], list[str]]] = {
    "an unknown key": (
        "expect = 4",
        "expect = 4\nexpekt = 4",
        RecipeError,
        [":17: ", "'expekt' is not known"],
    ),
    "a glob without a match": (
        "attn.{q,k}.weight",
        "atn.{q,k}.weight",
        PlanError,
        ["'model.layers.*.atn.q.weight' matches no tensor", "nearest names are model.layers.*.attn.q.weight"],
    ),
    "a tensor that no rule matches": (
        '["model.layers.*.norm.weight", "model.embed.weight"]',
        '"model.layers.*.norm.weight"',
        PlanError,
        ["model.embed.weight: no family matches it"],
    ),
    "a tensor that two rules match": (
        '"model.embed.weight"]',
        '"model.embed.weight", "model.layers.1.attn.q.weight"]',
        PlanError,
        ["model.layers.1.attn.q.weight: the families 'attention' and 'norms' both match it"],
    ),
    "a wrong count": (
        "expect = 4",
        "expect = 5",
        PlanError,
        ["'attention': expects 5 tensors, the parent has 4"],
    ),
    "a size at which it could not load": (
        "tensor_parallel = [1, 2]",
        "tensor_parallel = [8]",
        PlanError,
        ["tensor-parallel size 8", "2 rows a rank"],
    ),
    "a block that is not square": ("block = [8, 8]", "block = [4, 8]", PlanError, ["square"]),
    "unknown numerics": (
        "block = [8, 8]",
        'block = [8, 8]\nnumerics = "none/1"',
        PlanError,
        ["'none/1' are not known; choose from amax/1"],
    ),
    "a stage that is not known": (
        "[[fused]]",
        "[stages]\nscam = { needs = [] }\n\n[[fused]]",
        RecipeError,
        ["'scam' is not known", "'scan'"],
    ),
    "a fused glob without a match": (
        'name = "attention input"\nmatch = "model.layers.*.attn.{q,k}.weight"',
        'name = "attention input"\nmatch = "model.layers.*.attn.{q,k,v}.weight"',
        PlanError,
        ["fused group 'attention input': the glob 'model.layers.*.attn.v.weight' matches no tensor"],
    ),
}


@pytest.mark.parametrize("case", RECIPES)
@pytest.mark.parametrize("place", ["first", "again"])
def test_a_recipe_that_does_not_fit_is_refused(parent: Path, tmp_path: Path, case: str, place: str) -> None:
    """Into a new folder, and over an earlier checkpoint: neither changes."""
    old, new, kind, words = RECIPES[case]
    assert old in RECIPE
    if place == "again":
        build(parent, tmp_path / "out")
    message = refused(parent, tmp_path / "out", kind, RECIPE.replace(old, new, 1))
    assert all(word in message for word in words), message
    assert not message.endswith("\n")


def test_all_problems_of_a_plan_are_told_at_once(parent: Path, tmp_path: Path) -> None:
    recipe = RECIPE.replace("expect = 4", "expect = 3").replace(
        '"model.embed.weight"]', '"model.embeds.weight"]'
    )
    message = refused(parent, tmp_path / "out", PlanError, recipe)
    assert len(message.splitlines()) == 3
    assert "expects 3" in message
    assert (
        "'model.embeds.weight' matches no tensor of the parent; the nearest names are model.embed" in message
    )
    assert "model.embed.weight: no family matches it" in message


def test_many_problems_of_one_kind_are_counted(tmp_path: Path) -> None:
    files = micro_tensors()
    files[SHARDS[1]] |= {f"stray.{i}": f32(1.0) for i in range(100)}
    message = refused(write_parent(tmp_path / "parent", files), tmp_path / "out", PlanError)
    assert len(message.splitlines()) == 6
    assert "... and 95 more tensors without exactly one family" in message


def test_a_fused_group_that_is_treated_unevenly_is_refused(parent: Path, tmp_path: Path) -> None:
    """One member kept, the other quantized: a runtime could not fuse them."""
    recipe = RECIPE.replace("attn.{q,k}.weight", "attn.q.weight", 1).replace("expect = 4", "expect = 2")
    recipe = recipe.replace('"model.embed.weight"]', '"model.embed.weight", "model.layers.*.attn.k.weight"]')
    message = refused(parent, tmp_path / "out", PlanError, recipe)
    assert "fused group 'attention input' at 0: its members get different actions" in message
    assert "model.layers.0.attn.k.weight: kept; model.layers.0.attn.q.weight: amax/1 [4,4]" in message


def test_a_fused_group_of_which_a_member_is_missing_is_refused(tmp_path: Path) -> None:
    files = micro_tensors()
    del files[SHARDS[2]]["model.layers.1.attn.k.weight"]
    parent = write_parent(tmp_path / "parent", files)
    message = refused(parent, tmp_path / "out", PlanError, RECIPE.replace("expect = 4", "expect = 3"))
    assert "fused group 'attention input' at 1: model.layers.1.attn.k.weight is missing" in message


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (e4m3("x", 16, 10), "is F8_E4M3, already quantized or packed"),
        (packed("x", 16, 10), "is U8, already quantized or packed"),
        (("I8", (16, 10), bytes(160)), "is I8, already quantized or packed"),
        (("F8_E5M2", (16, 10), bytes(160)), "is F8_E5M2, already quantized or packed"),
        (("I64", (16, 10), bytes(1280)), "is I64, no float; only BF16, F16, F32"),
        (("F64", (16, 10), bytes(1280)), "is F64, no float"),
        (bf16("x", 160), "only matrices [rows, columns] can be quantized"),
        (bf16("x", 4, 4, 10), "only matrices [rows, columns] can be quantized"),
        (("BF16", (), bytes(2)), "only matrices [rows, columns] can be quantized"),
        (("BF16", (0, 10), b""), "only matrices [rows, columns] can be quantized"),
    ],
)
def test_a_source_that_cannot_be_quantized_is_refused(tmp_path: Path, weight: Tensor, words: str) -> None:
    """FP8 and packed codes above all: encoding their bytes again would destroy them silently."""
    files = micro_tensors()
    files[SHARDS[2]]["model.layers.0.mlp.down.weight"] = weight
    message = refused(write_parent(tmp_path / "parent", files), tmp_path / "out", PlanError)
    assert f"model.layers.0.mlp.down.weight in {SHARDS[2]}: " in message
    assert words in message


def test_a_weight_whose_scales_are_there_already_is_refused(tmp_path: Path) -> None:
    files = micro_tensors()
    files[SHARDS[0]]["model.layers.0.mlp.down.weight_scale_inv"] = f32(1.0)
    recipe = RECIPE.replace(
        '"model.embed.weight"]', '"model.embed.weight", "model.layers.*.mlp.down.weight_scale_inv"]'
    )
    message = refused(write_parent(tmp_path / "parent", files), tmp_path / "out", PlanError, recipe)
    assert "the parent holds model.layers.0.mlp.down.weight_scale_inv already" in message


def truncate(parent: Path) -> None:
    data = (parent / SHARDS[2]).read_bytes()
    (parent / SHARDS[2]).write_bytes(data[:-1])


def lengthen(parent: Path) -> None:
    (parent / SHARDS[2]).write_bytes((parent / SHARDS[2]).read_bytes() + b"\0")


def empty(parent: Path) -> None:
    (parent / SHARDS[2]).write_bytes(b"")


def rewrite_header(parent: Path, change: Callable[[dict[str, dict[str, list[int]]]], None]) -> None:
    data = (parent / SHARDS[2]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    (parent / SHARDS[2]).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def overlap(parent: Path) -> None:
    def change(entries: dict[str, dict[str, list[int]]]) -> None:
        one = entries["model.layers.1.attn.k.weight"]
        entries["model.layers.1.attn.q.weight"]["data_offsets"] = one["data_offsets"]

    rewrite_header(parent, change)


def hole(parent: Path) -> None:
    rewrite_header(parent, lambda entries: entries.pop("model.layers.1.attn.q.weight") and None)


def missing_file(parent: Path) -> None:
    (parent / SHARDS[1]).unlink()


def index_of(parent: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((parent / INDEX).read_text())["weight_map"]
    return found


def missing_tensor(parent: Path) -> None:
    write_index(parent, {**index_of(parent), "model.ghost": SHARDS[0]})


def misplaced_tensor(parent: Path) -> None:
    write_index(parent, {**index_of(parent), "model.embed.weight": SHARDS[0]})


def unindexed_tensor(parent: Path) -> None:
    write_index(
        parent, {name: file for name, file in index_of(parent).items() if "layers.1.norm" not in name}
    )


def twice(parent: Path) -> None:
    extra = {"model.embed.weight": micro_tensors()[SHARDS[1]]["model.embed.weight"]}
    write_shard(parent / SCALES, extra)


def index_leads_out(parent: Path) -> None:
    write_index(parent, {**index_of(parent), "model.embed.weight": "../secret.safetensors"})


def index_is_garbage(parent: Path) -> None:
    (parent / INDEX).write_text("{")


def index_is_a_list(parent: Path) -> None:
    (parent / INDEX).write_text("[]")


def index_maps_numbers(parent: Path) -> None:
    (parent / INDEX).write_text('{"weight_map": {"a": 1}}')


def no_index(parent: Path) -> None:
    (parent / INDEX).unlink()


def no_config(parent: Path) -> None:
    (parent / "config.json").unlink()


def config_is_garbage(parent: Path) -> None:
    (parent / "config.json").write_text("not json")


def config_has_surrogates(parent: Path) -> None:
    (parent / "config.json").write_text('{"a": "\\ud800"}')


PARENTS: list[tuple[Callable[[Path], None], str]] = [
    (truncate, f"{SHARDS[2]}: .*truncated"),
    (lengthen, f"{SHARDS[2]}: .*followed by bytes that no tensor owns"),
    (empty, f"{SHARDS[2]}: 0 bytes are too few"),
    (overlap, f"{SHARDS[2]}: model.layers.1.attn.[kq].weight begins at byte .*: an overlap"),
    (hole, f"{SHARDS[2]}: .*a hole"),
    (missing_file, f"names {SHARDS[1]}, which is not in"),
    (missing_tensor, f"says that model.ghost is in {SHARDS[0]}, but no shard holds it"),
    (misplaced_tensor, f"says that model.embed.weight is in {SHARDS[0]}, but it is in {SHARDS[1]}"),
    (unindexed_tensor, "holds model.layers.1.norm.weight, which model.safetensors.index.json does not name"),
    (twice, f"model.embed.weight: is in two files, {SHARDS[1]} and {SCALES}"),
    (index_leads_out, "names '../secret.safetensors', which is not a .safetensors file beside it"),
    (index_is_garbage, "model.safetensors.index.json: is not valid JSON"),
    (index_is_a_list, "model.safetensors.index.json: is not a JSON object"),
    (index_maps_numbers, "weight_map must map tensor names to file names"),
    (no_index, "safetensors files and no model.safetensors.index.json"),
    (no_config, "config.json is missing"),
    (config_is_garbage, "config.json: is not valid JSON"),
    (config_has_surrogates, "config.json: is not valid JSON"),
]


@pytest.mark.parametrize(("harm", "words"), PARENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_parent_that_contradicts_itself_is_refused_by_name(
    parent: Path, tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    build(parent, tmp_path / "out")
    harm(parent)
    for out in (tmp_path / "out", tmp_path / "new"):
        message = refused(parent, out, CheckpointError)
        assert "\n" not in message
        assert re.search(words, message), message


def test_a_parent_that_is_not_there_or_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is not a folder; give the parent"):
            build(place, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path / "empty", tmp_path / "out", CheckpointError)


def test_an_output_folder_that_is_the_parent_is_refused_whatever_it_is_called(
    parent: Path, tmp_path: Path
) -> None:
    """By its name, through a link, inside it, or around it."""
    (tmp_path / "link").symlink_to(parent)
    for out in (parent, tmp_path / "link", parent / ".." / "parent"):
        assert "is the parent itself" in refused(parent, out, BuildError)
    for out in (parent / "out", parent / "a" / "b", tmp_path / "link" / "out"):
        assert "overlap: one contains the other" in refused(parent, out, BuildError)
    recipe = write_recipe(tmp_path / "recipes")
    before = listing(tmp_path)
    with pytest.raises(BuildError, match="overlap: one contains the other"):
        build(parent, tmp_path, recipe)
    assert listing(tmp_path) == before


def test_an_output_folder_with_foreign_files_is_refused(parent: Path, tmp_path: Path) -> None:
    """Someone's photographs are not overwritten, and a checkpoint of another tool is not mixed with ours."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "photo.jpg").write_text("x")
    assert "is not empty (photo.jpg, of 1 entries)" in refused(parent, out, BuildError)
    (out / "photo.jpg").unlink()
    shutil.copytree(parent, out, dirs_exist_ok=True)
    assert "was not built by shardmill; choose an empty --out" in refused(parent, out, BuildError)


def test_an_output_path_that_is_a_file_is_refused(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(BuildError, match="out: cannot be written"):
        build(parent, tmp_path / "out")
    with pytest.raises(BuildError, match="out/below: cannot be written"):
        build(parent, tmp_path / "out" / "below")
    assert (tmp_path / "out").read_text() == "x"


def test_an_empty_output_folder_is_taken(parent: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    (tmp_path / "out").mkdir()
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_a_disk_without_room_is_refused_before_anything_is_made(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000, 9_000, 1_000))
    out = tmp_path / "out"
    with pytest.raises(BuildError, match=r"needs \d+ bytes and the disk has 1000 free; free some space"):
        build(parent, out)
    assert published(out) == {}
    assert list((out / STATE_FOLDER / "staging").iterdir()) == []


def test_files_that_are_passed_on_as_hard_links_need_no_room(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """Room for the two shards that are rewritten is enough, and less is not."""
    rewritten = len(reference[SHARDS[0]]) + len(reference[SHARDS[2]])
    usage, free = namedtuple("usage", "total used free"), [rewritten - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, free[0]))
    with pytest.raises(BuildError, match=f"needs {rewritten} bytes and the disk has {free[0]} free"):
        build(parent, tmp_path / "out", passthrough="hardlink")
    free[0] = rewritten
    build(parent, tmp_path / "out", passthrough="hardlink")
    assert published(tmp_path / "out") == reference


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC1, 0x7F80, 0xFF80], ids=["NaN", "-NaN", "Inf", "-Inf"])
@pytest.mark.parametrize("strip_bytes", [64, 1 << 20])
def test_a_source_that_is_not_finite_stops_the_build_and_is_told_by_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], bits: int, strip_bytes: int
) -> None:
    """Tensor, row, column and value; the earlier checkpoint stays, and a mended parent builds."""
    monkeypatch.setattr(sys.modules["shardmill.pipeline.stages.quantize"], "STRIP_BYTES", strip_bytes)
    parent = write_parent(tmp_path / "parent")
    build(parent, tmp_path / "out")
    files = micro_tensors()
    name = "model.layers.1.mlp.down.weight"
    _, shape, data = files[SHARDS[2]][name]
    values = np.frombuffer(data, "<u2").reshape(shape).copy()
    values[9, 13] = bits
    files[SHARDS[2]][name] = ("BF16", shape, values.tobytes())
    write_shard(parent / SHARDS[2], files[SHARDS[2]])
    value = {0x7FC0: "nan", 0xFFC1: "nan", 0x7F80: "inf", 0xFF80: "-inf"}[bits]
    with pytest.raises(BuildError) as stop:
        build(parent, tmp_path / "out")
    assert str(stop.value).startswith(f"{SHARDS[2]}: {name}: the weight at row 9, column 13 is {value}")
    assert published(tmp_path / "out") == reference
    write_shard(parent / SHARDS[2], micro_tensors()[SHARDS[2]])
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_a_tensor_that_is_kept_may_hold_anything(tmp_path: Path) -> None:
    """Not ours to judge: it passes through byte for byte."""
    files = micro_tensors()
    files[SHARDS[1]]["model.embed.weight"] = ("BF16", (2,), b"\xc0\x7f\x80\x7f")
    parent = write_parent(tmp_path / "parent", files)
    build(parent, tmp_path / "out")
    assert (tmp_path / "out" / SHARDS[1]).read_bytes() == (parent / SHARDS[1]).read_bytes()


def test_dotfiles_are_no_shards(parent: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    """What a file manager leaves beside a weight is not taken for one."""
    (parent / f"._{SHARDS[0]}").write_bytes(b"Mac OS X")
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (("U8", (16,), bytes(16)), e4m3("s", 4, 2)),
        (packed("w", 4, 16), ("F8_E4M3", (8,), bytes(8))),
        (packed("w", 4, 16), ("F8_E4M3", (4, 0), b"")),
        (packed("w", 4, 16), ("F8_E4M3", (), bytes(1))),
        (packed("w", 4, 16), bf16("s", 4, 2)),
        (e4m3("w", 4, 16), e4m3("s", 4, 2)),
        (packed("w", 4, 16), e4m3("s", 3, 2)),
        (packed("w", 4, 16), e4m3("s", 4, 3)),
    ],
)
def test_packed_tensors_of_odd_shapes_get_no_entry(tmp_path: Path, weight: Tensor, scale: Tensor) -> None:
    """U8 beside E4M3 is NVFP4 only where both are matrices that fit each other; planning never fails over it."""
    files = micro_tensors()
    files[SHARDS[0]]["model.layers.0.experts.0.weight"] = weight
    files[SHARDS[0]]["model.layers.0.experts.0.weight_scale"] = scale
    build(write_parent(tmp_path / "parent", files), tmp_path / "out")
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "quantized_layers"
    ]
    assert "model.layers.0.experts.0" not in layers
    assert "model.layers.0.experts.1" in layers


def test_a_carried_file_that_cannot_be_read_is_told_before_any_shard_is_made(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def denied(path: Path, *mode: int, **more: int | None) -> int:
        if path == parent / "LICENSE":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *mode, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(CheckpointError) as error:
        build(parent, tmp_path / "out")
    named = f"{parent / 'LICENSE'}: cannot be opened: Permission denied"
    assert str(error.value) == f"{named}; make it readable, or remove it"
    assert not (tmp_path / "out").exists()


def test_a_parent_that_cannot_be_read_is_named(parent: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (parent / SCALES).chmod(0)
    assert f"{SCALES}: cannot be read: Permission denied" in refused(
        parent, tmp_path / "out", CheckpointError
    )


@pytest.mark.parametrize("axes", [("rows", "columns"), ("rows", "rows")])
def test_two_parallel_tables_that_match_one_weight_are_refused(parent: Path, axes: tuple[str, str]) -> None:
    """Like two families: which of them held would depend on their order."""
    table = f"""
[[parallel]]
axis = "{axes[1]}"
match = "model.layers.0.attn.q.weight"
"""
    with pytest.raises(PlanError) as refused:
        prepare(parent, RECIPE + table)
    name = "model.layers.0.attn.q.weight"
    assert list(refused.value.problems) == [
        f"{name}: two [[parallel]] tables match it ('{axes[0]}' and '{axes[1]}'); narrow one"
    ]


def test_two_globs_of_one_parallel_table_may_match_one_weight(parent: Path) -> None:
    same = 'match = ["model.layers.*.attn.{q,k}.weight", "model.layers.0.attn.q.weight"]\n\n[[alias]]'
    prepare(parent, RECIPE.replace('match = "model.layers.*.attn.{q,k}.weight"\n\n[[alias]]', same))
