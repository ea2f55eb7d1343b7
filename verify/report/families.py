"""The families of the recipe, as the checkpoint's manifest holds them.

A manifest of format 1 has no families; it still names the converted weights, and with the headers what they take.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.manifest import Manifest

_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # DeepSeek's and compressed-tensors'


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What is known of one family. Bytes are of tensor data; those before are None where nothing holds them."""

    name: str
    action: str
    reason: str | None
    tensors: int
    bytes_before: int | None
    bytes_after: int  # scales left out
    scale_bytes: int
    block: tuple[int, int] | None


def families_recorded(manifest: Manifest) -> tuple[FamilyFacts, ...]:
    """Every family of the manifest that has tensors, in the recipe's order; none of format 1."""
    return tuple(
        FamilyFacts(
            name=family.name,
            action=family.action,
            reason=family.reason,
            tensors=family.tensors,
            bytes_before=family.bytes_before,
            bytes_after=family.bytes_after,
            scale_bytes=family.scale_bytes,
            block=family.block,
        )
        for family in manifest.families
        if family.tensors
    )


def families_converted(
    checkpoint: Checkpoint, manifest: Manifest, origin: Checkpoint | None
) -> tuple[FamilyFacts, ...]:
    """What conversions and headers alone tell: the families that were converted."""
    members: dict[str, list[str]] = defaultdict(list)
    for name, conversion in manifest.conversions.items():
        members[conversion.family].append(name)
    before = {new: old for old, new in manifest.renamed.items()}
    return tuple(
        FamilyFacts(
            name=family,
            action="convert",
            reason=None,
            tensors=len(names),
            bytes_before=sum(_bytes(origin, before.get(name, name)) for name in names) if origin else None,
            bytes_after=sum(_bytes(checkpoint, name) for name in names),
            scale_bytes=sum(_bytes(checkpoint, name + end) for name in names for end in _SCALE_SUFFIXES),
            block=manifest.conversions[names[0]].block,
        )
        for family, names in sorted(members.items())
    )


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.tensors[name].bytes if name in checkpoint.tensors else 0
