"""What a manifest says of its own checkpoint, held to the headers: numerics, files passed on, families, names, blocks.

None of it excuses a tensor from a comparison, but people read it: on the page, in the card, in the provenance. So what
the tensors contradict is a finding, with the parent's headers or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from shardmill.verify.formats.linear import Linear, grid_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.manifest import MANIFEST, Manifest
from shardmill.verify.rules.findings import Finding

PACKED_WORDS = ("int-pack", "gptq", "awq")  # whose headers alone do not show a weight's shape
GROUP_OF_32 = (1, 32)  # that MXFP4 has, and in which a cast from it is counted


def claims_faults(
    checkpoint: Checkpoint, manifest: Manifest, linears: Mapping[str, Linear]
) -> Iterator[Finding]:
    """Claims that the child's own headers contradict."""
    yield from _numerics(manifest)
    yield from _passed_on_and_changed(manifest)
    yield from _families(checkpoint, manifest)
    yield from _block_counts(manifest, linears)
    for name in manifest.odd_values - checkpoint.tensors.keys():
        yield _untrue(name, "a tensor of the checkpoint among `values`", "no such tensor")
    for name in sorted(set(manifest.renamed.values()) - checkpoint.tensors.keys()):
        yield _untrue(name, "a tensor that was renamed to this", "no such tensor")
    for name in manifest.dropped:
        if name in checkpoint.tensors and not _made_anew(name, manifest):
            yield _untrue(name, "left out, as `dropped` says", "it is here")


def claims_beside(checkpoint: Checkpoint, manifest: Manifest, parent: Checkpoint) -> Iterator[Finding]:
    """Claims that the parent's headers contradict."""
    theirs = parent.tensors.keys() | parent.elsewhere
    for name in sorted({*manifest.dropped, *manifest.renamed} - theirs):
        yield _untrue(
            name, "a tensor of the parent that was left out or renamed", "the parent has no such tensor"
        )
    if manifest.sources:
        return
    for file, shard in manifest.shards.items():
        ours, before = checkpoint.headers.get(file), parent.headers.get(file)
        if shard.rewritten or ours is None:
            continue
        placed = None if before is None else (before.tensors, before.metadata, before.data_begin)
        if placed != (ours.tensors, ours.metadata, ours.data_begin):
            got = "no such file in the parent" if before is None else "another header than the parent's"
            yield Finding("manifest-untrue", file, "", "the parent's file, passed on as it is", got)
    if manifest.families:
        told, have = sum(family.bytes_before for family in manifest.families), parent.tensor_bytes
        if told != have:
            yield _untrue("", f"{have:,} bytes in the parent's tensors", f"{told:,} in all families")


def _untrue(name: str, expected: str, got: str) -> Finding:
    return Finding("manifest-untrue", MANIFEST, name, expected, got)


def _numerics(manifest: Manifest) -> Iterator[Finding]:
    used = {conversion.numerics for conversion in manifest.conversions.values()}
    if used != set(manifest.numerics):
        expected = f"the numerics of the conversions: {', '.join(sorted(used)) or 'none'}"
        yield _untrue("", expected, ", ".join(manifest.numerics) or "none")


def _passed_on_and_changed(manifest: Manifest) -> Iterator[Finding]:
    for file, shard in manifest.shards.items():
        changed = next((name for name in shard.tensors if name in manifest.conversions), "")
        if not shard.rewritten and (changed or shard.sources):
            got = "passed on as it is, by the manifest"
            name = changed or next(iter(shard.sources))
            yield Finding("manifest-untrue", file, name, "a rewritten file, which has converted weights", got)


def _families(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Finding]:
    if not manifest.families:
        return
    named = {family.name for family in manifest.families}
    for name, conversion in manifest.conversions.items():
        if conversion.family not in named:
            yield _untrue(name, f"one of the families {', '.join(sorted(named))}", conversion.family)
    made = _bytes_made(checkpoint, manifest)
    for family in manifest.families:
        if family.name in made and family.bytes_after != made[family.name]:
            said = f"{made[family.name]:,} bytes of codes in the family {family.name}"
            yield _untrue("", said, f"{family.bytes_after:,}")
    told = sum(family.bytes_after + family.scale_bytes for family in manifest.families)
    if told != checkpoint.tensor_bytes:
        yield _untrue("", f"{checkpoint.tensor_bytes:,} bytes in all tensors", f"{told:,} in all families")


def _bytes_made(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, int]:
    """Family -> bytes of its converted weights, without their scales."""
    made: dict[str, int] = {}
    for name, conversion in manifest.conversions.items():
        weight = checkpoint.tensors.get(name)
        made[conversion.family] = made.get(conversion.family, 0) + (weight.bytes if weight is not None else 0)
    return made


def _block_counts(manifest: Manifest, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    """The number of blocks that a conversion counts: those of its shape, by its block or by the parent's of 32."""
    shapes = {
        linear.weight.name: linear.shape
        for linear in linears.values()
        if linear.weight is not None and linear.kind not in PACKED_WORDS
    }
    for name, conversion in manifest.conversions.items():
        told, shape = conversion.counts.get("blocks"), shapes.get(name, ())
        if told is None or len(shape) < 2:
            continue
        possible = {prod(grid_of(shape, block)) for block in (conversion.block, GROUP_OF_32)}
        if told not in possible:
            yield Finding("claim-false", MANIFEST, name, f"{max(possible):,} blocks", f"{told:,} blocks")


def _made_anew(name: str, manifest: Manifest) -> bool:
    """Whether a tensor of this name is a part of a converted weight: the parent's own was left out for it."""
    module = name.rpartition(".")[0]
    return any(
        weight in manifest.conversions
        for weight in (module, f"{module}.weight", f"{module}.weight_packed", f"{module}.qweight", name)
    ) or any(
        name.startswith(f"{weight}_") for weight in (f"{module}.weight",) if weight in manifest.conversions
    )
