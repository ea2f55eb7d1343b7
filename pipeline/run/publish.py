"""Publishing: the small files and the manifest are staged beside the shards, then all appear at once.

What is already in place with the right bytes is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.actions import Conversion, Reblock
from shardmill.pipeline.container.files import Sink
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.manifest.digest import FILE_ALGORITHM, NO_FILE_ALGORITHM
from shardmill.pipeline.manifest.lock import Lock, holds_tensors
from shardmill.pipeline.manifest.records import (
    MANIFEST_FILE,
    ConversionRecord,
    FileRecord,
    Manifest,
    Receipt,
    RecipeRecord,
    ShardRecord,
    manifest_algorithms,
)
from shardmill.pipeline.manifest.store import Memory, StatCache, Store
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run.digests import chunks_of, sha256_of
from shardmill.pipeline.stages.index import index_bytes
from shardmill.pipeline.stages.job import Prepared, Products, Settings
from shardmill.pipeline.types import (
    CONFIG_FILE,
    INDEX_FILE,
    README_FILE,
    SINGLE_FILE,
    Header,
    Parent,
    Stat,
)


SIGNATURES = ("model.sig", "provenance.intoto.json")  # what `verify sign` writes


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing came to."""

    written: tuple[str, ...]  # every file that was written anew
    stats: StatCache  # of the files that the new manifest describes; no fingerprint yet


def publish(
    prepared: Prepared,
    store: Store,
    memory: Memory,
    settings: Settings,
    made: Mapping[str, Receipt],
) -> Published:
    """Publishes the `made` shards and all that goes with them; nothing that is there already is written again."""
    plan = prepared.plan
    receipts = [_receipt(shard, made, store, memory, settings) for shard in plan.shards]
    products = prepared.dag.run(
        "checkpoint",
        prepared.dag.after_shards(),
        prepared.checkpoint,
        Products(**prepared.products, receipts=receipts),
    )
    files = {receipt.file: FileRecord(receipt.file_bytes, receipt.sha256) for receipt in receipts}
    written = [shard.file for shard in plan.shards if shard.file in made]
    for name, data in _small_files(plan, products["index"]).items():
        files[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
        written += _stage_if_new(store, name, data)
    for name in plan.carried:
        files[name], copied = _carry(prepared.parent, name, store, memory, settings)
        written += copied
    manifest = _manifest(prepared, settings, files, receipts)
    written += _stage_if_new(store, MANIFEST_FILE, manifest.to_json())
    removed = sorted(memory.published - set(files))
    if written or removed:
        removed += signatures_in(store.out)
        store.commit(written, removed, SINGLE_FILE if plan.single else INDEX_FILE)
    outputs = {name: file_stat(store.out / name) for name in files}
    return Published(tuple(written), StatCache(_stats_now(prepared.parent, settings), outputs))


def signatures_in(out: Path) -> list[str]:
    """The files in `out` that vouch for the checkpoint as it is, and for no other."""
    return [name for name in SIGNATURES if (out / name).is_file()]


def stale_beside_shards(prepared: Prepared, out: Path, memory: Memory, settings: Settings) -> tuple[str, ...]:
    """The files beside the shards that a build would write anew: config, README, index, and what is carried."""
    plan = prepared.plan
    small = _small_files(plan, index_bytes(plan.weight_map, plan.tensor_bytes))
    carried = (
        name for name in plan.carried if _carried_before(prepared.parent, name, out, memory, settings) is None
    )
    return (*(name for name, data in small.items() if not _is_published(out / name, data)), *carried)


def _small_files(plan: Plan, index: bytes) -> dict[str, bytes]:
    """Name -> content of the files that are made from the plan; an index only beside many shards."""
    small = {CONFIG_FILE: plan.config, README_FILE: plan.readme}
    return small if plan.single else {**small, INDEX_FILE: index}


def _is_published(published: Path, data: bytes) -> bool:
    return published.is_file() and published.stat().st_size == len(data) and published.read_bytes() == data


def _stage_if_new(store: Store, name: str, data: bytes) -> list[str]:
    if _is_published(store.out / name, data):
        return []
    store.stage(name, data)
    return [name]


def _stats_now(parent: Parent, settings: Settings) -> Mapping[str, Stat]:
    """The stats that the parent was read under. Our own hard links have moved the ctime of some, and nothing else."""
    if settings.passthrough != "hardlink":
        return parent.stats
    now = {name: file_stat(parent.path(name)) for name in parent.stats}
    return {name: now[name] if now[name][:3] == stat[:3] else stat for name, stat in parent.stats.items()}


def _carry(
    parent: Parent, name: str, store: Store, memory: Memory, settings: Settings
) -> tuple[FileRecord, list[str]]:
    """The record of a file that is passed on as it is, and its name if it had to be copied."""
    if record := _carried_before(parent, name, store.out, memory, settings):
        return record, []
    source, staged, stat = parent.folder / name, store.staging / name, parent.stats[name]
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with Sink(staged, stat[0]) as sink:
        for offset, chunk in chunks_of(source, stat):
            sink.write(chunk, offset)
            digest.update(chunk)
    return FileRecord(stat[0], digest.hexdigest()), [name]


def _carried_before(
    parent: Parent, name: str, out: Path, memory: Memory, settings: Settings
) -> FileRecord | None:
    """The record of a carried file that is in place already, the parent's own bytes."""
    source, published = parent.folder / name, out / name
    record = memory.manifest.files.get(name) if memory.manifest else None
    if record is None or not published.is_file():
        return None
    trusted = memory.trusted(settings.paranoid)
    same_source = (
        tuple(trusted.parent.get(name, ())) == parent.stats[name] or sha256_of(source) == record.sha256
    )
    same_output = tuple(trusted.output.get(name, ())) == file_stat(published)
    return record if same_source and (same_output or sha256_of(published) == record.sha256) else None


def _receipt(
    shard: ShardPlan, made: Mapping[str, Receipt], store: Store, memory: Memory, settings: Settings
) -> Receipt:
    """The shard's receipt, new or from the manifest, with its file's sha256 if that is wanted."""
    if shard.file in made:
        receipt, folder = made[shard.file], store.staging
    else:
        receipt, folder = _receipt_before(memory.manifest, shard), store.out
    if not settings.file_digests:
        return replace(receipt, sha256=None)
    return receipt if receipt.sha256 else replace(receipt, sha256=sha256_of(folder / receipt.file))


def _receipt_before(before: Manifest | None, shard: ShardPlan) -> Receipt:
    """The receipt of a shard that is up to date, from the manifest that describes it."""
    assert before is not None, f"{shard.file} is called up to date, but there is no manifest"
    record, file = before.shards[shard.file], before.files[shard.file]
    converted = {name: before.conversions[name] for name in record.tensors if name in before.conversions}
    return Receipt(
        file=shard.file,
        key=shard.key,  # of a file that is passed on, an earlier version's may be another
        rewritten=record.rewritten,
        file_bytes=file.bytes,
        sha256=file.sha256,
        tensors=record.tensors,
        sources=record.sources,
        counts={name: conversion.counts for name, conversion in converted.items() if conversion.counts},
        repairs=tuple(repair for repair in before.repairs if repair.get("tensor") in record.tensors),
    )


def _parent_verified(prepared: Prepared, receipts: Sequence[Receipt]) -> bool:
    """Whether every byte of the parent is known to be the pinned one. Raises CheckpointError where one is not."""
    if prepared.lock is None:
        return False
    digests = _input_digests(prepared.plan.shards, receipts)
    known = [
        _is_pinned(prepared.lock, header, digests)
        for header in prepared.parent.headers
        if header.shard not in prepared.parent.replaced
    ]
    return prepared.held_by_bytes or (all(known) and len(known) == len(prepared.parent.headers))


def _is_pinned(lock: Lock, header: Header, digests: Mapping[str, str]) -> bool:
    """Whether all of a shard's tensors were read and are the pinned ones; raises CheckpointError where one is not."""
    read = {ref.name: digests[ref.name] for ref in header.tensors if ref.name in digests}
    return len(read) == len(header.tensors) and holds_tensors(lock, header.shard, read)


def _input_digests(shards: Sequence[ShardPlan], receipts: Sequence[Receipt]) -> dict[str, str]:
    """Parent tensor -> digest, for every one that was read. What was passed on has the digest of its output."""
    digests = {
        piece.source.name: receipt.tensors[piece.ref.name]
        for shard, receipt in zip(shards, receipts, strict=True)
        for piece in shard.pieces
        if piece.part == "bytes"
    }
    for receipt in receipts:
        digests.update(receipt.sources)
    return digests


def _source_block(action: Conversion) -> tuple[int, int] | None:
    return (action.source_block.rows, action.source_block.cols) if isinstance(action, Reblock) else None


def _manifest(
    prepared: Prepared, settings: Settings, files: Mapping[str, FileRecord], receipts: Sequence[Receipt]
) -> Manifest:
    plan = prepared.plan
    counts = {name: counted for receipt in receipts for name, counted in receipt.counts.items()}
    return Manifest(
        plan_key=plan.key,
        parent={"repository": plan.repository, "revision": plan.revision},
        parent_verified=_parent_verified(prepared, receipts),
        recipe=RecipeRecord(plan.recipe, prepared.checkpoint.recipe.texts),
        numerics=plan.numerics,
        algorithms=manifest_algorithms(FILE_ALGORITHM if settings.file_digests else NO_FILE_ALGORITHM),
        files=files,
        shards={
            receipt.file: ShardRecord(receipt.key, receipt.rewritten, receipt.tensors, receipt.sources)
            for receipt in receipts
        },
        conversions={
            name: ConversionRecord(
                family,
                action.numerics,
                (action.block.rows, action.block.cols),
                counts.get(name, {}),
                _source_block(action),
            )
            for name, (family, action) in plan.conversions.items()
        },
        families=plan.families,
        dropped=plan.dropped,
        renamed=plan.renamed,
        repairs=(*plan.repairs, *(repair for receipt in receipts for repair in receipt.repairs)),
    )
