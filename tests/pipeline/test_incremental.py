"""Building again: what is done is asserted, not only what comes out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.pipeline.container.files import Source
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import FileRecord, Manifest
from shardmill.pipeline.manifest.store import STATE_FOLDER
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import (
    INDEX,
    MANIFEST,
    RECIPE,
    SCALES,
    SHARDS,
    build,
    change_tensor,
    listing,
    micro_tensors,
    published,
    scalar,
    why,
    write_index,
    write_parent,
    write_shard,
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file whose data the pipeline opens, in order."""
    paths: list[Path] = []
    original = Source.__init__

    def noting(self: Source, path: Path, *rest: object) -> None:
        paths.append(path)
        original(self, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Source, "__init__", noting)
    return paths


def touch(path: Path) -> None:
    """Another time, the same bytes."""
    os.utime(path, ns=(1, 1))


def same_as_fresh(parent: Path, out: Path, recipe: str = RECIPE) -> bool:
    """Whether `out` publishes what a first build would."""
    fresh = out.with_name("fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    build(parent, fresh, recipe)
    return published(out) == published(fresh)


def test_nothing_to_do_reads_no_data_and_writes_nothing(
    parent: Path, built: Path, opened: list[Path]
) -> None:
    before = listing(built)
    summary = build(parent, built)
    assert (summary.made, summary.files_written, summary.bytes_read, opened) == ((), (), 0, [])
    after = listing(built)
    assert {name: after[name] for name in published(built)} == {
        name: before[name] for name in published(built)
    }
    assert why(parent, built) == {}


def test_changed_input_scales_rewrite_that_file_and_the_manifest_alone(
    parent: Path, built: Path, opened: list[Path]
) -> None:
    """No weight shard is read or written, and explain says why."""
    change_tensor(parent / SCALES, "model.layers.1.experts.0.input_scale")
    before = listing(built)
    reasons = why(parent, built)
    assert reasons == {SCALES: f"the parent's {SCALES} changed: model.layers.1.experts.0.input_scale"}
    summary = build(parent, built)
    assert sorted(summary.files_written) == sorted([SCALES, MANIFEST])
    assert {path.name for path in opened} == {SCALES}
    assert summary.bytes_read == (parent / SCALES).stat().st_size
    moved_twice = {SCALES, MANIFEST, INDEX}
    after = listing(built)
    for name in published(built).keys() - moved_twice:
        assert after[name] == before[name], name
    assert after[INDEX][2] == before[INDEX][2]
    assert same_as_fresh(parent, built)


def test_a_new_input_scales_file_from_another_revision_is_named_by_its_tensors(
    parent: Path, built: Path
) -> None:
    tensors = {name: scalar(9.0) for name in micro_tensors()[SCALES]}
    write_shard(parent / SCALES, tensors)
    assert why(parent, built) == {
        SCALES: f"the parent's {SCALES} changed: model.layers.0.experts.0.input_scale and 3 more"
    }


@pytest.mark.parametrize("file", [*SHARDS, SCALES, "tokenizer.json", "config.json", INDEX])
def test_a_touched_file_with_the_same_bytes_rebuilds_nothing(
    parent: Path, built: Path, opened: list[Path], file: str
) -> None:
    """It is read once to know, and believed after that."""
    touch(parent / file)
    summary = build(parent, built)
    assert (summary.made, summary.files_written) == ((), ())
    assert {path.name for path in opened} <= {file}
    opened.clear()
    build(parent, built)
    assert opened == []


def test_a_parent_copied_to_another_folder_rebuilds_nothing(parent: Path, twin: Path, built: Path) -> None:
    summary = build(twin, built)
    assert (summary.made, summary.files_written) == ((), ())


def test_a_changed_weight_rebuilds_its_shard_alone(parent: Path, built: Path) -> None:
    change_tensor(parent / SHARDS[2], "model.layers.1.mlp.down.weight", place=5)
    assert why(parent, built) == {
        SHARDS[2]: f"the parent's {SHARDS[2]} changed: model.layers.1.mlp.down.weight"
    }
    assert sorted(build(parent, built).files_written) == sorted([SHARDS[2], MANIFEST])
    assert same_as_fresh(parent, built)


def test_a_changed_weight_that_is_passed_on_rebuilds_its_shard_alone(parent: Path, built: Path) -> None:
    change_tensor(parent / SHARDS[1], "model.embed.weight")
    assert list(why(parent, built)) == [SHARDS[1]]
    assert sorted(build(parent, built).files_written) == sorted([SHARDS[1], MANIFEST])
    assert same_as_fresh(parent, built)


def test_a_change_that_keeps_size_and_mtime_is_seen(parent: Path, built: Path) -> None:
    """The inode's own time of change betrays it."""
    times = (parent / SHARDS[1]).stat()
    change_tensor(parent / SHARDS[1], "model.embed.weight")
    os.utime(parent / SHARDS[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(why(parent, built)) == [SHARDS[1]]


def test_another_block_in_one_family_rebuilds_the_shards_that_hold_it(parent: Path, built: Path) -> None:
    recipe = RECIPE.replace("[8, 8]", "[4, 4]")
    reasons = why(parent, built, recipe)
    assert list(reasons) == [SHARDS[2]]
    assert "model.layers.0.mlp.down.weight (amax/1 [8,8], now amax/1 [4,4]) and 1 more" in reasons[SHARDS[2]]
    summary = build(parent, built, recipe)
    assert sorted(summary.files_written) == sorted([SHARDS[2], "config.json", "README.md", INDEX, MANIFEST])
    assert same_as_fresh(parent, built, recipe)


def test_other_numerics_rebuild_the_shards_that_hold_the_family(parent: Path, built: Path) -> None:
    recipe = RECIPE.replace("block = [8, 8]", 'block = [8, 8]\nnumerics = "ue8m0/1"')
    assert list(why(parent, built, recipe)) == [SHARDS[2]]
    build(parent, built, recipe)
    assert same_as_fresh(parent, built, recipe)


def test_a_family_that_is_kept_from_now_on_rebuilds_its_shards_and_back(
    parent: Path, built: Path, reference: dict[str, bytes]
) -> None:
    """Scales that no longer exist are gone from index and manifest; switching back gives the first bytes again."""
    kept = RECIPE.replace(
        'action = "quantize"\nblock = [8, 8]\nexpect = 2', 'action = "keep"\nreason = "why not"'
    )
    reasons = why(parent, built, kept)
    assert reasons.keys() == {SHARDS[2]}
    assert "now kept" in reasons[SHARDS[2]]
    build(parent, built, kept)
    assert "model.layers.0.mlp.down.weight_scale_inv" not in (built / INDEX).read_text()
    assert same_as_fresh(parent, built, kept)
    assert [verdict.file for verdict in build(parent, built).made] == [SHARDS[2]]
    assert published(built) == reference


KEPT_EMBEDDING = ', "model.embed.weight"]'
OTHER_EMBEDDING = (
    ']\naction = "keep"\nreason = "small"\n\n[[family]]\nname = "e"\nmatch = ["model.embed.weight"]'
)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ('action = "drop"', "(kept, now dropped)"),
        ('action = "rename"\nto = "embed"\nexpect = 1', "(kept, now renamed embed)"),
    ],
)
def test_explain_tells_what_is_dropped_or_renamed_from_now_on_and_back(
    parent: Path, built: Path, action: str, told: str
) -> None:
    recipe = RECIPE.replace(KEPT_EMBEDDING, OTHER_EMBEDDING)
    head, _, tail = recipe.rpartition('action = "keep"')
    recipe = head + action + tail
    assert why(parent, built, recipe) == {SHARDS[1]: f"the recipe changed: model.embed.weight {told}"}
    build(parent, built, recipe)
    assert "now kept)" in why(parent, built)[SHARDS[1]]


def test_another_reason_or_revision_rewrites_no_shard(parent: Path, built: Path) -> None:
    """The README and the manifest tell it; weights are not read."""
    assert build(parent, built, RECIPE.replace("already packed", "packed")).files_written == (
        "README.md",
        MANIFEST,
    )
    moved = RECIPE.replace("0123456789abcdef0123456789abcdef01234567", "f" * 40)
    assert build(parent, built, moved).made == ()
    assert same_as_fresh(parent, built, moved)


def edit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


HARMED = [
    *((file, edit) for file in (*SHARDS, SCALES, INDEX, "config.json", "README.md", "tokenizer.json")),
    *((file, harm) for file in (SHARDS[0], INDEX, "assets/logo.txt") for harm in (Path.unlink, cut, empty)),
]


@pytest.mark.parametrize(("file", "harm"), HARMED, ids=lambda value: getattr(value, "__name__", value))
def test_a_harmed_output_file_is_made_again_and_no_other(
    parent: Path, built: Path, reference: dict[str, bytes], file: str, harm: Callable[[Path], None]
) -> None:
    harm(built / file)
    summary = build(parent, built)
    assert summary.files_written == (file,)
    assert published(built) == reference


def test_an_output_shard_that_became_a_link_or_folder_is_made_again(
    parent: Path, built: Path, reference: dict[str, bytes]
) -> None:
    (built / SHARDS[1]).unlink()
    (built / SHARDS[1]).symlink_to(parent / SHARDS[1])
    build(parent, built)
    assert published(built) == reference


def test_explain_says_why_an_output_file_is_made_again(parent: Path, built: Path) -> None:
    edit(built / SHARDS[0])
    cut(built / SHARDS[1])
    (built / SHARDS[2]).unlink()
    reasons = why(parent, built)
    assert reasons[SHARDS[0]] == f"its bytes in {built} are not those that were built"
    assert "bytes in" in reasons[SHARDS[1]]
    assert reasons[SHARDS[2]] == f"it is missing from {built}"


def test_without_its_state_folder_a_checkpoint_is_hashed_and_left_as_it_is(
    parent: Path, built: Path, opened: list[Path]
) -> None:
    shutil.rmtree(built / STATE_FOLDER)
    summary = build(parent, built)
    assert (summary.made, summary.files_written) == ((), ())
    assert {path.name for path in opened} >= {*SHARDS, SCALES}
    opened.clear()
    build(parent, built)
    assert opened == []


def test_without_its_manifest_a_checkpoint_is_built_anew(
    parent: Path, built: Path, reference: dict[str, bytes]
) -> None:
    """The state folder says that the output is ours."""
    (built / MANIFEST).unlink()
    assert len(build(parent, built).made) == 4
    assert published(built) == reference


def test_a_new_carried_file_is_copied_and_a_removed_one_removed(parent: Path, built: Path) -> None:
    (parent / "NOTICE").write_text("new")
    (parent / "tokenizer.json").unlink()
    summary = build(parent, built)
    assert summary.made == ()
    assert sorted(summary.files_written) == sorted(["NOTICE", "README.md", MANIFEST])
    assert not (built / "tokenizer.json").exists()
    assert same_as_fresh(parent, built)


def test_a_changed_carried_file_is_copied_again_and_no_other(parent: Path, built: Path) -> None:
    (parent / "assets" / "logo.txt").write_text("another logo")
    assert sorted(build(parent, built).files_written) == sorted(["assets/logo.txt", MANIFEST])
    assert same_as_fresh(parent, built)


def test_a_changed_config_rewrites_config_and_what_names_the_plan(parent: Path, built: Path) -> None:
    config = json.loads((parent / "config.json").read_text())
    (parent / "config.json").write_text(json.dumps({**config, "eps": 1e-05}))
    summary = build(parent, built)
    assert (summary.made, sorted(summary.files_written)) == (
        (),
        sorted(["config.json", "README.md", MANIFEST]),
    )
    assert same_as_fresh(parent, built)


def test_a_manifest_that_names_a_place_outside_is_refused(parent: Path, built: Path, tmp_path: Path) -> None:
    """Whoever wrote it: nothing outside the output folder is ever removed."""
    (tmp_path / "precious").write_text("x")
    manifest = Manifest.from_json((built / MANIFEST).read_bytes())
    files = {**manifest.files, "../precious": FileRecord(1, None)}
    (built / MANIFEST).write_bytes(replace(manifest, files=files).to_json())
    with pytest.raises(CheckpointError, match=r"'\.\./precious', which leads out of the folder"):
        build(parent, built)
    assert (tmp_path / "precious").exists()


def test_without_its_manifest_what_is_no_longer_planned_is_still_removed(parent: Path, built: Path) -> None:
    (built / MANIFEST).unlink()
    (parent / "tokenizer.json").unlink()
    build(parent, built)
    assert not (built / "tokenizer.json").exists()


def test_a_tensor_that_moved_to_another_shard_rebuilds_both(
    tmp_path: Path, parent: Path, built: Path
) -> None:
    files = micro_tensors()
    files[SHARDS[0]]["model.embed.weight"] = files[SHARDS[1]].pop("model.embed.weight")
    write_parent(parent, files)
    reasons = why(parent, built)
    assert reasons == dict.fromkeys(SHARDS[:2], "the parent's header changed")
    build(parent, built)
    assert same_as_fresh(parent, built)


def test_a_shard_that_the_parent_lost_is_removed(parent: Path, built: Path) -> None:
    files = micro_tensors()
    files[SHARDS[0]] |= files.pop(SHARDS[1])
    (parent / SHARDS[1]).unlink()
    write_parent(parent, files)
    build(parent, built)
    assert not (built / SHARDS[1]).exists()
    assert same_as_fresh(parent, built)


def test_a_parent_that_became_one_file_leaves_no_index_behind(parent: Path, built: Path) -> None:
    whole = {name: tensor for tensors in micro_tensors().values() for name, tensor in tensors.items()}
    for file in (*SHARDS, SCALES, INDEX):
        (parent / file).unlink()
    write_shard(parent / "model.safetensors", whole)
    build(parent, built)
    assert same_as_fresh(parent, built)
    (parent / "model.safetensors").unlink()
    for file, tensors in micro_tensors().items():
        write_shard(parent / file, tensors)
    write_index(parent, {name: file for file, tensors in micro_tensors().items() for name in tensors})
    build(parent, built)
    assert same_as_fresh(parent, built)


def test_paranoid_believes_no_stat(
    parent: Path, built: Path, reference: dict[str, bytes], opened: list[Path]
) -> None:
    """It hashes every file, finds what a forged stat cache hides, and leaves the rest alone."""
    summary = build(parent, built, paranoid=True)
    assert (summary.made, summary.files_written) == ((), ())
    assert {path.name for path in opened} >= {*SHARDS, SCALES, "tokenizer.json"}
    for file in (SHARDS[1], "LICENSE"):
        edit(built / file)
    seen = json.loads((built / STATE_FOLDER / "seen.json").read_text())
    for file in (SHARDS[1], "LICENSE"):
        facts = (built / file).stat()
        seen["output"][file] = [facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns]
    (built / STATE_FOLDER / "seen.json").write_text(json.dumps(seen))
    assert build(parent, built).files_written == ()
    assert sorted(build(parent, built, paranoid=True).files_written) == sorted([SHARDS[1], "LICENSE"])
    assert published(built) == reference


def test_file_digests_can_be_left_out_and_added_later(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], opened: list[Path]
) -> None:
    """Without sha256 the manifest says so; with it again, files are hashed where they lie and nothing is made."""
    out = tmp_path / "out"
    build(parent, out, file_digests=False)
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["algorithms"]["file"] == "none"
    assert {manifest["files"][file]["sha256"] for file in SHARDS} == {None}
    assert {name: data for name, data in published(out).items() if name != MANIFEST} == {
        name: data for name, data in reference.items() if name != MANIFEST
    }
    opened.clear()
    summary = build(parent, out)
    assert (summary.made, summary.files_written) == ((), (MANIFEST,))
    assert {path.parent for path in opened} == {out}
    assert published(out) == reference
    assert build(parent, out, file_digests=False).made == ()
    assert json.loads((out / MANIFEST).read_text()) == manifest


def test_an_edited_manifest_is_refused_by_name(parent: Path, built: Path) -> None:
    text = (built / MANIFEST).read_text()
    (built / MANIFEST).write_text(text.replace('"amax/1"', '"amax/2"', 1))
    with pytest.raises(
        CheckpointError, match=r"shardmill\.manifest\.json: was edited since it was written; delete it"
    ):
        build(parent, built)
    (built / MANIFEST).unlink()
    build(parent, built)
    assert (built / MANIFEST).read_text() == text


@pytest.mark.parametrize(
    "garbage", ["", "{}", "[]", "null", '{"self": 1}', "\x00", '{"format": "other/9", "self": ""}']
)
def test_a_manifest_that_is_none_is_refused_by_name(parent: Path, built: Path, garbage: str) -> None:
    (built / MANIFEST).write_text(garbage)
    with pytest.raises(CheckpointError, match="not a manifest of this version"):
        build(parent, built)


@pytest.mark.parametrize(
    "garbage", ["", "[]", '{"parent": 3}', '{"output": {"config.json": "x"}}', '{"other": 1}']
)
def test_a_broken_stat_cache_is_not_believed(
    parent: Path, built: Path, reference: dict[str, bytes], garbage: str
) -> None:
    (built / STATE_FOLDER / "seen.json").write_text(garbage)
    assert build(parent, built).made == ()
    assert published(built) == reference


def test_switching_vision_on_the_tiny_toy_rewrites_only_the_shards_that_hold_vision_linears(
    tiny: Path, tmp_path: Path
) -> None:
    out, without = tmp_path / "out", ROOT / "recipes" / "glm-5.3-flash-bf16-vision.toml"
    build(tiny, out, without)
    weight_map = json.loads((tiny / INDEX).read_text())["weight_map"]
    vision = {
        file
        for name, file in weight_map.items()
        if name.startswith("model.visual.")
        and name.endswith(("qkv.weight", "proj.weight"))
        and "patch" not in name
    }
    summary = build(tiny, out, ROOT / "pipeline.toml")
    assert {verdict.file for verdict in summary.made} == vision
    assert set(summary.files_written) == vision | {"config.json", "README.md", INDEX, MANIFEST}
    assert vision < set(weight_map.values())
