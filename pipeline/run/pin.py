"""Pinning a parent and holding it to its lock: the part of the lock that reads a parent's bytes.

A sha256 that the hub states, or that the download left beside a file, is taken, else the file is read. A build holds
its parent to the lock at no cost: small files are hashed, shards are compared by size, and the digests of the tensors
that it reads anyway are compared when it publishes (run.publish). Under `paranoid` each shard is hashed first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shardmill.pipeline.container.hub import sha256_stated
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.lock import NOT_PINNED, Lock, LockedFile, holds_tensors, tensors_digest
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.run.digests import sha256_and_tensors_of, sha256_of, some_tensors_of
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, Header, Parent

_SHA256 = re.compile(r"[0-9a-f]{64}")


def pin(
    parent: Parent,
    recipe: Recipe,
    tell: Callable[[str], None],
    read_all: bool = False,
    built: Mapping[str, LockedFile] | None = None,
) -> Lock:
    """The lock of `parent`, and of what other checkpoints give, as their folders hold it.

    `tell` hears of each file that is read.

    `read_all` computes every sha256, and with it the digest of tensors that lets a build check for nothing. `built`:
    what a build has read of these files.
    """
    files: dict[str, LockedFile] = {}
    built = built or {}
    # What a repair takes from elsewhere has that file's header, which says nothing about the parent's own.
    headers = {header.shard: header for header in parent.headers if header.shard not in parent.replaced}
    for name in sorted(_locked_names(parent)):
        path = _pinned_path(parent, name)
        root = path.parent if name in parent.others else parent.folder
        known = None if read_all else _downloaded_sha256(root, path.relative_to(root).as_posix())
        if name in built:
            files[name] = replace(built[name], sha256=known or built[name].sha256)
        elif known:
            header = headers[name].digest if name in headers else None
            files[name] = LockedFile(path.stat().st_size, known, header=header)
        else:
            tell(f"reading {name}")
            files[name] = _locked(path, headers.get(name), parent)
    sources = {table.name: (table.repository, table.revision) for table in recipe.source}
    return Lock(recipe.parent.repository, recipe.parent.revision, files, sources)


def hold(lock: Lock, parent: Parent, recipe: Recipe, paranoid: bool) -> None:
    """Raises CheckpointError where `parent` is not the one that was pinned, as far as that is known without its data.

    Small files are hashed; shards are compared by size, under `paranoid` by sha256.
    """
    named = {table.name: (table.repository, table.revision) for table in recipe.source}
    own = recipe.parent.repository, recipe.parent.revision
    for source, wanted in {"": own, **named}.items():
        known = lock.sources.get(source) if source else (lock.repository, lock.revision)
        if known != wanted:
            what = f"source {source!r}: " if source else ""
            held = f"for {known[0]} at {known[1]}" if known else "without it"
            raise CheckpointError(
                f"{what}the lock is {held}, the recipe for {wanted[0]} at {wanted[1]}; run `shardmill pin` again"
            )
    shards = {header.shard for header in parent.headers}
    names = _locked_names(parent)
    if differing := sorted(names ^ set(lock.files)):
        held = "the lock does not have it" if differing[0] in names else "the parent does not have it"
        raise CheckpointError(f"{_pinned_path(parent, differing[0])}: {held}; {NOT_PINNED}")
    for name in sorted(names - set(parent.consumed)):
        _refuse_other(_pinned_path(parent, name), lock.files[name], read=name not in shards or paranoid)
    if paranoid:
        _refuse_other_tensors(lock, parent)
    for header in parent.headers:
        pinned = lock.files[header.shard].header
        if header.shard not in parent.replaced and pinned not in (None, header.digest):
            raise CheckpointError(
                f"{_pinned_path(parent, header.shard)}: its header is not the pinned one ({pinned}); {NOT_PINNED}"
            )


def _pinned_path(parent: Parent, name: str) -> Path:
    """Where a file is that the lock holds: another checkpoint's, or the parent's own even where one replaces it."""
    return parent.others.get(name, parent.folder / name)


def _refuse_other(path: Path, locked: LockedFile, read: bool) -> None:
    size = path.stat().st_size
    if size != locked.bytes:
        raise CheckpointError(f"{path}: has {size:,} bytes, the pinned one {locked.bytes:,}; {NOT_PINNED}")
    if read and locked.sha256 and sha256_of(path) != locked.sha256:
        raise CheckpointError(f"{path}: its sha256 is not the pinned one ({locked.sha256}); {NOT_PINNED}")


def _refuse_other_tensors(lock: Lock, parent: Parent) -> None:
    """Raises CheckpointError where a shard that is pinned without a sha256 has other tensors; each is read."""
    for header in parent.headers:
        if lock.files[header.shard].sha256 or header.shard in {*parent.replaced, *parent.consumed}:
            continue
        refs, path = parent.pinned(header), _pinned_path(parent, header.shard)
        found = some_tensors_of(path, header, refs, parent.stats[header.shard])
        holds_tensors(lock, header.shard, {parent.own_name(ref.name): found[ref.name] for ref in refs})


def _locked_names(parent: Parent) -> set[str]:
    names = {CONFIG_FILE, *parent.carried, *(header.shard for header in parent.headers)}
    return names if parent.single else names | {INDEX_FILE}


def _downloaded_sha256(folder: Path, name: str) -> str | None:
    """The sha256 that the hub states of a file that is there alone, or that huggingface_hub noted when it fetched the
    file: a blob's name, or a local folder's metadata.
    """
    path = folder / name
    if stated := sha256_stated(path):
        return stated
    if path.is_symlink() and path.resolve().parent.name == "blobs":
        etag = path.resolve().name
    else:
        note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        lines = note.read_text().split() if note.is_file() else []
        etag = lines[1] if len(lines) > 1 and note.stat().st_mtime >= path.stat().st_mtime else ""
    return etag if _SHA256.fullmatch(etag) else None


def _locked(path: Path, header: Header | None, parent: Parent) -> LockedFile:
    """The record of a file that is read for it; of a shard with the digest of its tensors' digests."""
    if header is None:
        return LockedFile(path.stat().st_size, sha256_of(path))
    sha256, tensors = sha256_and_tensors_of(path, header)
    own = {parent.own_name(ref.name): tensors[ref.name] for ref in parent.pinned(header)}
    return LockedFile(header.file_bytes, sha256, tensors_digest(own), header.digest)
