"""Publishing: the small files and the manifest are staged beside the shards, then all appear at once.

What is already in place with the right bytes is not written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.container.filesystem import stat_or_none
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, FileRecord, Receipt
from shardmill.pipeline.manifest.state import Memory, Staged, StatCache
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run.beside import Placed, carry, place_small, small_files
from shardmill.pipeline.run.digests import sha256_of
from shardmill.pipeline.run.manifest import manifest_of
from shardmill.pipeline.run.receipts import odd_sentences, receipt_before, refuse_losses, refuse_odd
from shardmill.pipeline.run.resume import holds_receipt
from shardmill.pipeline.stages.job import Prepared, Products, Settings
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE, Stat

SIGNATURES = ("model.sig", "provenance.intoto.json", "provenance.intoto.jsonl")  # what `verify sign` writes


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing came to."""

    written: tuple[str, ...]  # every file that was written anew
    files: tuple[str, ...]  # every file that the manifest describes
    stats: StatCache  # of the files that the new manifest describes; no fingerprint yet
    odd: tuple[str, ...] = ()  # a sentence for each tensor that holds NaN, Inf or nothing but zeros


def publish(
    prepared: Prepared,
    store: Store,
    memory: Memory,
    settings: Settings,
    made: Mapping[str, Staged],
    judged: Mapping[str, Stat],
) -> Published:
    """Publishes the `made` shards and all that goes with them; nothing that is there already is written again.

    judged: the stats under which the shards that are up to date were found to be so. Raises BuildError, the earlier
    checkpoint untouched, where a file is not what it was when it was made or judged.
    """
    plan = prepared.plan
    receipts = [_receipt(shard, made, store, memory, settings) for shard in plan.shards]
    if settings.strict:
        refuse_odd(receipts)
    if settings.lossless:
        refuse_losses(plan, receipts)
    products = prepared.dag.run(
        "checkpoint",
        prepared.dag.after_shards(),
        prepared.checkpoint,
        Products(**prepared.products, receipts=receipts),
    )
    placed = {receipt.file: _placed_shard(receipt, made, judged) for receipt in receipts}
    for name, data in small_files(plan, products["index"]).items():
        placed[name] = place_small(store, name, data)
    for name in plan.carried:
        placed[name] = carry(prepared.parent, name, store, memory, settings)
    files = {name: each.record for name, each in placed.items()}
    manifest = manifest_of(prepared, settings, files, receipts)
    all_placed = {**placed, MANIFEST_FILE: place_small(store, MANIFEST_FILE, manifest.to_json())}
    staged = {name: each.stat for name, each in all_placed.items() if each.is_new}
    removed = sorted(memory.published - set(files))
    if staged or removed:
        _refuse_changed(all_placed, store, plan, receipts)
        removed += signatures_in(store.out)
        store.commit(staged, removed, SINGLE_FILE if plan.single else INDEX_FILE)
    outputs = {
        name: stat for name, each in placed.items() if (stat := _stat_in_place(store.out / name, each))
    }
    stats = StatCache(_parent_stats(prepared, store, made), outputs)
    return Published(tuple(staged), tuple(files), stats, odd_sentences(receipts))


def _placed_shard(receipt: Receipt, made: Mapping[str, Staged], judged: Mapping[str, Stat]) -> Placed:
    record = FileRecord(receipt.file_bytes, receipt.sha256)
    if receipt.file in made:
        return Placed(record, made[receipt.file].stat, is_new=True)
    return Placed(record, judged[receipt.file], is_new=False)


def _refuse_changed(
    placed: Mapping[str, Placed], store: Store, plan: Plan, receipts: Sequence[Receipt]
) -> None:
    """Raises BuildError where a file is gone or changed since it was made, or since it was found to be up to date."""
    shards = {
        shard.file: (shard.header, receipt) for shard, receipt in zip(plan.shards, receipts, strict=True)
    }
    for name, each in placed.items():
        path = (store.staging if each.is_new else store.out) / name
        if stat_or_none(path) == each.stat:
            continue
        if name in shards and holds_receipt(path, *shards[name]):
            continue
        if name not in shards and path.is_file() and sha256_of(path) == each.record.sha256:
            continue
        store.discard(name)
        raise BuildError(
            f"{path}: was changed or removed by something else while this build was at work, so nothing is "
            f"published; stop that, then build again: only what changed is made again"
        )


def _stat_in_place(path: Path, placed: Placed) -> Stat | None:
    """The Stat of a published file, where its bytes are known under it. To take its name moved a new one's ctime."""
    now = stat_or_none(path)
    if now is None or placed.is_new:
        return now if now and now[:3] == placed.stat[:3] else None
    return placed.stat


def _parent_stats(prepared: Prepared, store: Store, made: Mapping[str, Staged]) -> dict[str, Stat]:
    """The stats under which the parent's bytes are those of the manifest; a file that was read under two has none.

    What is passed on as a hard link is the parent's own file: its commit has moved the ctime, and nothing else.
    """
    parent = prepared.parent
    read: dict[str, set[Stat]] = {name: set() for name in parent.stats}
    for staged in made.values():
        for name, stat in staged.inputs.items():
            read.setdefault(name, set()).add(_stat_of_link(parent.path(name), store.out / name, stat))
    return {
        name: found.pop() if found else parent.stats[name] for name, found in read.items() if len(found) < 2
    }


def _stat_of_link(source: Path, output: Path, stat: Stat) -> Stat:
    """`stat`, or what it is now where the published file is a hard link to the parent's."""
    now, published = stat_or_none(source), stat_or_none(output)
    return now if now and now == published and now[:3] == stat[:3] else stat


def signatures_in(out: Path) -> list[str]:
    """The files in `out` that vouch for the checkpoint as it is, and for no other."""
    return [name for name in SIGNATURES if (out / name).is_file()]


def _receipt(
    shard: ShardPlan, made: Mapping[str, Staged], store: Store, memory: Memory, settings: Settings
) -> Receipt:
    """The shard's receipt, new or from the manifest, with its file's sha256 if that is wanted."""
    if shard.file in made:
        receipt, folder = made[shard.file].receipt, store.staging
    else:
        receipt, folder = receipt_before(memory.manifest, shard), store.out
    if not settings.file_digests:
        return replace(receipt, sha256=None)
    return receipt if receipt.sha256 else replace(receipt, sha256=sha256_of(folder / receipt.file))
