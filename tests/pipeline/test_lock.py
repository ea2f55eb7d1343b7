"""The lock: a parent is held to the bytes that were pinned, and a build proves them without a second read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.files import Source
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.lock import Lock, load_lock
from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.pin import pin
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Settings, Watch
from tests.pipeline.parents import (
    INDEX,
    MANIFEST,
    RECIPE,
    SCALES,
    SHARDS,
    STAGED,
    change_tensor,
    library_bytes,
    micro_tensors,
    published,
    write_parent,
    write_recipe,
)
from tests.pipeline.profiles.models import native_parent
from tests.pipeline.profiles.models import recipe as native_recipe

SMALL = ("LICENSE", "assets/logo.txt", "config.json", INDEX, "tokenizer.json")


def pinned(parent: Path, recipe: str = RECIPE, read_all: bool = True) -> Lock:
    loaded = recipes.load(write_recipe(parent.parent / "recipes", recipe))
    scanned = prepare(loaded, parent).parent
    return pin(scanned, loaded, lambda line: None, read_all=read_all)


def build(
    parent: Path, out: Path, lock: Lock | None, recipe: str = RECIPE, paranoid: bool = False
) -> Manifest:
    loaded = recipes.load(write_recipe(parent.parent / "recipes", recipe))
    settings = Settings(kernel="numpy", paranoid=paranoid)
    run.build(prepare(loaded, parent, lock, paranoid), out, settings, Watch())
    return Manifest.from_json((out / MANIFEST).read_bytes())


def test_a_lock_holds_size_and_sha256_of_every_file_that_a_build_reads(parent: Path) -> None:
    """The parent's README and dotfiles are not among them."""
    lock = pinned(parent)
    assert set(lock.files) == {*SHARDS, SCALES, *SMALL}
    for name, file in lock.files.items():
        data = (parent / name).read_bytes()
        assert (file.bytes, file.sha256) == (len(data), sha256(data).hexdigest())
        assert (file.tensors is not None) == name.endswith(".safetensors")


def test_a_lock_is_read_back_as_it_was_written(parent: Path, tmp_path: Path) -> None:
    lock = pinned(parent)
    (tmp_path / "pipeline.lock").write_bytes(lock.to_json())
    assert load_lock(tmp_path / "pipeline.lock") == lock


def test_a_lock_says_which_of_its_digests_are_cryptographic(parent: Path) -> None:
    body = json.loads(pinned(parent).to_json())
    said = {name: each["cryptographic"] for name, each in body["digests"].items()}
    assert said == {"sha256": True, "header": True, "tensors": False}
    for file in body["files"].values():
        assert set(file) - {"bytes"} <= set(said)


@pytest.mark.parametrize("garbage", ["", "[]", '{"format": "other"}', '{"format": "shardmill/lock/1"}'])
def test_a_lock_that_is_none_is_refused_by_name(tmp_path: Path, garbage: str) -> None:
    (tmp_path / "pipeline.lock").write_text(garbage)
    with pytest.raises(CheckpointError, match=r"pipeline\.lock: not a lock .*run `shardmill pin` again"):
        load_lock(tmp_path / "pipeline.lock")


def test_the_manifest_says_that_the_parent_was_verified_and_nothing_else_differs(
    parent: Path, tmp_path: Path
) -> None:
    without, held = build(parent, tmp_path / "out", None), build(parent, tmp_path / "held", pinned(parent))
    assert (without.parent_verified, held.parent_verified) == (False, True)
    assert replace(held, parent_verified=False) == without


def _another_weight(parent: Path) -> None:
    change_tensor(parent / SHARDS[0], "model.layers.0.attn.q.weight")


def _another_small_file(parent: Path) -> None:
    (parent / "tokenizer.json").write_text('{"tokens": {}}\n')


def _a_longer_file(parent: Path) -> None:
    (parent / "LICENSE").write_text("free for all\n")


def _a_new_file(parent: Path) -> None:
    (parent / "NOTICE").write_text("x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_another_weight, f"{SHARDS[0]}: its tensors are not those that were pinned"),
        (_another_small_file, r"tokenizer\.json: its sha256 is not the pinned one"),
        (_a_longer_file, "LICENSE: has 13 bytes, the pinned one 5"),
        (_a_new_file, "NOTICE: the lock does not have it"),
    ],
)
def test_another_parent_than_the_pinned_one_is_refused_before_the_commit(
    parent: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    lock = pinned(parent)
    change(parent)
    with pytest.raises(CheckpointError, match=words):
        build(parent, tmp_path / "out", lock)
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_weight_that_changed_is_refused_where_another_shard_drops_tensors(
    parent: Path, tmp_path: Path
) -> None:
    """What is dropped is read for the lock alone, so the whole parent is verified, and held."""
    recipe = RECIPE.replace(
        '["model.layers.*.norm.weight", "model.embed.weight"]', '"model.layers.*.norm.weight"'
    )
    recipe += '[[family]]\nname = "gone"\nmatch = "model.embed.weight"\naction = "drop"\nreason = "unused"\n'
    lock = pinned(parent, recipe)
    assert build(parent, tmp_path / "out", lock, recipe).parent_verified
    _another_weight(parent)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: its tensors are not those that were pinned"):
        build(parent, tmp_path / "out", lock, recipe)


NATIVE = """
[[family]]
name = "linears"
match = "model.layers.*.{self_attn,mlp}.*.{weight,weight_scale_inv}"
expect = 6
source_block = [128, 128]
"""


@pytest.mark.parametrize("action", ['action = "reblock"\nblock = [64, 64]\n', 'action = "dequantize"\n'])
def test_scales_that_a_conversion_consumes_are_held_too(tmp_path: Path, action: str) -> None:
    """Their digests stand with the weight that they went into, whether the child has a tensor of their name or not."""
    parent = native_parent(tmp_path / "parent")
    recipe = native_recipe("modelopt-mixed" if "reblock" in action else "fp8", NATIVE + action)
    lock = pinned(parent, recipe)
    assert build(parent, tmp_path / "out", lock, recipe).parent_verified
    change_tensor(next(parent.glob("*.safetensors")), "model.layers.0.mlp.down_proj.weight_scale_inv")
    with pytest.raises(CheckpointError, match="its tensors are not those that were pinned"):
        build(parent, tmp_path / "other", lock, recipe)


def test_a_lock_from_a_downloads_notes_is_believed_only_as_far_as_it_goes(
    parent: Path, tmp_path: Path
) -> None:
    """No shard is read to pin, so a build cannot prove the bytes, unless it is paranoid and hashes them."""
    notes = parent / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in (*SHARDS, SCALES):
        noted = sha256((parent / name).read_bytes()).hexdigest()
        (notes / f"{name}.metadata").write_text(f"{'0' * 40}\n{noted}\n1.0\n")
    lock = pinned(parent, read_all=False)
    assert [name for name in (*SHARDS, SCALES) if lock.files[name].tensors] == []
    assert not build(parent, tmp_path / "out", lock).parent_verified
    assert build(parent, tmp_path / "out", lock, paranoid=True).parent_verified
    _another_weight(parent)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: its sha256 is not the pinned one"):
        build(parent, tmp_path / "out", lock, paranoid=True)


def test_a_header_that_is_not_the_pinned_one_is_refused_without_reading_a_tensor(
    parent: Path, tmp_path: Path
) -> None:
    """Two names exchanged leave size and digests of tensors in order as they were: the header's digest tells."""
    lock = pinned(parent)
    data = (parent / SHARDS[0]).read_bytes()
    one, other = b"layers.0.attn.q.weight", b"layers.0.attn.k.weight"
    aside = b"@" * len(one)
    swapped = data.replace(one, aside).replace(other, one).replace(aside, other)
    assert len(swapped) == len(data)
    (parent / SHARDS[0]).write_bytes(swapped)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: its header is not the pinned one"):
        prepare(recipes.load(write_recipe(tmp_path / "recipes")), parent, lock)


def test_a_parent_of_which_a_repair_replaces_a_file_is_pinned_as_it_lies_there(tmp_path: Path) -> None:
    """The other file's header may be of another length."""
    parent = write_parent(tmp_path / "parent")
    scales = library_bytes(micro_tensors()[SCALES], {"format": "pt", "calibrated": "again " * 9})
    (tmp_path / "other.safetensors").write_bytes(scales)
    recipe = STAGED.replace(
        'classify = { needs = ["scan"] }',
        'input_scales = { needs = ["scan"], from = "../other.safetensors" }\n'
        'classify = { needs = ["input_scales"] }',
    )
    lock = pinned(parent, recipe)
    assert lock.files[SCALES].sha256 == sha256((parent / SCALES).read_bytes()).hexdigest()
    assert not build(parent, tmp_path / "out", lock, recipe).parent_verified


def test_another_revision_in_the_recipe_asks_for_another_pin(parent: Path, tmp_path: Path) -> None:
    lock = replace(pinned(parent), revision="f" * 40)
    with pytest.raises(CheckpointError, match="run `shardmill pin` again"):
        build(parent, tmp_path / "out", lock)


def test_the_command_pins_beside_the_recipe_and_builds_hold_to_it(parent: Path, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    places = ["-c", str(recipe), "--parent", str(parent)]
    told = CliRunner().invoke(shardmill, ["pin", *places, "--json"], catch_exceptions=False)
    facts = json.loads(told.stdout)
    assert (facts["lock"], facts["files"]) == (str(tmp_path / "pipeline.lock"), len(SHARDS) + 1 + len(SMALL))
    CliRunner().invoke(shardmill, ["build", *places, "--out", str(out)], catch_exceptions=False)
    before = published(out)
    assert json.loads(before[MANIFEST])["parent_verified"]
    _another_weight(parent)
    refused = CliRunner().invoke(shardmill, ["build", *places, "--out", str(out)])
    assert isinstance(refused.exception, CheckpointError)
    assert published(out) == before


def pin_built(parent: Path, out: Path, recipe: Path) -> Lock:
    words = ["pin", "-c", str(recipe), "--parent", str(parent), "--built", str(out)]
    result = CliRunner().invoke(shardmill, words)
    assert result.exit_code == 0, (result.output, result.exception)
    lock = load_lock(recipe.with_suffix(".lock"))
    assert lock is not None
    return lock


def test_a_lock_taken_from_a_build_reads_no_shard_again(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was passed on has a sha256, what was rewritten says that it has none; builds are held to both."""
    recipe, out = write_recipe(tmp_path / "recipes"), tmp_path / "out"
    rewritten = {name for name, shard in build(parent, out, None).shards.items() if shard.rewritten}
    opened: list[str] = []
    enter = Source.__enter__

    def watched(self: Source) -> Source:
        opened.append(self.path.name)
        return enter(self)

    with monkeypatch.context() as patch:
        patch.setattr(Source, "__enter__", watched)
        lock = pin_built(parent, out, recipe)
    assert not {*SHARDS, SCALES} & set(opened)
    for name in (*SHARDS, SCALES):
        data = (parent / name).read_bytes()
        assert lock.files[name].sha256 == (None if name in rewritten else sha256(data).hexdigest())
        assert lock.files[name].tensors == pinned(parent).files[name].tensors
    assert build(parent, tmp_path / "again", lock).parent_verified
    assert build(parent, tmp_path / "paranoid", lock, paranoid=True).parent_verified
    _another_weight(parent)
    for paranoid in (False, True):
        with pytest.raises(CheckpointError, match=f"{SHARDS[0]}: its tensors are not those that were pinned"):
            build(parent, tmp_path / "other", lock, paranoid=paranoid)


def test_a_lock_from_a_build_reads_what_changed_since_and_takes_what_a_hub_stated(
    parent: Path, tmp_path: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "recipes"), tmp_path / "out"
    build(parent, out, None)
    _another_weight(parent)
    lock = pin_built(parent, out, recipe)
    assert lock.files[SHARDS[0]].sha256 == sha256((parent / SHARDS[0]).read_bytes()).hexdigest()
    notes = parent / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / f"{SHARDS[2]}.metadata").write_text(f"{'0' * 40}\n{'5' * 64}\n1.0\n")
    assert pin_built(parent, out, recipe).files[SHARDS[2]].sha256 == "5" * 64


@pytest.mark.parametrize(
    ("folder", "says"), [("empty", "no finished build"), ("other", "the build of another")]
)
def test_a_folder_without_this_build_pins_nothing(
    parent: Path, tmp_path: Path, folder: str, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    build(parent, tmp_path / "other", None, RECIPE.replace("block = [4, 4]", "block = [8, 8]"))
    recipe = write_recipe(tmp_path / "recipes")
    words = ["pin", "-c", str(recipe), "--parent", str(parent), "--built", str(tmp_path / folder)]
    result = CliRunner().invoke(shardmill, words)
    assert result.exit_code == 1
    assert says in str(result.exception)
    assert not recipe.with_suffix(".lock").exists()
