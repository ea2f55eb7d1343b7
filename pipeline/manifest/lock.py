"""The lock beside a recipe: which bytes the parent's published revision has. `shardmill pin` writes it.

A build holds its parent to the lock at no cost: a shard's tensor digests are computed anyway while it is read, and
the lock knows what they come to. Where the lock was taken from a download's metadata alone, only sizes and header
are compared, unless the build is paranoid.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Source
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TensorSplitter, key_of
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, Header, Parent

LOCK_FORMAT = "shardmill/lock/1"
_NOT_PINNED = (
    "give the parent that was pinned with --parent, fetch the file again, or pin this one (`shardmill pin`)"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LockedFile:
    """Size and sha256 of a parent's file; of a shard also the digest of its tensors' digests, if it was read."""

    bytes: int
    sha256: str
    tensors: str | None = None


@dataclass(frozen=True, slots=True)
class Lock:
    """Every file of a parent's revision that a build reads."""

    repository: str | None
    revision: str | None
    files: Mapping[str, LockedFile]

    def to_json(self) -> bytes:
        files = {
            name: {"bytes": f.bytes, "sha256": f.sha256} | ({"tensors": f.tensors} if f.tensors else {})
            for name, f in sorted(self.files.items())
        }
        body = {
            "format": LOCK_FORMAT,
            "repository": self.repository,
            "revision": self.revision,
            "files": files,
        }
        return (json.dumps(body, indent=1) + "\n").encode()


def lock_path(recipe: Path) -> Path:
    """`pipeline.toml` -> `pipeline.lock`."""
    return recipe.with_suffix(".lock")


def load_lock(path: Path) -> Lock | None:
    """The lock at `path`, None where there is none; raises CheckpointError where it is not a lock."""
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_bytes())
        if body["format"] != LOCK_FORMAT:
            raise ValueError(f"its format is not {LOCK_FORMAT}")
        files = {name: LockedFile(**fields) for name, fields in body["files"].items()}
        return Lock(body["repository"], body["revision"], files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a lock of this version ({error}); run `shardmill pin` again"
        ) from None


def pin(
    parent: Parent,
    repository: str | None,
    revision: str | None,
    tell: Callable[[str], None],
    read_all: bool = False,
) -> Lock:
    """The lock of `parent` as it lies there. A sha256 that the download left beside a file is taken, else computed.

    `read_all` computes every one, and with it the digest of tensors that lets a build check for nothing.
    """
    files = {}
    # What a repair takes from elsewhere has that file's header, which says nothing about the parent's own.
    headers = {header.shard: header for header in parent.headers if header.shard not in parent.replaced}
    for name in sorted(_locked_names(parent)):
        known = None if read_all else _downloaded_sha256(parent.folder, name)
        if known:
            files[name] = LockedFile((parent.folder / name).stat().st_size, known)
        else:
            tell(f"reading {name}")
            files[name] = _read_file(parent.folder / name, headers.get(name))
    return Lock(repository, revision, files)


def _locked_names(parent: Parent) -> set[str]:
    names = {CONFIG_FILE, *parent.carried, *(header.shard for header in parent.headers)}
    return names if parent.single else names | {INDEX_FILE}


def _downloaded_sha256(folder: Path, name: str) -> str | None:
    """The sha256 that huggingface_hub noted when it fetched the file: a blob's name, or a local folder's metadata."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent.name == "blobs":
        etag = path.resolve().name
    else:
        note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        lines = note.read_text().split() if note.is_file() else []
        etag = lines[1] if len(lines) > 1 and note.stat().st_mtime >= path.stat().st_mtime else ""
    return etag if _SHA256.fullmatch(etag) else None


def _read_file(path: Path, header: Header | None) -> LockedFile:
    digest, stat = hashlib.sha256(), file_stat(path)
    splitter = TensorSplitter([(ref.name, ref.bytes) for ref in header.tensors] if header else [])
    data_begin = header.data_begin if header else stat[0]
    buffer = Buffers().get("chunk", CHUNK_BYTES)
    with Source(path, stat) as source:
        for begin, end in ((0, data_begin), (data_begin, stat[0])):
            for _, chunk in source.chunks(buffer, begin, end):
                digest.update(chunk)
                if begin:
                    splitter.update(chunk)
    return LockedFile(stat[0], digest.hexdigest(), tensors_digest(splitter.digests()) if header else None)


def tensors_digest(digests: Mapping[str, str]) -> str:
    """One digest of a shard's tensor digests."""
    return key_of(dict(digests))


def hold(lock: Lock, parent: Parent, repository: str | None, revision: str | None, paranoid: bool) -> None:
    """Raises CheckpointError where `parent` is not the one that was pinned, as far as that is known without its data.

    Small files are hashed; shards are compared by size, under `paranoid` by sha256.
    """
    if (lock.repository, lock.revision) != (repository, revision):
        raise CheckpointError(
            f"the lock is for {lock.repository} at {lock.revision}, the recipe for {repository} at {revision}; "
            f"run `shardmill pin` again"
        )
    shards = {header.shard for header in parent.headers}
    names = _locked_names(parent)
    if differing := sorted(names ^ set(lock.files)):
        held = "the lock does not have it" if differing[0] in names else "the parent does not have it"
        raise CheckpointError(f"{parent.folder / differing[0]}: {held}; {_NOT_PINNED}")
    for name in sorted(names):
        path, locked = parent.folder / name, lock.files[name]
        size = path.stat().st_size
        if size != locked.bytes:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, the pinned one {locked.bytes:,}; {_NOT_PINNED}"
            )
        if (name not in shards or paranoid) and _read_file(path, None).sha256 != locked.sha256:
            raise CheckpointError(
                f"{path}: its sha256 is not the pinned one ({locked.sha256}); {_NOT_PINNED}"
            )


def holds_tensors(lock: Lock, shard: str, digests: Mapping[str, str]) -> bool:
    """Whether the bytes read from the parent's `shard` are the pinned ones; False where the lock can't tell.

    Raises CheckpointError where they are not.
    """
    pinned = lock.files[shard].tensors
    if pinned is None:
        return False
    if tensors_digest(digests) != pinned:
        raise CheckpointError(f"{shard}: its tensors are not those that were pinned; {_NOT_PINNED}")
    return True


def lock_facts(lock: Lock) -> dict[str, Any]:
    """What a pin came to, for the command's last line."""
    return {
        "files": len(lock.files),
        "bytes": sum(file.bytes for file in lock.files.values()),
        "computed": sum(file.tensors is not None for file in lock.files.values()),
    }
