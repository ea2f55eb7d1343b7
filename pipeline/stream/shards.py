"""The shards of a build into a hub: read where the parent's file is passed on, made and sent where it is not.

The worker that has made a shard sends it, notes it and removes it before it begins another. So the disk holds one
shard a worker at most, one worker makes while another sends, and there are fewer workers where the disk is too small.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.container.filesystem import remove, stat_or_none
from shardmill.pipeline.container.hub import origin_of
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.publish.answers import HubError
from shardmill.pipeline.publish.counted import Count
from shardmill.pipeline.publish.facts import LocalFile
from shardmill.pipeline.publish.hub import Hub
from shardmill.pipeline.publish.local import refuse_changed
from shardmill.pipeline.publish.publish import at_once
from shardmill.pipeline.run.build import is_resumable
from shardmill.pipeline.run.resume import is_as_staged
from shardmill.pipeline.run.schedule import make_shards, tasks_of
from shardmill.pipeline.run.shard import ShardTask, read
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


@dataclass(frozen=True, slots=True)
class Sent:
    """What making and sending came to: file -> its receipt, the files that were found made here, and the workers."""

    receipts: Mapping[str, Receipt]
    resumed: Collection[str]
    workers: int


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


def make_and_send(shop: Workshop, shards: Sequence[ShardPlan], known: Mapping[str, Staged]) -> Sent:
    """Sends every shard: from the parent's folder what lies there, else made here, or found made by an interrupted
    build. All of them are on the hub when this returns.
    """
    from_parent = {shard.file: shard for shard in shards if shop.is_here(shard) and shard.file in known}
    from_here = [shard for shard in shards if shard.file not in from_parent]
    left = _left(shop, from_here)
    at_once(shop.settings.workers, _files(left), lambda file: _send_made(shop, left[file.name], shop.watch))
    todo = [shard for shard in from_here if shard.file not in left]
    settings = replace(shop.settings, passthrough="copy", workers=_workers(shop, todo))

    def send(task: ShardTask, receipt: Receipt, watch: Watch) -> None:
        _send_made(shop, _staged(shop, task.plan.file), watch)

    made = make_shards(todo, shop.prepared, shop.store.out, settings, shop.watch, send)
    others = {file: known[file] for file in from_parent}
    at_once(
        shop.settings.workers,
        _files(others),
        lambda file: _send_parents(shop, from_parent[file.name], file, others[file.name]),
    )
    receipts = {file: staged.receipt for file, staged in (*left.items(), *others.items())}
    return Sent({**receipts, **made.receipts}, tuple(left), made.workers)


def _files(staged: Mapping[str, Staged]) -> list[LocalFile]:
    return [as_file(each.receipt) for each in staged.values()]


def _left(shop: Workshop, shards: Sequence[ShardPlan]) -> dict[str, Staged]:
    """What an interrupted build has left here whole; all else that it left goes."""
    memory, parent = shop.store.load(), shop.prepared.parent
    left = {
        shard.file
        for shard in shards
        if is_resumable(shard, parent, memory, shop.store.staging, shop.settings, shop.tell)
    }
    shop.store.sweep(keep=left)
    return shop.store.staged(left)


def _workers(shop: Workshop, shards: Sequence[ShardPlan]) -> int:
    """As many as may have a shard here at a time. Raises BuildError where the disk holds not one."""
    free = shutil.disk_usage(shop.store.out).free
    sizes = sorted((shard.header.file_bytes for shard in shards), reverse=True)[: shop.settings.workers]
    if sizes and sizes[0] > free:
        raise BuildError(
            f"{shop.store.out}: the largest shard has {sizes[0]} bytes and the disk has {free} free; free some "
            f"space, or set XDG_CACHE_HOME to a folder on another disk"
        )
    return max(1, sum(sum(sizes[: count + 1]) <= free for count in range(len(sizes))))


def _staged(shop: Workshop, file: str) -> Staged:
    if staged := shop.store.staged([file]).get(file):
        return staged
    raise BuildError(
        f"{shop.store.staging / file}: is not there though it was made; something else removes files there; stop "
        f"that, then run the same command again"
    )


def _send_made(shop: Workshop, staged: Staged, watch: Watch) -> None:
    """Sends a shard that was made here, notes it and removes it."""
    file = as_file(staged.receipt)
    _send(shop, shop.store.staging, file, is_as_staged(shop.store.staging, staged), watch)
    shop.notes.keep(staged)
    remove(shop.store.staging / file.name)
    shop.store.discard(file.name)


def _send_parents(shop: Workshop, shard: ShardPlan, file: LocalFile, staged: Staged) -> None:
    """Sends the parent's own file. Raises CheckpointError where it changed since it was read, or does meanwhile."""
    path, stat = shop.prepared.parent.path(shard.inputs[0]), staged.inputs[shard.inputs[0]]
    _send(shop, path.parent, file, stat_or_none(path) == stat, shop.watch)
    if stat_or_none(path) != stat:
        refuse_changed(path.parent, file)


def _send(shop: Workshop, folder: Path, file: LocalFile, is_sure: bool, watch: Watch) -> None:
    if not is_sure:
        refuse_changed(folder, file)
    count = Count(file.bytes, watch.done)
    operation = shop.hub.addition(folder, file, count.add)
    shop.hub.upload(operation)
    if operation._upload_mode != "lfs":
        raise HubError(
            f"{shop.hub.place}: {file.name}: the hub would keep it as a plain file of git; write "
            f"`*.safetensors filter=lfs diff=lfs merge=lfs -text` into .gitattributes there, then go on"
        )
    count.end()
    shop.tell(f"{file.name}: {file.bytes:,} bytes are on the hub")
