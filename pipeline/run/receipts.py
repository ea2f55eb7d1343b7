"""What the receipts of all shards of a build say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.records import Manifest, Receipt
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run.lossless import losses
from shardmill.pipeline.stages.census import words


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
