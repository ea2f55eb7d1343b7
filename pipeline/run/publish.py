"""Publishing: the small files and the manifest are staged beside the shards, then all appear at once.

What is already in place with the right bytes is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmill.pipeline.actions import Conversion, Reblock
from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.filesystem import stat_or_none
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import FILE_ALGORITHM, NO_FILE_ALGORITHM
from shardmill.pipeline.manifest.lock import Lock, holds_tensors, refuse_other_sha256
from shardmill.pipeline.manifest.records import (
    MANIFEST_FILE,
    ConversionRecord,
    FileRecord,
    Manifest,
    Receipt,
    RecipeRecord,
    ShardRecord,
    SourceRecord,
    manifest_algorithms,
)
from shardmill.pipeline.manifest.state import Memory, Staged, StatCache
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run.digests import sha256_of, some_tensors_of, steadily
from shardmill.pipeline.run.lossless import losses
from shardmill.pipeline.run.resume import holds_receipt
from shardmill.pipeline.stages.census import words
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

SIGNATURES = ("model.sig", "provenance.intoto.json", "provenance.intoto.jsonl")  # what `verify sign` writes


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing came to."""

    written: tuple[str, ...]  # every file that was written anew
    files: tuple[str, ...]  # every file that the manifest describes
    stats: StatCache  # of the files that the new manifest describes; no fingerprint yet
    odd: tuple[str, ...] = ()  # a sentence for each tensor that holds NaN, Inf or nothing but zeros


@dataclass(frozen=True, slots=True)
class Placed:
    """A file of the new checkpoint: its record, and the Stat under which its bytes were found to be that."""

    record: FileRecord
    stat: Stat
    is_new: bool  # it is in the staging folder, not in place


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
        placed[name] = _placed_small(store, name, data)
    for name in plan.carried:
        placed[name] = _carry(prepared.parent, name, store, memory, settings)
    files = {name: each.record for name, each in placed.items()}
    manifest = manifest_of(prepared, settings, files, receipts)
    all_placed = {**placed, MANIFEST_FILE: _placed_small(store, MANIFEST_FILE, manifest.to_json())}
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


def _placed_small(store: Store, name: str, data: bytes) -> Placed:
    """A file of these bytes, staged if it is not in place already."""
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    stat = stat_or_none(store.out / name)
    if stat and _is_published(store.out / name, data):
        return Placed(record, stat, is_new=False)
    store.stage(name, data)
    return Placed(record, file_stat(store.staging / name), is_new=True)


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


def stale_beside_shards(prepared: Prepared, out: Path, memory: Memory, settings: Settings) -> tuple[str, ...]:
    """The files beside the shards that a build would write anew: config, README, index, and what is carried."""
    plan = prepared.plan
    small = small_files(plan, index_bytes(plan.weight_map, plan.tensor_bytes))
    carried = (
        name for name in plan.carried if _carried_before(prepared.parent, name, out, memory, settings) is None
    )
    return (*(name for name, data in small.items() if not _is_published(out / name, data)), *carried)


def small_files(plan: Plan, index: bytes) -> dict[str, bytes]:
    """Name -> content of the files that are made from the plan; an index only beside many shards."""
    small = {CONFIG_FILE: plan.config, README_FILE: plan.readme, **plan.beside}
    return small if plan.single else {**small, INDEX_FILE: index}


def _is_published(published: Path, data: bytes) -> bool:
    return published.is_file() and published.stat().st_size == len(data) and read_regular(published) == data


def _carry(parent: Parent, name: str, store: Store, memory: Memory, settings: Settings) -> Placed:
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


def receipt_before(before: Manifest | None, shard: ShardPlan) -> Receipt:
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
        values={name: odd for name, odd in before.values.items() if name in record.tensors},
    )


def _parent_verified(prepared: Prepared, receipts: Sequence[Receipt]) -> bool:
    """Whether every byte of the parent is known to be the pinned one. Raises CheckpointError where one is not."""
    lock, parent = prepared.lock, prepared.parent
    if lock is None:
        return False
    digests = input_digests(prepared.plan.shards, receipts)
    whole = {receipt.file: receipt.sha256 for receipt in receipts if not receipt.rewritten}
    known = [
        parent.consumed[header.shard]
        if header.shard in parent.consumed
        else is_pinned(lock, header, digests, whole.get(header.shard), parent)
        for header in parent.headers
        if header.shard not in parent.replaced
    ]
    held = prepared.held_by_bytes and all(parent.consumed.values())
    return held or (all(known) and len(known) == len(parent.headers))


def is_pinned(
    lock: Lock, header: Header, digests: Mapping[str, str], sha256: str | None, parent: Parent
) -> bool:
    """Whether a shard of the parent is the pinned one, byte for byte; raises CheckpointError where it is not.

    sha256: of the whole file, where it was passed on. Tensors that nothing needed to read are read for this.
    """
    if sha256 is not None and lock.files[header.shard].sha256:
        refuse_other_sha256(lock, header.shard, sha256)
        return True
    if lock.files[header.shard].tensors is None:
        return False
    pinned = parent.pinned(header)
    unread = [ref for ref in pinned if ref.name not in digests]
    read = {ref.name: digests[ref.name] for ref in pinned if ref.name in digests}
    if unread:
        read |= some_tensors_of(parent.path(header.shard), header, unread, parent.stats[header.shard])
    return holds_tensors(lock, header.shard, {parent.own_name(name): digest for name, digest in read.items()})


def input_digests(shards: Sequence[ShardPlan], receipts: Sequence[Receipt]) -> dict[str, str]:
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


def manifest_of(
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
                plan.units[name],
                counts.get(name, {}),
                _source_block(action),
            )
            for name, (family, action) in plan.conversions.items()
        },
        families=plan.families,
        dropped=plan.dropped,
        renamed=plan.renamed,
        repairs=(*plan.repairs, *(repair for receipt in receipts for repair in receipt.repairs)),
        values=odd_values(receipts),
        sources={name: _source_record(name, plan) for name in plan.sources},
    )


def _source_record(source: str, plan: Plan) -> SourceRecord:
    taken = {name: origin.name for name, origin in plan.origins.items() if origin.source == source}
    return SourceRecord(*plan.sources[source], taken)


def odd_values(receipts: Sequence[Receipt]) -> dict[str, Mapping[str, int]]:
    """Output tensor -> NaN, Inf and zeros that it holds, of those that hold any."""
    return {name: odd for receipt in receipts for name, odd in receipt.values.items()}


def odd_sentences(receipts: Sequence[Receipt]) -> tuple[str, ...]:
    """A sentence for each output tensor that holds NaN, Inf or nothing but zeros."""
    return tuple(words(name, dict(each)) for name, each in sorted(odd_values(receipts).items()))


def refuse_losses(plan: Plan, receipts: Sequence[Receipt]) -> None:
    """Raises BuildError where a block of a lossless build does not decode to the parent's numbers."""
    counts = {name: each for receipt in receipts for name, each in receipt.counts.items()}
    if found := losses(plan, counts):
        raise BuildError("; ".join(map(str, found)) + "; nothing is published, since the build is lossless")


def refuse_odd(receipts: Sequence[Receipt]) -> None:
    """Raises BuildError where a strict build has NaN, Inf, a matrix of zeros or an empty tensor."""
    if found := odd_values(receipts):
        name = min(found)
        raise BuildError(
            f"{words(name, dict(found[name]))} (one of {len(found)} such tensors), and the build is strict; fix the "
            f"parent checkpoint, or leave --strict out"
        )
