"""Whether a folder is a place for a build: not the parent, no other checkpoint, nobody's files, space enough."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardmill.pipeline.container.files import can_reflink
from shardmill.pipeline.container.regular import resolved
from shardmill.pipeline.errors import BuildError, OutputFolderError
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.stages.job import Passthrough
from shardmill.pipeline.types import Parent

NAME_BYTES_MAX = 250  # of 255: a receipt has a longer name than its file


def refuse_names(names: Iterable[str]) -> None:
    """Raises BuildError for a file name that no output folder or manifest can hold."""
    for name in names:
        last = name.rpartition("/")[2]
        if not name.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in name):
            raise BuildError(f"{name!a}: its name is no UTF-8, which no manifest can hold; rename the file")
        if len(last.encode()) > NAME_BYTES_MAX:
            raise BuildError(
                f"{last}: its name has {len(last.encode())} bytes, the limit is {NAME_BYTES_MAX}; rename it"
            )


def refuse_out(parent: Path, out: Path) -> None:
    """Raises OutputFolderError where `out` is no place for a build from `parent`."""
    one, other = resolved(parent), resolved(out)
    if one == other:
        raise OutputFolderError(
            f"{out}: is the parent itself; choose another --out, a build never writes to its parent"
        )
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise OutputFolderError(
            f"--out {out} and --parent {parent} overlap: one contains the other; choose another --out"
        )
    for above in other.parents:
        if (above / MANIFEST_FILE).exists():
            raise OutputFolderError(
                f"{out}: is inside the checkpoint {above}, which it would spoil; choose another --out"
            )
    if foreign := Store(out).foreign_files():
        raise OutputFolderError(
            f"{out}: is not empty ({foreign[0]}, of {len(foreign)} entries) and was not built by shardmill; "
            f"choose an empty --out"
        )


def refuse_full_disk(todo: Sequence[ShardPlan], parent: Parent, out: Path, passthrough: Passthrough) -> None:
    """Raises BuildError where the shards to make do not fit on the disk of `out`.

    What is passed on as a hard link or a reflink takes no space, where `out` is on the parent's file system and that
    can do it.
    """
    device = out.stat().st_dev
    shared = passthrough == "hardlink" or (passthrough == "reflink" and can_reflink(out))
    needed = sum(
        shard.header.file_bytes
        for shard in todo
        if shard.rewritten or not shared or parent.path(shard.file).stat().st_dev != device
    )
    free = shutil.disk_usage(out).free
    if needed > free:
        raise BuildError(
            f"{out}: needs {needed} bytes and the disk has {free} free; free some space or choose another --out"
        )
