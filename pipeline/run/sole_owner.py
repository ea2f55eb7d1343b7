"""Whether a parent is this build's alone, so that its shards may be removed: no link, cache, other recipe or reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardmill.pipeline.container.hub import origin_of, place_of
from shardmill.pipeline.container.regular import resolved
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.lock import Lock, load_lock
from shardmill.pipeline.types import Parent


def refuse_shared(parent: Parent, lock: Lock | None, lock_file: Path) -> None:
    """Raises BuildError where there is none, or where somebody else may use a shard of the parent."""
    folder = parent.folder
    if lock is None:
        raise BuildError(
            f"--consume-parent removes the parent's shards and needs {lock_file}, which says what they were; "
            f"run `shardmill pin` first"
        )
    if origin_of(folder):
        raise BuildError(f"{place_of(folder)}: lies on a hub, not on this disk; leave --consume-parent out")
    if folder.is_symlink():
        raise BuildError(f"{folder}: is a link to {resolved(folder)}, which others may use; {_INSTEAD}")
    if "snapshots" in resolved(folder).parts and any(
        part.startswith("models--") for part in resolved(folder).parts
    ):
        raise BuildError(f"{folder}: is in a hub's cache, which other programs use; {_INSTEAD}")
    for header in parent.own_headers:
        if header.shard not in parent.consumed and header.shard not in parent.replaced:
            _refuse_links(folder / header.shard)
    for other in _locks_beside(folder, lock_file):
        if _names_same_files(other, lock):
            raise BuildError(f"{other}: another recipe is pinned to the same parent; {_INSTEAD}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder}: can't be written to, so its shards can't be removed; {_INSTEAD}")
    for process, path in _open_in(folder, Path("/proc")):
        raise BuildError(f"{path}: is open in the process {process}; let that end, or {_INSTEAD}")


_INSTEAD = "give a copy that is this build's alone, or leave --consume-parent out"


def _refuse_links(path: Path) -> None:
    if path.is_symlink():
        raise BuildError(f"{path}: is a link to {path.readlink()}, which others may use; {_INSTEAD}")
    if (links := path.stat().st_nlink) > 1:
        raise BuildError(f"{path}: has {links} names (hard links), of which others may be used; {_INSTEAD}")


def _open_in(folder: Path, processes: Path) -> Iterator[tuple[str, Path]]:
    """(number and name, file) of other programs that have a file in `folder` open or mapped, as far as Linux shows."""
    root = resolved(folder)
    for process in processes.glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        for path in _files_of(process):
            if path.is_relative_to(root) and path != root:
                yield f"{process.name} ({_name_of(process)})", path


def _files_of(process: Path) -> Iterator[Path]:
    """What a process has open or mapped; nothing of one that has ended, or is not for this user to see."""
    with suppress(OSError):
        for link in process.joinpath("fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield link.readlink()
    with suppress(OSError):
        lines = process.joinpath("maps").read_bytes().splitlines()
        yield from {Path(os.fsdecode(line[line.index(b"/") :])) for line in lines if b"/" in line}


def _name_of(process: Path) -> str:
    try:
        return process.joinpath("comm").read_text().strip()
    except OSError:
        return "?"


def _locks_beside(folder: Path, own: Path) -> Iterator[Path]:
    """Other lock files beside the recipe, in the parent's folder, and beside that folder."""
    mine = resolved(own)
    seen = set()
    for place in (own.parent, folder, folder.absolute().parent):
        for path in sorted(place.glob("*.lock")):
            if path.is_file() and resolved(path) != mine and resolved(path) not in seen:
                seen.add(resolved(path))
                yield path


def _names_same_files(path: Path, lock: Lock) -> bool:
    """Whether the file is a lock of ours that names a file of `lock`, by a digest. Other tools have locks too."""
    try:
        other = load_lock(path)
    except (CheckpointError, OSError):
        return False
    return other is not None and not _digests(other).isdisjoint(_digests(lock))


def _digests(lock: Lock) -> set[str]:
    found = ((file.sha256, file.tensors) for file in lock.files.values())
    return {digest for pair in found for digest in pair if digest}
