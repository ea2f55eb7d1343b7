"""Nothing that is not whole is committed, no state is obeyed blindly, and belief follows bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.pipeline.container import filesystem
from shardmill.pipeline.container.filesystem import losses, replace, shows_later_writes, sync_folder
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.records import STATE_FOLDER
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run import shard as shards
from tests.pipeline.parents import build, change_tensor, published, write_parent

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"
WEIGHT = "model.layers.0.attn.q.weight"


def test_a_staged_shard_that_vanishes_stops_the_commit(
    parent: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier checkpoint stays whole, and the next build makes the shard again."""
    before = published(built)
    change_tensor(parent / SHARD, WEIGHT)
    made = run.make_shards

    def and_lost(todo: object, prepared: object, out: Path, *rest: object) -> object:
        receipts = made(todo, prepared, out, *rest)  # type: ignore[arg-type]
        (out / STATE_FOLDER / "staging" / SHARD).unlink()
        return receipts

    monkeypatch.setattr(run, "make_shards", and_lost)
    with pytest.raises(
        BuildError, match=f"{SHARD}: is not there though it was made, so nothing is published"
    ):
        build(parent, built)
    assert published(built) == before
    monkeypatch.undo()
    build(parent, built)
    build(parent, built.parent / "fresh")
    assert published(built) == published(built.parent / "fresh")


def test_an_interrupted_commit_that_lost_a_file_is_given_up_and_built_anew(
    parent: Path, built: Path, reference: dict[str, bytes]
) -> None:
    journal = {"staged": {SHARD: [1, 2]}, "removed": [], "entry": INDEX}
    (built / STATE_FOLDER / "commit.json").write_text(json.dumps(journal))
    (built / SHARD).unlink()
    build(parent, built)
    assert published(built) == reference


@pytest.mark.parametrize("name", ["../victim", "/victim", ".shardmill/lock", "", "a/../../victim"])
@pytest.mark.parametrize("where", ["staged", "removed"])
def test_a_journal_whose_names_lead_outside_is_refused(
    parent: Path, built: Path, tmp_path: Path, name: str, where: str
) -> None:
    (tmp_path / "victim").write_text("theirs")
    journal = {"staged": [], "removed": [], "entry": INDEX} | {where: [name]}
    (built / STATE_FOLDER / "commit.json").write_text(json.dumps(journal))
    with pytest.raises(BuildError, match=r"commit\.json: names .*, which leads out of the folder"):
        build(parent, built)
    assert (tmp_path / "victim").read_text() == "theirs"


def test_a_folder_that_becomes_a_file_and_back_is_published(parent: Path, tmp_path: Path) -> None:
    out, assets = tmp_path / "out", parent / "assets.json"
    for make in (
        lambda: (assets.mkdir(), (assets / "x.json").write_text("{}")),
        lambda: assets.write_text("{}"),
    ):
        shutil.rmtree(assets) if assets.is_dir() else assets.unlink(missing_ok=True)
        make()
        build(parent, out)
        assert (out / INDEX).exists()


def test_a_damaged_staged_shard_is_made_again(
    parent: Path, built: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_tensor(parent / SHARD, WEIGHT)
    monkeypatch.setattr(run, "publish", lambda *args: (_ for _ in ()).throw(BuildError("interrupted")))
    with pytest.raises(BuildError, match="interrupted"):
        build(parent, built)
    monkeypatch.undo()
    staged = built / STATE_FOLDER / "staging" / SHARD
    with staged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    assert build(parent, built).resumed == ()
    fresh = built.parent / "fresh"
    build(parent, fresh)
    assert published(built) == published(fresh)


def test_an_output_that_is_edited_while_a_build_is_at_work_is_found(
    parent: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stat that is noted is the one under which the bytes were judged."""
    before = published(built)
    other = "model-00002-of-00003.safetensors"
    made = run.make_shards

    def and_edited(todo: object, prepared: object, out: Path, *rest: object) -> object:
        with (out / other).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x77")
        return made(todo, prepared, out, *rest)  # type: ignore[arg-type]

    change_tensor(parent / SHARD, WEIGHT)
    monkeypatch.setattr(run, "make_shards", and_edited)
    with pytest.raises(BuildError, match=f"{other}: was changed or removed by something else"):
        build(parent, built)
    monkeypatch.undo()
    build(parent, built)
    assert published(built)[other] == before[other]


@pytest.mark.parametrize(
    "touch", [lambda path: os.link(path, path.with_name("link")), lambda path: path.chmod(0o600)]
)
def test_a_link_or_a_chmod_of_the_parent_does_not_stop_a_build(
    parent: Path,
    tmp_path: Path,
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    touch: Callable[[Path], None],
) -> None:
    reserve = shards.Sink.reserve

    def and_touched(sink: object) -> None:
        if "00001" in str(sink.path):  # type: ignore[attr-defined]
            touch(parent / SHARD)
        reserve(sink)  # type: ignore[arg-type]

    monkeypatch.setattr(shards.Sink, "reserve", and_touched)
    build(parent, tmp_path / "out", workers=1)
    assert published(tmp_path / "out") == reference


def test_bytes_that_change_under_restored_times_are_found_while_they_are_read(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = shards.finish_shard
    seen = []

    def steadily(path: Path, stat: object, read: object) -> object:
        seen.append(path.name)
        return real(path, stat, read)  # type: ignore[arg-type]

    real, close = shards.steadily, shards.Source.__exit__

    def and_changed(source: object, *error: object) -> None:
        path = source.path  # type: ignore[attr-defined]
        if path.name == SHARD and not seen:
            facts = path.stat()
            change_tensor(path, WEIGHT)
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        close(source, *error)  # type: ignore[arg-type]

    monkeypatch.setattr(shards.Source, "__exit__", and_changed)
    monkeypatch.setattr(shards, "steadily", steadily)
    with pytest.raises(CheckpointError, match=f"{SHARD}: {WEIGHT} changed while it was read"):
        build(parent, tmp_path / "out", workers=1)
    assert rewrite is shards.finish_shard


@pytest.mark.parametrize(
    ("changed", "since", "shows"),
    [
        (5_000_000_000, 6_000_000_000, False),  # whole seconds: another write may come within two of them
        (5_000_000_000, 7_000_000_000, True),
        (5_000_000_001, 5_005_000_000, False),
        (5_000_000_001, 5_010_000_001, True),
    ],
)
def test_a_file_younger_than_the_clocks_grain_is_not_believed(changed: int, since: int, shows: bool) -> None:
    assert shows_later_writes((1, 1, 1, changed), since) is shows


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_build_goes_on_where_there_is_no_flock(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference
    assert not list((tmp_path / "out" / STATE_FOLDER).glob("*.holder"))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
def test_a_folder_that_can_not_be_synced_is_passed_over_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    losses()
    monkeypatch.setattr(os, "fsync", refused)
    sync_folder(tmp_path)
    sync_folder(tmp_path)
    assert len(losses()) == 1
    assert losses() == []


def test_a_disk_that_fails_names_path_and_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"fsync of a folder: Input/output error"):
        sync_folder(tmp_path)


def test_a_rename_between_mounts_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("x")
    real, calls = Path.replace, []

    def across(source: Path, target: Path) -> Path:
        calls.append(source)
        if len(calls) == 1:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(source, target)

    monkeypatch.setattr(filesystem.Path, "replace", across)
    replace(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_nan_inf_and_zeros_that_are_kept_are_counted_and_strict_refuses_them(tmp_path: Path) -> None:
    norm = ("BF16", (4,), b"\xc0\x7f\x80\x7f\x80\xff\x80\x3f")
    parent = write_parent(
        tmp_path / "parent", {"a.safetensors": {"norm": norm, "zeros": ("F32", (2, 2), bytes(16))}}
    )
    recipe = 'format = 1\nname = "r"\n[[family]]\nname = "k"\nmatch = "*"\naction = "keep"\nreason = "r"\n'
    assert build(parent, tmp_path / "out", recipe).odd == (
        "norm: holds 2 values that are Inf and 1 values that are NaN",
        "zeros: holds nothing but zeros",
    )
    assert json.loads((tmp_path / "out" / "shardmill.manifest.json").read_text())["values"] == {
        "norm": {"nan": 1, "inf": 2},
        "zeros": {"zero": 1},
    }
    with pytest.raises(BuildError, match=r"norm: holds .*the build is strict"):
        build(parent, tmp_path / "strict", recipe, strict=True)
    assert not (tmp_path / "strict" / "config.json").exists()
