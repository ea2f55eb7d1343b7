"""Whatever a delta says, applying it gives the new checkpoint or a sentence, and touches nothing else."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.pipeline.container import files as files_of_container
from shardmill.pipeline.delta.apply import apply_delta
from shardmill.pipeline.delta.records import DELTA_FILE
from shardmill.pipeline.errors import CheckpointError, ShardmillError
from shardmill.pipeline.manifest.digest import canonical, key_of
from tests.pipeline.delta.test_delta import Pair, pair
from tests.pipeline.parents import INDEX, MANIFEST, listing, published
from tests.pipeline.test_atomic import Cut, cut_at

__all__ = ["pair"]
Body = dict[str, Any]


def body_of(delta: Path) -> Body:
    body: Body = json.loads(lzma.decompress((delta / DELTA_FILE).read_bytes()))
    del body["self"]
    return body


def write_body(delta: Path, body: Body) -> None:
    """Signed anew, as anybody can: the key in a delta tells of accidents alone."""
    (delta / DELTA_FILE).write_bytes(lzma.compress(canonical({**body, "self": key_of(body)})))


def _file(body: Body, how: str) -> Body:
    found: Body = next(each for each in body["files"].values() if each["how"] == how)
    return found


def _with_file(name: str) -> Callable[[Body], Any]:
    return lambda body: body["files"].__setitem__(name, body["files"]["to.txt"])


HOSTILE: dict[str, Callable[[Body], Any]] = {
    "a private folder": _with_file(".git/hooks/post-checkout"),
    "the build's memory": _with_file(".shardmill/commit.json"),
    "the same place twice": _with_file("./config.json"),
    "twice by a folder": _with_file("sub//x"),
    "a file that is a folder": _with_file("config.json/x"),
    "half a surrogate pair": _with_file("\ud800"),
    "a null byte": _with_file("a\0b"),
    "no manifest": lambda body: body["files"].pop(MANIFEST),
    "a patch of another file": lambda body: _file(body, "patch").update(source="config.json"),
    "a patch with a number that is whole nowhere": lambda body: _file(body, "patch").update(patch=[]),
    "another source": lambda body: _file(body, "same").update(source="a.safetensors"),
    "a source beside the checkpoint": lambda body: _file(body, "same").update(source="../new/config.json"),
    "a size below zero": lambda body: _file(body, "shard").update(bytes=-1),
    "a size beyond every disk": lambda body: _file(body, "shard").update(bytes=1 << 62),
    "a size of another kind": lambda body: _file(body, "whole").update(bytes=True),
    "a size that lies": lambda body: _file(body, "whole").update(bytes=1),
    "a tensor that is nowhere": lambda body: _file(body, "shard")["runs"][0]["tensors"].append("gone"),
    "a tensor a thousand times": lambda body: _file(body, "shard")["runs"].extend(
        _file(body, "shard")["runs"][:1] * 1000
    ),
    "no tensors": lambda body: _file(body, "shard")["runs"].clear(),
    "a header that is none": lambda body: _file(body, "shard").update(header_text="{", source=None),
    "a header of a petabyte": lambda body: _file(body, "shard").update(
        header_text='{"w":{"dtype":"U8","shape":[1125899906842624],"data_offsets":[0,1125899906842624]}}',
        source=None,
        bytes=(1 << 50) + 8 + 78,
    ),
    "digests of another kind": lambda body: _file(body, "shard").update(digests=[1]),
    "runs of another kind": lambda body: _file(body, "shard").update(runs="abc"),
    "needs of another kind": lambda body: body["needs"].update(x=3),
    "changes of another kind": lambda body: body["changes"].update(changed=7),
    "another new manifest": lambda body: body.update(new_manifest="0" * 64),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_delta_is_a_sentence_and_makes_nothing(pair: Pair, tmp_path: Path, fault: str) -> None:
    old, _, delta = pair
    body = body_of(delta)
    HOSTILE[fault](body)
    write_body(delta, body)
    before = listing(tmp_path)
    with pytest.raises(ShardmillError) as refused:
        apply_delta(old, delta, tmp_path / "made", "copy")
    assert "\n" not in str(refused.value)
    assert listing(tmp_path) == before


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in pairs for place in places_in(each, (*path, key)))]


def put(body: Body, path: tuple[Any, ...], value: Any) -> None:
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 64),
    st.text(max_size=3),
    st.sampled_from(
        ["", "..", "/", MANIFEST, INDEX, "a.safetensors", "k.safetensors", "w0", "s", "\ud800", "same"]
    ),
    st.lists(st.sampled_from([1, "w0", None]), max_size=2),
    st.dictionaries(
        st.sampled_from(["file", "tensors", "bytes", "a"]), st.none() | st.integers(0, 9), max_size=2
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_delta_gives_the_new_checkpoint_or_a_sentence(
    pair: Pair, data: st.DataObject
) -> None:
    """One or two values anywhere in it become something else."""
    old, new, delta = pair
    body = body_of(delta)
    for _ in range(data.draw(st.integers(1, 2))):
        places = places_in(body)[1:]
        put(body, data.draw(st.sampled_from(places)), data.draw(ODD))
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(delta, Path(place) / "delta"))
        write_body(copy, body)
        made = Path(place) / "made"
        try:
            apply_delta(old, copy, made, "copy")
        except ShardmillError:
            assert not made.exists()
        else:
            assert published(made) == published(new)
        assert sorted(path.name for path in Path(place).iterdir() if path != made) == ["delta"]


@pytest.mark.parametrize("how", ["hardlink", "copy", "reflink"])
def test_a_folder_of_links_gives_a_folder_of_files(pair: Pair, tmp_path: Path, how: Any) -> None:
    """As a hub's cache has them: what is made holds no link that could break."""
    old, new, delta = pair
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in [path for path in old.iterdir() if path.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(os.path.relpath(blobs / path.name, old))
    apply_delta(old, delta, tmp_path / "made", how)
    assert published(tmp_path / "made") == published(new)
    assert not any(path.is_symlink() for path in (tmp_path / "made").rglob("*"))


def test_an_old_checkpoint_that_changes_meanwhile_makes_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _, delta = pair
    read = files_of_container.Source.chunks

    def changing(self: Any, *args: Any) -> Any:
        if self.path.name == "k.safetensors":
            data = self.path.read_bytes()
            self.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return read(self, *args)

    monkeypatch.setattr(files_of_container.Source, "chunks", changing)
    with pytest.raises(CheckpointError, match=r"k\.safetensors"):
        apply_delta(old, delta, tmp_path / "made", "copy")
    assert not (tmp_path / "made").exists()


def test_interrupted_at_any_effect_it_leaves_nothing_or_all(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then makes the new checkpoint; the old one is as it was."""
    old, new, delta = pair
    made, before = tmp_path / "made", published(old)
    with cut_at(1 << 30, monkeypatch, of_commit=False) as done:
        apply_delta(old, delta, made, "copy")
    for step in range(len(done)):
        shutil.rmtree(made, ignore_errors=True)
        with cut_at(step, monkeypatch, of_commit=False), pytest.raises(Cut):
            apply_delta(old, delta, made, "copy")
        if not made.exists():
            apply_delta(old, delta, made, "copy")
        assert published(made) == published(new)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["delta", "made", "new", "old"]
    assert published(old) == before
    assert len(done) > 8
