"""Building on one disk: a parent's shard is removed as soon as all that is made from it is whole and read back.

One shard is made at a time. When a parent's shard goes, each of its children is on the disk under a receipt, and was
read again from there; so at every moment the parent's shard or its children are whole, and the same command goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.container.filesystem import stat_or_none, sync_folder
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.consumed import Records
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.state import Memory
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.run.manifest import is_pinned
from shardmill.pipeline.run.receipts import input_digests, receipt_before, refuse_losses, refuse_odd
from shardmill.pipeline.run.resume import holds_receipt
from shardmill.pipeline.run.schedule import make_shards
from shardmill.pipeline.run.stale import Verdict
from shardmill.pipeline.stages.job import Prepared, Products, Settings, Watch
from shardmill.pipeline.types import Header, Parent

Tell = Callable[[str], None]


def refuse_lost(verdicts: Iterable[Verdict], shards: Sequence[ShardPlan], parent: Parent) -> None:
    """Raises BuildError, before anything is removed, where a shard must be made again from what was consumed."""
    reasons = {verdict.file: verdict.reason for verdict in verdicts if verdict.reason and not verdict.staged}
    for shard in shards:
        gone = [file for file in shard.inputs if file in parent.consumed]
        if shard.file in reasons and gone:
            raise BuildError(
                f"{shard.file}: must be made again ({reasons[shard.file]}), but the parent's {gone[0]} was consumed; "
                f"give the recipe that consumed it, or fetch {gone[0]} into {parent.folder} again"
            )


def refuse_interrupted(store: Store) -> None:
    """Raises BuildError where an ordinary build would sweep away the only children of a consumed parent."""
    if not Records(store).is_empty and store.holds_leftovers():
        raise BuildError(
            f"{store.out}: holds an unfinished build that has consumed shards of its parent; go on with "
            f"--consume-parent and the same recipe, or delete {store.state} and fetch the parent again"
        )


@dataclass(frozen=True, slots=True)
class Consumer:
    """A build that consumes its parent, in `store`, as `memory` found it."""

    prepared: Prepared
    store: Store
    memory: Memory
    settings: Settings
    watch: Watch
    tell: Tell

    def make(self, todo: Sequence[ShardPlan]) -> tuple[int, Prepared]:
        """Makes each shard in `todo`; how many workers did, and what is prepared once the parent's shards are gone."""
        ordered = self._in_order(todo)
        self._refuse_full_disk(ordered)
        open_files = {shard.file for shard in todo}
        verified: set[str] = set()
        workers = 0
        self._consume(open_files, verified)
        for shard in ordered:
            done = make_shards([shard], self.prepared, self.store.out, self.settings, self.watch)
            workers = max(workers, done.workers)
            open_files.remove(shard.file)
            self._consume(open_files, verified)
        records = Records(self.store).load()
        parent = self.prepared.parent
        gone = {file: each.is_pinned for file, each in records.items() if not (parent.folder / file).exists()}
        parent = replace(parent, consumed=gone)
        products = Products(**{**self.prepared.products, "parent": parent})
        return workers, replace(self.prepared, products=products)

    def _in_order(self, todo: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Those first that take less than what they free; and files that few wait for before those of many."""
        parent = self.prepared.parent
        return sorted(
            todo, key=lambda shard: (shard.header.file_bytes - parent.stats[shard.inputs[0]][0], shard.file)
        )

    def _removable(self, open_files: Iterable[str]) -> list[Header]:
        """The parent's shards that are there and that no shard in `open_files` reads."""
        parent, still_open = self.prepared.parent, set(open_files)
        needed = {
            file for shard in self.prepared.plan.shards if shard.file in still_open for file in shard.inputs
        }
        kept = needed | set(parent.replaced) | set(parent.consumed)
        return [each for each in parent.own_headers if each.shard not in kept]

    def _refuse_full_disk(self, ordered: Sequence[ShardPlan]) -> None:
        """Raises BuildError where the most that shards take beyond what is freed is more than the disk has."""
        parent, out = self.prepared.parent, self.store.out
        shares_disk = parent.folder.stat().st_dev == out.stat().st_dev
        waiting = [shard.file for shard in ordered]
        freed = {header.shard for header in self._removable(waiting)}
        extra = most = -sum(parent.stats[file][0] for file in freed) if shares_disk else 0
        for shard in ordered:
            extra += shard.header.file_bytes
            most = max(most, extra)
            waiting.remove(shard.file)
            now = {header.shard for header in self._removable(waiting)} - freed
            freed |= now
            extra -= sum(parent.stats[file][0] for file in now) if shares_disk else 0
        free = shutil.disk_usage(out).free
        if most > free:
            raise BuildError(
                f"{out}: needs {most} bytes at its fullest and the disk has {free} free; free some space"
            )

    def _consume(self, open_files: Collection[str], verified: set[str]) -> None:
        """Removes every shard of the parent that nothing needs, once its children were read back."""
        for header in self._removable(open_files):
            path = self.prepared.parent.folder / header.shard
            if not path.exists():
                continue  # this build has removed it already
            children = [shard for shard in self.prepared.plan.shards if header.shard in shard.inputs]
            if not children and open_files:
                continue  # all of it is dropped: it goes last
            receipts = [self._receipt(shard) for shard in children]
            if self.settings.strict:
                refuse_odd(receipts)
            if self.settings.lossless:
                refuse_losses(self.prepared.plan, receipts)
            for shard, receipt in zip(children, receipts, strict=True):
                if shard.file not in verified:
                    self._read_back(shard, receipt)
                    verified.add(shard.file)
            self._remove(header, path, children, receipts)

    def _receipt(self, shard: ShardPlan) -> Receipt:
        staged = self.store.staged([shard.file])
        return staged[shard.file].receipt if staged else receipt_before(self.memory.manifest, shard)

    def _read_back(self, shard: ShardPlan, receipt: Receipt) -> None:
        """Raises BuildError where the disk gives other bytes than were made; the parent's shard is then there still."""
        path = self.store.staging / shard.file
        if stat_or_none(path) is None:
            path = self.store.out / shard.file
        _leave_cache(path)
        if not holds_receipt(path, shard.header, receipt):
            self.store.discard(shard.file)
            raise BuildError(
                f"{path}: the disk gives other bytes than were written; nothing of the parent was removed for it; "
                f"check the disk, then build again"
            )

    def _remove(
        self, header: Header, path: Path, children: Sequence[ShardPlan], receipts: Sequence[Receipt]
    ) -> None:
        prepared, file = self.prepared, header.shard
        assert prepared.lock is not None, "a parent is consumed under a lock alone"
        stat = prepared.parent.stats[file]
        if stat_or_none(path) != stat:
            raise BuildError(f"{path}: changed while this build was at work; stop that, then build again")
        whole = {receipt.file: receipt.sha256 for receipt in receipts if not receipt.rewritten}
        digests = input_digests(children, receipts)
        pinned = is_pinned(prepared.lock, header, digests, whole.get(file), prepared.parent)
        pinned |= prepared.held_by_bytes
        for folder in (self.store.staging, self.store.receipts, self.store.out):
            sync_folder(folder)
        Records(self.store).keep(path.parent, file, stat, pinned, header.data_begin)
        path.unlink()
        sync_folder(path.parent)
        self.tell(f"{file}: its children are whole; the parent's was removed ({stat[0]:,} bytes)")


def _leave_cache(path: Path) -> None:
    """Asks the system to forget the file's pages, so that the disk is what is read next."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
