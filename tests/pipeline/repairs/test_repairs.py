"""Repairs: what a recipe may mend in a parent on the way, and what the manifest then tells."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.kernels.nvfp4 import decode, encode
from shardmill.pipeline.container.files import Source
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.errors import BuildError, PlanError, RecipeError
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Settings, Watch
from tests.pipeline.parents import STAGES

HEAD = """
format = 1
name = "repaired"
"""
KEEP = '[[family]]\nname = "rest"\nmatch = {globs}\naction = "keep"\nreason = "as it is"\n'
RECONCILE = """
[[family]]
name = "halves"
match = "experts.*.{gate,up}_proj.{weight_scale,weight_scale_2}"
action = "reconcile"
expect = 8
"""
REST = KEEP.format(globs='["experts.*.{gate,up}_proj.{weight,input_scale}", "norm"]')
Tensors = dict[str, tuple[str, np.ndarray]]


def expert(number: int, gate_scale: float, up_scale: float) -> Tensors:
    """An NVFP4 expert [32, 64] of bell-shaped weights whose halves have these global scales."""
    random = np.random.Generator(np.random.PCG64(number))
    tensors: Tensors = {}
    for half, scale in (("gate", gate_scale), ("up", up_scale)):
        weights = (random.integers(-1000, 1000, (4, 32, 64)).sum(axis=0) * scale).astype(np.float32)
        packed, groups, _ = encode(weights, np.float32(scale))
        name = f"experts.{number}.{half}_proj."
        tensors[name + "weight"] = ("U8", packed)
        tensors[name + "weight_scale"] = ("F8_E4M3", groups)
        tensors[name + "weight_scale_2"] = ("F32", np.array(scale, np.float32))
        tensors[name + "input_scale"] = ("F32", np.array(1 / (1 + number + len(half)), np.float32))
    return tensors


def write_shard(path: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, (dtype, values) in sorted(tensors.items()):
        begin = len(data)
        data += values.tobytes()
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_shard(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    types = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}
    return {
        name: np.frombuffer(raw[begin:][slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in json.loads(raw[8:begin]).items()
        if name != "__metadata__"
    }


def write_parent(folder: Path, shards: dict[str, Tensors]) -> Path:
    folder.mkdir()
    for file, tensors in shards.items():
        write_shard(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text("{}")
    return folder


def build(parent: Path, out: Path, recipe: str) -> tuple[run.Summary, dict[str, Any]]:
    path = parent.parent / "recipe.toml"
    path.write_text(recipe)
    summary = run.build(prepare(load(path), parent), out, Settings(kernel="numpy"), Watch())
    return summary, json.loads((out / "shardmill.manifest.json").read_bytes())


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Two experts, up of the first ten times coarser than gate; the second's halves agree and lie in two shards."""
    one, two = expert(0, 2.0**-12, 10 * 2.0**-12), expert(1, 2.0**-12, 2.0**-12)
    split = {name: two.pop(name) for name in [name for name in two if ".up_proj." in name]}
    norm: Tensors = {"norm": ("F32", np.ones(4, np.float32))}
    return write_parent(
        tmp_path / "parent", {"a.safetensors": {**one, **two}, "b.safetensors": {**split, **norm}}
    )


# ---- reconcile ----------------------------------------------------------------------------------------------------


def test_reconciled_halves_share_the_larger_global_scale_and_keep_their_codes(
    parent: Path, tmp_path: Path
) -> None:
    _, manifest = build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    before, after = read_shard(parent / "a.safetensors"), read_shard(tmp_path / "out" / "a.safetensors")
    gate, up = "experts.0.gate_proj.", "experts.0.up_proj."
    assert after[gate + "weight_scale_2"] == after[up + "weight_scale_2"] == before[up + "weight_scale_2"]
    for name in (gate + "weight", up + "weight", up + "weight_scale"):
        np.testing.assert_array_equal(after[name], before[name])
    served, true = (
        decode(
            shard[gate + "weight"], shard[gate + "weight_scale"], np.float32(shard[gate + "weight_scale_2"])
        )
        for shard in (after, before)
    )
    left = float(np.linalg.norm(served.astype(np.float64) - true) / np.linalg.norm(true.astype(np.float64)))
    [repair] = manifest["repairs"]
    assert repair["tensor"] == gate + "weight_scale"
    assert repair["error_after_ppm"] == pytest.approx(left * 1e6, abs=1)
    assert repair["error_before_ppm"] == pytest.approx(9e6, abs=10)  # the scale is 10 times too large: 900 %
    assert left < 0.04


def test_block_scales_are_rounded_to_nearest_even(parent: Path, tmp_path: Path) -> None:
    build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    name = "experts.0.gate_proj.weight_scale"
    before, after = (read_shard(folder / "a.safetensors")[name] for folder in (parent, tmp_path / "out"))
    wanted = E4M3_VALUES[before] * (np.float32(2.0**-12) / np.float32(10 * 2.0**-12))
    finite = E4M3_VALUES[:127]
    gaps = np.abs(finite[None, :] - wanted.reshape(-1, 1))  # [scales, codes]
    assert (gaps[np.arange(after.size), after.ravel()] == gaps.min(axis=1)).all()


def test_halves_that_agree_pass_through_byte_for_byte(parent: Path, tmp_path: Path) -> None:
    build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    for file in ("a.safetensors", "b.safetensors"):
        before, after = read_shard(parent / file), read_shard(tmp_path / "out" / file)
        for name in before:
            if "experts.1." in name or name == "norm":
                np.testing.assert_array_equal(after[name], before[name])


def test_a_scale_in_another_shard_that_changes_makes_both_shards_again(parent: Path, tmp_path: Path) -> None:
    build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    shard = {
        name: ("U8" if a.dtype == np.uint8 else "F32", a)
        for name, a in read_shard(parent / "b.safetensors").items()
    }
    shard = {
        name: ("F8_E4M3" if name.endswith("weight_scale") else kind, a) for name, (kind, a) in shard.items()
    }
    shard["experts.1.up_proj.weight_scale_2"] = ("F32", np.array(2.0**-11, np.float32))
    write_shard(parent / "b.safetensors", shard)
    summary, _ = build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    assert [verdict.file for verdict in summary.made] == ["a.safetensors", "b.safetensors"]
    after = read_shard(tmp_path / "out" / "a.safetensors")
    assert after["experts.1.gate_proj.weight_scale_2"] == np.float32(2.0**-11)


def test_explain_tells_what_is_repaired_from_now_on(parent: Path, tmp_path: Path) -> None:
    build(parent, tmp_path / "out", HEAD + KEEP.format(globs='"**"'))
    summary, _ = build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    reasons = {verdict.file: verdict.reason for verdict in summary.made}
    first = "experts.0.gate_proj.weight_scale (kept, now changed)"
    assert reasons["a.safetensors"] == f"the recipe changed: {first} and 5 more"
    summary, _ = build(parent, tmp_path / "out", HEAD + KEEP.format(globs='"**"'))
    assert {"changed, now kept" in str(verdict.reason) for verdict in summary.made} == {True}


def test_a_block_scale_that_would_vanish_is_refused_by_name(tmp_path: Path) -> None:
    """Half a millionth of the other half's scale leaves nothing of a block scale: the expert is named."""
    shards = {
        "a.safetensors": {
            **expert(0, 2.0**-30, 1.0),
            **expert(1, 1.0, 1.0),
            "norm": ("F32", np.ones(4, np.float32)),
        }
    }
    parent = write_parent(tmp_path / "parent", shards)
    with pytest.raises(BuildError, match=r"experts\.0\.gate_proj\.weight_scale: block scale 0 would vanish"):
        build(parent, tmp_path / "out", HEAD + RECONCILE + REST)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_recipe_that_reconciles_without_the_stage_is_refused(parent: Path, tmp_path: Path) -> None:
    recipe = HEAD + STAGES + RECONCILE + REST
    with pytest.raises(RecipeError, match=r"'halves' has action 'reconcile'.*rewrite must need it"):
        build(parent, tmp_path / "out", recipe)


def test_what_is_no_scale_of_a_half_cannot_be_reconciled(parent: Path, tmp_path: Path) -> None:
    recipe = HEAD + RECONCILE.replace("{weight_scale,weight_scale_2}", "weight").replace("8", "4")
    recipe += KEEP.format(
        globs='["experts.*.{gate,up}_proj.{weight_scale,weight_scale_2,input_scale}", "norm"]'
    )
    with pytest.raises(
        PlanError, match=r"gate_proj\.weight in a\.safetensors and 3 more: needs its weight and its partner"
    ):
        build(parent, tmp_path / "out", recipe)


# ---- input scales -------------------------------------------------------------------------------------------------

SCALES = "model-input-scales.safetensors"
ADOPT = (HEAD + STAGES + KEEP.format(globs='["**"]')).replace(
    'classify = { needs = ["scan"] }',
    'input_scales = { needs = ["scan"], from = "other.safetensors" }\nclassify = { needs = ["input_scales"] }',
)


def calibrated(factor: float = 1.0) -> Tensors:
    return {f"e.{i}.up_proj.input_scale": ("F32", np.array(factor / (i + 1), np.float32)) for i in range(4)}


@pytest.fixture
def placeholder(tmp_path: Path) -> Path:
    shards = {"a.safetensors": {"norm": ("F32", np.ones(4, np.float32))}, SCALES: calibrated(8.0)}
    return write_parent(tmp_path / "parent", shards)


def test_adopted_input_scales_are_written_and_told(placeholder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "other.safetensors", calibrated(1.0))
    _, manifest = build(placeholder, tmp_path / "out", ADOPT)
    assert read_shard(tmp_path / "out" / SCALES)["e.1.up_proj.input_scale"] == np.float32(0.5)
    assert manifest["repairs"] == [{"repair": "input_scales/1", "file": SCALES}]


def test_a_recalibration_rewrites_the_one_file_and_the_manifest(placeholder: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "other.safetensors", calibrated(1.0))
    build(placeholder, tmp_path / "out", ADOPT)
    write_shard(tmp_path / "other.safetensors", calibrated(2.0))
    summary, _ = build(placeholder, tmp_path / "out", ADOPT)
    assert set(summary.files_written) == {SCALES, "shardmill.manifest.json"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"e.{i}.up_proj.input_scale": 1.0 for i in range(4)}, "all 4 input scales are 1.0: a placeholder"),
        (
            {"e.2.up_proj.input_scale": 0.0},
            r"e\.2\.up_proj\.input_scale is 0\.0; an input scale must be finite",
        ),
        ({"e.2.up_proj.input_scale": float("nan")}, r"e\.2\.up_proj\.input_scale is nan"),
        (
            {"e.2.up_proj.input_scale": 1e6},
            r"e\.2\.up_proj\.input_scale is 1000000\.0, more than 4096 times off",
        ),
        ({"e.2.up_proj.input_scale": None}, r"e\.2\.up_proj\.input_scale is missing"),
        ({"e.9.up_proj.input_scale": 1.0}, r"e\.9\.up_proj\.input_scale is not in the parent"),
    ],
)
def test_unsound_input_scales_are_refused_before_a_byte_is_written(
    placeholder: Path, tmp_path: Path, change: dict[str, float | None], words: str
) -> None:
    tensors = calibrated()
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = ("F32", np.array(value, np.float32))
    write_shard(tmp_path / "other.safetensors", tensors)
    with pytest.raises(PlanError, match=words):
        build(placeholder, tmp_path / "out", ADOPT)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_of_input_scales_is_one_sentence(placeholder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"other\.safetensors, which `from` names, is not a file"):
        build(placeholder, tmp_path / "out", ADOPT)


# ---- drop and rename ----------------------------------------------------------------------------------------------


def test_a_text_only_child_drops_and_renames_by_glob_and_count(tmp_path: Path) -> None:
    ones = ("F32", np.ones(4, np.float32))
    text = {"model.language_model.a": ones, "model.language_model.b.c": ones}
    shards = {"a.safetensors": text, "v.safetensors": {"model.visual.x": ones}}
    parent = write_parent(tmp_path / "parent", shards)
    recipe = HEAD + (
        '[[family]]\nname = "vision"\nmatch = "model.visual.**"\naction = "drop"\nreason = "text only"\nexpect = 1\n'
        '[[family]]\nname = "text"\nmatch = "model.language_model.**"\naction = "rename"\nto = "model.**"\nexpect = 2\n'
    )
    _, manifest = build(parent, tmp_path / "out", recipe)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {"model.a": "a.safetensors", "model.b.c": "a.safetensors"}
    assert manifest["dropped"] == ["model.visual.x"]
    assert manifest["renamed"] == {
        "model.language_model.a": "model.a",
        "model.language_model.b.c": "model.b.c",
    }
    assert not (tmp_path / "out" / "v.safetensors").exists()


def test_a_fused_group_may_be_renamed_as_a_whole(tmp_path: Path) -> None:
    """Each member gets a name of its own, and is otherwise as it was: that is no uneven treatment."""
    ones = ("F32", np.ones((4, 4), np.float32))
    parent = write_parent(tmp_path / "parent", {"a.safetensors": {"old.q": ones, "old.k": ones}})
    recipe = HEAD + '[[family]]\nname = "r"\nmatch = "old.*"\naction = "rename"\nto = "new.*"\nexpect = 2\n'
    recipe += '[[fused]]\nname = "qk"\nmatch = "old.{q,k}"\n'
    _, manifest = build(parent, tmp_path / "out", recipe)
    assert manifest["renamed"] == {"old.q": "new.q", "old.k": "new.k"}


def test_two_tensors_under_one_new_name_are_refused(tmp_path: Path) -> None:
    ones = ("F32", np.ones(4, np.float32))
    parent = write_parent(tmp_path / "parent", {"a.safetensors": {"a.x": ones, "x": ones}})
    recipe = HEAD + KEEP.format(globs='["x"]')
    recipe += '[[family]]\nname = "r"\nmatch = "a.*"\naction = "rename"\nto = "*"\nexpect = 1\n'
    with pytest.raises(PlanError, match="x: would be made twice"):
        build(parent, tmp_path / "out", recipe)


def test_a_new_name_with_other_wildcards_is_refused(tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent", {"a.safetensors": {"a.x": ("F32", np.ones(1, np.float32))}})
    recipe = HEAD + '[[family]]\nname = "r"\nmatch = "a.*"\naction = "rename"\nto = "b"\nexpect = 1\n'
    with pytest.raises(RecipeError, match="must have as many wildcards"):
        build(parent, tmp_path / "out", recipe)


def test_new_names_that_change_places_make_their_shard_again(tmp_path: Path) -> None:
    """Of equal dtype and shape, so that the header stays; the data must move."""
    values = {name: ("F32", np.full(4, value, np.float32)) for name, value in (("a.x", 1), ("a.y", 2))}
    parent = write_parent(tmp_path / "parent", {"a.safetensors": values})
    recipe = HEAD + "".join(
        f'[[family]]\nname = "{name}"\nmatch = "a.{name}"\naction = "rename"\nto = "b.{name}"\nexpect = 1\n'
        for name in "xy"
    )
    build(parent, tmp_path / "out", recipe)
    swapped = recipe.replace('"b.x"', '"b.z"').replace('"b.y"', '"b.x"').replace('"b.z"', '"b.y"')
    summary, _ = build(parent, tmp_path / "out", swapped)
    assert [verdict.file for verdict in summary.made] == ["a.safetensors"]
    made = read_shard(tmp_path / "out" / "a.safetensors")
    assert (made["b.x"][0], made["b.y"][0]) == (2, 1)


def test_hard_links_do_not_disturb_a_worker_that_reads_the_linked_file(parent: Path, tmp_path: Path) -> None:
    """`b` is linked while `a` reads a global scale in it: the link moves the file's ctime, and nothing else."""
    shard = parent / "b.safetensors"
    with Source(shard, file_stat(shard)) as source, Source(shard, file_stat(shard)) as other:
        source.link(tmp_path / "link")
    assert (tmp_path / "link").samefile(shard)
    assert (source.retouched, other.retouched) == (False, True), (
        "the other proves its bytes by reading them again"
    )


def test_the_judge_holds_adopted_scales_to_the_file_that_is_given_and_excuses_nothing(
    placeholder: Path, tmp_path: Path
) -> None:
    """The manifest names no place: without the file the scales differ from the parent's."""
    from shardmill.verify.questions.integrity import integrity
    from shardmill.verify.reading.parents import Parents
    from shardmill.verify.reading.source import Folder

    given = tmp_path / "recalibrated"
    given.mkdir()
    write_shard(given / "other.safetensors", calibrated(1.0))
    build(placeholder, tmp_path / "out", ADOPT.replace('"other', '"recalibrated/other'))

    def changed(parent: Folder | Parents) -> int:
        report = integrity(Folder(tmp_path / "out"), parent)
        return sum(finding.slug == "carried-changed" for finding in report.findings)

    beside = Parents(Folder(placeholder), {"input_scales": Folder(given)})
    assert changed(Folder(placeholder)) == 4
    assert changed(beside) == 0
    write_shard(given / "other.safetensors", calibrated(2.0))
    assert changed(beside) == 4
