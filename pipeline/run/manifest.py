"""The manifest of a build, and whether every byte of its parent is the pinned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmill.pipeline.actions import Conversion, Reblock
from shardmill.pipeline.manifest.digest import FILE_ALGORITHM, NO_FILE_ALGORITHM
from shardmill.pipeline.manifest.lock import Lock, holds_tensors, refuse_other_sha256
from shardmill.pipeline.manifest.records import (
    ConversionRecord,
    FileRecord,
    Manifest,
    Receipt,
    RecipeRecord,
    ShardRecord,
    SourceRecord,
    manifest_algorithms,
)
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.run.digests import some_tensors_of
from shardmill.pipeline.run.receipts import input_digests, odd_values
from shardmill.pipeline.stages.job import Prepared, Settings
from shardmill.pipeline.types import Header, Parent


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


def _source_block(action: Conversion) -> tuple[int, int] | None:
    return (action.source_block.rows, action.source_block.cols) if isinstance(action, Reblock) else None


def _source_record(source: str, plan: Plan) -> SourceRecord:
    taken = {name: origin.name for name, origin in plan.origins.items() if origin.source == source}
    return SourceRecord(*plan.sources[source], taken)


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
