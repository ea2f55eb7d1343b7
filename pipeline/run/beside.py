"""The files beside the shards: made from the plan, or passed on as they are.

What is in place already is not written again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.filesystem import stat_or_none
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.manifest.records import FileRecord
from shardmill.pipeline.manifest.state import Memory
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.run.digests import sha256_of, steadily
from shardmill.pipeline.stages.index import index_bytes
from shardmill.pipeline.stages.job import Prepared, Settings
from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, README_FILE, Parent, Stat


@dataclass(frozen=True, slots=True)
class Placed:
    """A file of the new checkpoint: its record, and the Stat under which its bytes were found to be that."""

    record: FileRecord
    stat: Stat
    is_new: bool  # it is in the staging folder, not in place


def small_files(plan: Plan, index: bytes) -> dict[str, bytes]:
    """Name -> content of the files that are made from the plan; an index only beside many shards."""
    small = {CONFIG_FILE: plan.config, README_FILE: plan.readme, **plan.beside}
    return small if plan.single else {**small, INDEX_FILE: index}


def stale_beside_shards(prepared: Prepared, out: Path, memory: Memory, settings: Settings) -> tuple[str, ...]:
    """The files beside the shards that a build would write anew: config, README, index, and what is carried."""
    plan = prepared.plan
    small = small_files(plan, index_bytes(plan.weight_map, plan.tensor_bytes))
    carried = (
        name for name in plan.carried if _carried_before(prepared.parent, name, out, memory, settings) is None
    )
    return (*(name for name, data in small.items() if not _is_published(out / name, data)), *carried)


def place_small(store: Store, name: str, data: bytes) -> Placed:
    """A file of these bytes, staged if it is not in place already."""
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    stat = stat_or_none(store.out / name)
    if stat and _is_published(store.out / name, data):
        return Placed(record, stat, is_new=False)
    store.stage(name, data)
    return Placed(record, file_stat(store.staging / name), is_new=True)


def carry(parent: Parent, name: str, store: Store, memory: Memory, settings: Settings) -> Placed:
    """A file that is passed on as it is, copied if it is not in place already."""
    if placed := _carried_before(parent, name, store.out, memory, settings):
        return placed
    source, staged, stat = parent.folder / name, store.staging / name, parent.stats[name]
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.unlink(missing_ok=True)
    digest, _ = steadily(source, stat, lambda opened: copied(opened, staged))
    return Placed(FileRecord(stat[0], digest), file_stat(staged), is_new=True)


def copied(source: Source, staged: Path) -> str:
    """Copies the file; its sha256."""
    staged.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with Sink(staged, source.stat[0]) as sink:
        for offset, chunk in source.chunks(Buffers().get("chunk", CHUNK_BYTES), 0, source.stat[0]):
            sink.write(chunk, offset)
            digest.update(chunk)
    return digest.hexdigest()


def _carried_before(
    parent: Parent, name: str, out: Path, memory: Memory, settings: Settings
) -> Placed | None:
    """A carried file that is in place already, the parent's own bytes."""
    source, published = parent.folder / name, out / name
    record = memory.manifest.files.get(name) if memory.manifest else None
    stat = stat_or_none(published)
    if record is None or stat is None:
        return None
    trusted = memory.trusted(settings.paranoid)
    same_source = (
        trusted.parent.get(name) == parent.stats[name]
        or sha256_of(source, parent.stats[name]) == record.sha256
    )
    same_output = trusted.output.get(name) == stat
    if same_source and (same_output or sha256_of(published, stat) == record.sha256):
        return Placed(record, stat, is_new=False)
    return None


def _is_published(published: Path, data: bytes) -> bool:
    return published.is_file() and published.stat().st_size == len(data) and read_regular(published) == data
