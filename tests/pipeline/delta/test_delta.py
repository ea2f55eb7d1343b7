"""A delta makes exactly the new checkpoint from the old one, and from nothing else."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container import folder as folders
from shardmill.pipeline.container.folder import whole_folder
from shardmill.pipeline.delta.apply import apply_delta
from shardmill.pipeline.delta.merge import merge_patch, merged
from shardmill.pipeline.delta.records import DELTA_FILE, Delta
from shardmill.pipeline.delta.write import write_delta
from shardmill.pipeline.errors import BuildError, CheckpointError, ShardmillError
from tests.pipeline.delta.children import write_child
from tests.pipeline.parents import MANIFEST, Tensor, Tensors, bf16, listing, published, scalar

NAMES = [f"layers.{number}.w" for number in range(5)]
FILES = ["a.safetensors", "b.safetensors", "sub/c.safetensors"]

json_values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def children(draw: st.DrawFn) -> tuple[dict[str, Tensors], dict[str, bytes], bool]:
    """Shards with few possible tensors, so that two draws share some; side files; whether sha256s are stated."""
    shards: dict[str, dict[str, Tensor]] = {}
    for name in draw(st.sets(st.sampled_from(NAMES), min_size=1)):
        rows, seed = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        dtype = draw(st.sampled_from(["U8", "F8_E4M3"]))
        tensor = (dtype, (rows, 3), bytes([seed]) * rows * 3)
        shards.setdefault(draw(st.sampled_from(FILES)), {})[name] = tensor
    sides = st.dictionaries(
        st.sampled_from(["config.json", "t/x.txt", "y.txt"]), st.sampled_from([b"", b"1\n", b"22\n"])
    )
    return shards, draw(sides), draw(st.booleans())


def files_of(folder: Path) -> dict[str, bytes]:
    return published(folder)


@settings(max_examples=50)
@given(children(), children(), st.sampled_from(["hardlink", "copy"]))
def test_a_delta_of_any_two_children_makes_the_second_from_the_first(old: Any, new: Any, how: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        first, second = write_child(place / "old", *old), write_child(place / "new", *new)
        before = files_of(first)
        write_delta(first, second, place / "delta")
        apply_delta(first, place / "delta", place / "made", how)
        assert files_of(place / "made") == files_of(second)
        assert files_of(first) == before
        assert sorted(path.name for path in place.iterdir()) == ["delta", "made", "new", "old"]


@given(json_values, json_values)
def test_a_merge_patch_turns_the_source_into_the_target_or_is_none(source: Any, target: Any) -> None:
    patch = merge_patch(source, target)
    assert patch is None or merged(source, patch) == target


def test_a_value_that_becomes_null_has_no_merge_patch() -> None:
    assert merge_patch({"a": 1}, {"a": None}) is None
    assert merge_patch({"a": 1}, {"a": 2}) == {"a": 2}


Pair = tuple[Path, Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Old, new, and the delta: a scale and a text change, a tensor is renamed and another moves to another shard."""
    weights = {f"w{number}": bf16(str(number), 64, 64) for number in range(4)}
    old = write_child(
        tmp_path / "old",
        {
            "a.safetensors": weights,
            "s.safetensors": {"s": scalar(1.0)},
            "k.safetensors": {"k": bf16("k", 8, 8)},
        },
        {"config.json": b"{}", "gone.txt": b"x", "moved.txt": b"long enough"},
    )
    changed = {
        ("w3.new" if name == "w3" else name): tensor for name, tensor in weights.items() if name != "w2"
    }
    new = write_child(
        tmp_path / "new",
        {
            "a.safetensors": changed,
            "s.safetensors": {"s": scalar(2.0), "w2": weights["w2"]},
            "k.safetensors": {"k": bf16("k", 8, 8)},
        },
        {"config.json": b'{"a": 1}', "to.txt": b"long enough"},
    )
    write_delta(old, new, tmp_path / "delta")
    return old, new, tmp_path / "delta"


def test_a_delta_says_what_changed_and_holds_no_byte_that_the_old_one_has(pair: Pair) -> None:
    _, _, folder = pair
    delta = Delta.from_bytes((folder / DELTA_FILE).read_bytes(), "delta")
    assert delta.changes.changed == ("s",)
    assert delta.changes.renamed == {"w3": "w3.new"}
    assert delta.changes.renamed_files == {"moved.txt": "to.txt"}
    assert delta.changes.removed_files == ("gone.txt",)
    assert (delta.changes.added, delta.changes.removed) == ((), ())
    held = {name: len(data) for name, data in files_of(folder).items() if name != DELTA_FILE}
    assert held["tensors/s.safetensors.bin"] == 4
    assert set(held) == {
        "tensors/s.safetensors.bin",
        "files/config.json",
        "files/model.safetensors.index.json",
    }


def test_an_unchanged_file_is_a_link_and_a_made_one_is_not(pair: Pair, tmp_path: Path) -> None:
    old, _, delta = pair
    applied = apply_delta(old, delta, tmp_path / "made", "hardlink")
    assert (tmp_path / "made" / "k.safetensors").samefile(old / "k.safetensors")
    assert (tmp_path / "made" / "a.safetensors").stat().st_nlink == 1
    assert (applied.linked, applied.copied) == (2, 0)


def test_the_record_reads_as_it_was_written(pair: Pair) -> None:
    data = (pair[2] / DELTA_FILE).read_bytes()
    assert Delta.from_bytes(data, "delta").to_bytes() == data


def _flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _add_space(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


OLD_FAULTS: dict[str, Callable[[Path, Path], Any]] = {
    "it is the new one": lambda old, new: (shutil.rmtree(old), shutil.copytree(new, old)),
    "another manifest": lambda old, new: shutil.copy(new / MANIFEST, old / MANIFEST),
    "no manifest": lambda old, new: (old / MANIFEST).unlink(),
    "a shard is missing": lambda old, new: (old / "k.safetensors").unlink(),
    "a shard is longer": lambda old, new: _add_space(old / "k.safetensors"),
    "another header": lambda old, new: _flip(old / "a.safetensors", 40),
}


@pytest.mark.parametrize("fault", OLD_FAULTS)
def test_a_wrong_old_checkpoint_is_refused_before_a_byte_is_written(
    pair: Pair, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, delta = pair
    OLD_FAULTS[fault](old, new)
    monkeypatch.setattr(folders, "_lock", lambda *_: pytest.fail("a folder was made"))
    before = listing(tmp_path)
    with pytest.raises(CheckpointError):
        apply_delta(old, delta, tmp_path / "made", "hardlink")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("file", ["k.safetensors", "a.safetensors"])
def test_a_flipped_bit_in_the_old_data_is_found_and_nothing_is_left(
    pair: Pair, tmp_path: Path, file: str
) -> None:
    old, _, delta = pair
    _flip(old / file)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=f"{file}: expected the sha256"):
        apply_delta(old, delta, tmp_path / "made", "hardlink")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("file", [DELTA_FILE, "tensors/s.safetensors.bin", "files/config.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_delta_makes_nothing(pair: Pair, tmp_path: Path, file: str, how: str) -> None:
    old, _, delta = pair
    path = delta / file
    if how == "flipped":
        _flip(path, path.stat().st_size // 2)
    else:
        path.unlink() if how == "missing" else os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError):
        apply_delta(old, delta, tmp_path / "made", "hardlink")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_a_delta_that_names_a_file_outside_is_refused(pair: Pair, tmp_path: Path, name: str) -> None:
    old, _, delta = pair
    made = Delta.from_bytes((delta / DELTA_FILE).read_bytes(), "delta")
    evil = Delta(
        made.old_manifest,
        made.new_manifest,
        made.needs,
        {**made.files, name: made.files["to.txt"]},
        made.changes,
    )
    (delta / DELTA_FILE).write_bytes(evil.to_bytes())
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        apply_delta(old, delta, tmp_path / "made", "hardlink")


def test_a_new_checkpoint_that_is_not_what_its_manifest_states_gives_no_delta(
    pair: Pair, tmp_path: Path
) -> None:
    old, new, _ = pair
    path = new / "s.safetensors"  # its changed tensor, which the delta would hold, is in the data
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])["s"]["data_offsets"]
    _flip(path, 8 + length + begin)
    with pytest.raises(CheckpointError, match=r"s\.safetensors: s: the manifest states the digest"):
        write_delta(old, new, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_what_an_interrupted_run_left_is_swept_and_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".out.part" / "old").mkdir(parents=True)
    with whole_folder(tmp_path / "out") as part:
        assert list(part.iterdir()) == []
        with pytest.raises(BuildError, match="another run"), whole_folder(tmp_path / "out"):
            pass
        (part / "x").write_bytes(b"x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "x"]
    with pytest.raises(BuildError, match="exists already"), whole_folder(tmp_path / "out"):
        pass


def test_the_commands_tell_the_sizes_and_exit_1_where_the_old_one_is_wrong(
    pair: Pair, tmp_path: Path
) -> None:
    old, new, delta = map(str, pair)
    run = CliRunner().invoke(shardmill, ["delta", old, new, "--out", str(tmp_path / "d"), "--json"])
    facts = json.loads(run.output)
    assert facts["bytes"] == sum(len(data) for data in files_of(tmp_path / "d").values())
    assert facts["files"] == {"same": 2, "whole": 2, "patch": 1, "shard": 2}
    told = CliRunner().invoke(shardmill, ["apply", old, delta, "--out", str(tmp_path / "m")])
    assert "2 linked" in told.output
    refused = CliRunner().invoke(shardmill, ["apply", new, delta, "--out", str(tmp_path / "n")])
    assert isinstance(refused.exception, ShardmillError)
    assert not (tmp_path / "n").exists()


def test_a_place_within_what_is_read_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Neither checkpoint gains a folder, by a link either."""
    old, new, delta = pair
    (tmp_path / "link").symlink_to(old)
    before = [listing(folder) for folder in pair]
    for out in (old / "d", new / "x" / "d", tmp_path / "link" / "d"):
        with pytest.raises(BuildError, match="is within"):
            write_delta(old, new, out)
    for out in (old / "n", delta / "files" / "n", tmp_path / "link" / "n"):
        with pytest.raises(BuildError, match="is within"):
            apply_delta(old, delta, out, "copy")
    assert [listing(folder) for folder in pair] == before


def test_a_link_in_the_place_of_the_unfinished_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"x")
    (tmp_path / ".out.part").symlink_to(tmp_path / "mine")
    with pytest.raises(BuildError, match="is a link"), whole_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "mine" / "file").read_bytes() == b"x"
