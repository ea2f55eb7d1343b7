"""The shards of a build into a hub: read where the parent's file is passed on, made and sent where it is not.

As many shards as workers are made, then sent, noted and removed; only then come the next. So the disk holds one shard
a worker at most, and fewer where it is too small for that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.filesystem import remove, stat_or_none
from shardmill.pipeline.container.hub import origin_of
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.publish.counted import Count
from shardmill.pipeline.publish.facts import LocalFile
from shardmill.pipeline.publish.hub import Hub, HubError
from shardmill.pipeline.publish.local import refuse_changed
from shardmill.pipeline.publish.publish import at_once
from shardmill.pipeline.run.build import is_resumable
from shardmill.pipeline.run.resume import is_as_staged
from shardmill.pipeline.run.schedule import make_shards, tasks_of
from shardmill.pipeline.run.shard import read
from shardmill.pipeline.stages.job import Prepared, Settings, Watch, Worker
from shardmill.pipeline.stream.notes import Notes

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What making and sending takes."""

    prepared: Prepared
    settings: Settings
    hub: Hub
    store: Store
    notes: Notes
    watch: Watch
    tell: Tell

    def is_here(self, shard: ShardPlan) -> bool:
        """Whether a shard that is passed on lies on this disk, in the parent's folder."""
        path = self.prepared.parent.path(shard.inputs[0])
        return origin_of(path.parent) is None and not shard.rewritten


def as_file(receipt: Receipt) -> LocalFile:
    assert receipt.sha256, f"{receipt.file}: a build into a hub hashes every file"
    return LocalFile(receipt.file, receipt.file_bytes, receipt.sha256)


def read_passed_on(
    shop: Workshop, shards: Sequence[ShardPlan], stated: Mapping[str, str]
) -> dict[str, Staged]:
    """File -> what it holds, of shards that equal the parent's files. Nothing is written but their notes.

    stated: the sha256 that the hub states of some. Raises CheckpointError where one has another.
    """
    tasks = tasks_of(shards, shop.prepared, shop.store.out, shop.settings)

    def read_one(file: str) -> Staged:
        staged = read(tasks[file], shop.watch, Worker())
        if staged.receipt.sha256 != stated.get(file, staged.receipt.sha256):
            raise CheckpointError(
                f"{file}: its bytes have the sha256 {staged.receipt.sha256}, the hub states {stated[file]}; "
                f"fetch it again"
            )
        shop.notes.keep(staged)
        return staged

    with ThreadPoolExecutor(shop.settings.workers) as pool:
        try:
            return dict(zip(tasks, pool.map(read_one, tasks), strict=True))
        except BaseException:
            shop.watch.stop.set()
            raise


def batches(shop: Workshop, shards: Sequence[ShardPlan]) -> Iterator[list[ShardPlan]]:
    """The shards in groups of as many as workers, or as the disk holds. Raises BuildError where it holds not one."""
    whole = shop.store.staged(
        shard.file for shard in shards
    )  # an interrupted build has left them: they go first
    largest_first = sorted(
        shards, key=lambda shard: (shard.file not in whole, -shard.header.file_bytes, shard.file)
    )
    free = shutil.disk_usage(shop.store.out).free
    held = sum(stat[0] for each in shop.store.staging.iterdir() if (stat := stat_or_none(each)))
    count, size = 0, 0
    for shard in largest_first[: shop.settings.workers]:
        size += 0 if shop.is_here(shard) else shard.header.file_bytes
        count += size <= free + held
    if largest_first and not count:
        raise BuildError(
            f"{shop.store.out}: the largest shard has {size} bytes and the disk has {free} free; free some space, or "
            f"set XDG_CACHE_HOME to a folder on another disk"
        )
    for begin in range(0, len(largest_first), max(count, 1)):
        yield largest_first[begin : begin + count]


def make_and_send(
    shop: Workshop, batch: Sequence[ShardPlan], known: Mapping[str, Staged]
) -> dict[str, tuple[Staged, Any]]:
    """File -> what it holds, and the library's operation that names it in a commit."""
    from_parent = [shard for shard in batch if shop.is_here(shard) and shard.file in known]
    from_here = [shard for shard in batch if shard not in from_parent]
    staged = {shard.file: known[shard.file] for shard in from_parent} | _made(shop, from_here)

    def send(file: LocalFile) -> Any:
        if file.name in passed:
            return _send_parents(shop, passed[file.name], file, staged[file.name])
        operation = _send(shop, shop.store.staging, file, is_as_staged(shop.store.staging, staged[file.name]))
        shop.notes.keep(staged[file.name])
        remove(shop.store.staging / file.name)
        shop.store.discard(file.name)
        return operation

    passed = {shard.file: shard for shard in from_parent}
    files = [as_file(each.receipt) for each in staged.values()]
    operations = at_once(min(shop.settings.workers, len(files)), files, send)
    return {
        file.name: (staged[file.name], operation) for file, operation in zip(files, operations, strict=True)
    }


def _made(shop: Workshop, shards: Sequence[ShardPlan]) -> dict[str, Staged]:
    """Makes each shard, unless an interrupted build has left it here whole."""
    memory, parent = shop.store.load(), shop.prepared.parent
    todo = [
        shard
        for shard in shards
        if not is_resumable(shard, parent, memory, shop.store.staging, shop.settings, shop.tell)
    ]
    shop.store.sweep(keep={shard.file for shard in shards} - {shard.file for shard in todo})
    settings = replace(shop.settings, passthrough="copy")
    make_shards(todo, shop.prepared, shop.store.out, settings, shop.watch)
    staged = shop.store.staged(shard.file for shard in shards)
    if gone := [shard.file for shard in shards if shard.file not in staged]:
        raise BuildError(
            f"{shop.store.staging / gone[0]}: is not there though it was made; something else removes files "
            f"there; stop that, then run the same command again"
        )
    return staged


def _send_parents(shop: Workshop, shard: ShardPlan, file: LocalFile, staged: Staged) -> Any:
    """Sends the parent's own file. Raises CheckpointError where it changed since it was read, or does meanwhile."""
    path, stat = shop.prepared.parent.path(shard.inputs[0]), staged.inputs[shard.inputs[0]]
    operation = _send(shop, path.parent, file, stat_or_none(path) == stat)
    if stat_or_none(path) != stat:
        refuse_changed(path.parent, file)
    return operation


def _send(shop: Workshop, folder: Path, file: LocalFile, is_sure: bool) -> Any:
    if not is_sure:
        refuse_changed(folder, file)
    count = Count(file.bytes, shop.watch.advance)
    operation = shop.hub.addition(folder, file, count.add)
    shop.hub.upload(operation)
    if operation._upload_mode != "lfs":
        raise HubError(
            f"{shop.hub.place}: {file.name}: the hub would keep it as a plain file of git; write "
            f"`*.safetensors filter=lfs diff=lfs merge=lfs -text` into .gitattributes there, then go on"
        )
    count.end()
    shop.tell(f"{file.name}: {file.bytes:,} bytes are on the hub")
    return operation
