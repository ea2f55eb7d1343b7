"""The checkpoint that is published: whole by its manifest and index, each file with its sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.container.recognize import LFS_POINTER
from shardmill.pipeline.delta.child import open_child, published_names
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, STATE_FOLDER, Manifest
from shardmill.pipeline.publish.facts import LocalFile
from shardmill.pipeline.run.digests import sha256_of
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE

_SMALL_BYTES = 64 << 20  # a larger file is no plain git file on any hub


def local_files(folder: Path) -> tuple[tuple[LocalFile, ...], Manifest | None]:
    """Every file to publish, and the manifest. A sha256 that the manifest states is believed until its file is sent.

    Raises CheckpointError where a file that the manifest or the index names is missing, or a build is not committed.
    """
    _refuse_unfinished(folder)
    manifest = open_child(folder).manifest if (folder / MANIFEST_FILE).is_file() else None
    names = [name for name in published_names(folder) if not name.startswith(".")]
    _refuse_missing_shards(folder, frozenset(names))
    if manifest is None:
        _refuse_other_forms(folder, names)
    stated = {name: record.sha256 for name, record in manifest.files.items()} if manifest else {}
    return tuple(local_file(folder, name, stated.get(name)) for name in names), manifest


def local_file(folder: Path, name: str, sha256: str | None) -> LocalFile:
    """A file of the folder; it is read for its sha256 where none is stated."""
    path = folder / name
    size = path.stat().st_size
    small = size <= _SMALL_BYTES and not name.endswith(".safetensors")
    return LocalFile(name, size, sha256 or sha256_of(path), _git_oid(path) if small else None)


def _git_oid(path: Path) -> str:
    """git's name for the bytes of a file: sha1 over its kind and size, then its bytes."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _refuse_unfinished(folder: Path) -> None:
    if (folder / STATE_FOLDER / "commit.json").exists():
        raise CheckpointError(f"{folder}: a build was interrupted in its commit; run that build again first")
    if not (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        raise CheckpointError(
            f"{folder}: has neither {INDEX_FILE} nor {SINGLE_FILE}; give the folder of a checkpoint"
        )


def _refuse_missing_shards(folder: Path, names: frozenset[str]) -> None:
    if missing := sorted(set(_indexed(folder)) - names):
        raise CheckpointError(
            f"{folder / INDEX_FILE}: names {missing[0]}, which is not there; a hub would hold half a checkpoint; "
            f"build it again"
        )


def _refuse_other_forms(folder: Path, names: Sequence[str]) -> None:
    """For a checkpoint without a manifest. Raises CheckpointError where a shard is none, or a file a pointer."""
    for name in names:
        if name.endswith(".safetensors"):
            read_header(folder / name, name)
            continue
        with (folder / name).open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(
                    f"{folder / name}: is a Git LFS pointer, not the file itself; run `git lfs pull` there first"
                )


def _indexed(folder: Path) -> Iterator[str]:
    path = folder / INDEX_FILE
    if not path.is_file():
        return
    try:
        yield from map(str, json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no index ({error}); build the checkpoint again") from None


def refuse_changed(folder: Path, file: LocalFile) -> None:
    """Raises CheckpointError where the file's bytes are not those whose sha256 is about to be published."""
    got = sha256_of(folder / file.name)
    if got != file.sha256:
        raise CheckpointError(
            f"{folder / file.name}: expected the sha256 {file.sha256}, got {got}; nothing was committed; "
            f"`shardmill verify integrity {folder}` tells all that is wrong"
        )
