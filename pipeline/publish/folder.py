"""Publishing into a folder: a checkpoint's files without the build's memory, whole under its name or not at all.

Each file is held to the manifest's sha256 as it is copied, and read back from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.folder import refuse_taken, refuse_within, whole_folder
from shardmill.pipeline.delta.child import published_names
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.publish.facts import HubFile, Listing, LocalFile
from shardmill.pipeline.publish.local import local_file, local_files
from shardmill.pipeline.publish.plan import Publication, plan_publication
from shardmill.pipeline.run.digests import sha256_of, steadily

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Copying:
    """A checkpoint's folder, the folder that it goes to, and what becomes of each file."""

    source: Path
    target: Path
    plan: Publication


def plan_copy(source: Path, target: Path) -> Copying:
    """Looks at both folders and changes neither. Raises ShardmillError where the target holds anything else."""
    refuse_within(target, source)
    files, _ = local_files(source)
    plan = plan_publication(files, _listing(target, files), None)
    if not plan.changes_nothing:
        refuse_taken(target)
    return Copying(source, target, plan)


def _listing(target: Path, files: tuple[LocalFile, ...]) -> Listing | None:
    """What the target holds; a file is read only where one of its size is to be there."""
    if not target.is_dir() or target.is_symlink():
        return None
    sizes = {file.name: file.bytes for file in files}
    held = {}
    for name in published_names(target):
        size = (target / name).stat().st_size
        sha256 = local_file(target, name, None).sha256 if sizes.get(name) == size else "0" * 64
        held[name] = HubFile(name, size, sha256, "")
    return Listing(str(target), "", held) if held else None


def copy(copying: Copying, begin: Advance, advance: Advance) -> None:
    """Makes the target. `begin` hears how many bytes are to go, `advance` of those that go. Raises ShardmillError."""
    if copying.plan.changes_nothing:
        return
    begin(copying.plan.bytes("send"))
    with whole_folder(copying.target) as part:
        for step in copying.plan.steps:
            _copy_one(copying.source / step.file.name, part / step.file.name, step.file, advance)


def _copy_one(source: Path, target: Path, file: LocalFile, advance: Advance) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    read, _ = steadily(source, None, lambda opened: _copied(opened, target, advance))
    for path, got in ((source, read), (target, sha256_of(target))):
        if got != file.sha256:
            raise CheckpointError(
                f"{path}: expected the sha256 {file.sha256}, got {got}; nothing was published; `shardmill verify "
                f"integrity` tells what is wrong with the checkpoint, or look at the disk of the copy"
            )


def _copied(source: Source, target: Path, advance: Advance) -> str:
    """Copies an open file; the sha256 of what was read."""
    target.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with Sink(target, source.stat[0]) as sink:
        sink.reserve()
        for offset, chunk in source.chunks(Buffers().get("chunk", CHUNK_BYTES), 0, source.stat[0]):
            sink.write(chunk, offset)
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
