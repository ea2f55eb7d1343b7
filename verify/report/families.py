"""The families of the recipe, as the checkpoint itself tells them.

Its README is the one published place for the kept families and why they were kept. Where that is lost or edited, the
manifest still names the converted ones.
Law: `families_of(child_readme(..., families, ...))` gives back those families that have tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass

from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.types import README_FILE, SCALE_SUFFIXES
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.source import read

_ROW = re.compile(
    r"\| (?P<name>.+) \| (?P<tensors>\d+) \| (?P<action>\S+) \| (?:\[(?P<rows>\d+),(?P<cols>\d+)\])? "
    r"\| (?P<before>\d+) \| (?P<after>\d+) \| (?P<scales>\d+) \|"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of one family. Bytes are of tensor data; those before are None where nothing tells them."""

    name: str
    action: str
    reason: str | None
    tensors: int
    bytes_before: int | None
    bytes_after: int  # scales left out
    scale_bytes: int
    block: tuple[int, int] | None


def families_told(checkpoint: Checkpoint, manifest: Manifest) -> tuple[Told, ...]:
    """All families, if the README is still the one that was built; else none."""
    record = manifest.files.get(README_FILE)
    if record is None or checkpoint.files.get(README_FILE) != record.bytes:
        return ()
    readme = read(checkpoint.source, README_FILE, 0, record.bytes)
    return families_of(readme.decode()) if hashlib.sha256(readme).hexdigest() == record.sha256 else ()


def families_of(readme: str) -> tuple[Told, ...]:
    """Every family in the README's table, in its order, with the reason where one is given; none if it has no table."""
    lines = readme.splitlines()
    return tuple(_told(row, lines) for line in lines if (row := _ROW.fullmatch(line)))


def _told(row: re.Match[str], lines: list[str]) -> Told:
    front = f"- {row['name']}: "
    return Told(
        name=row["name"],
        action=row["action"],
        reason=next((line.removeprefix(front) for line in lines if line.startswith(front)), None),
        tensors=int(row["tensors"]),
        bytes_before=int(row["before"]),
        bytes_after=int(row["after"]),
        scale_bytes=int(row["scales"]),
        block=(int(row["rows"]), int(row["cols"])) if row["rows"] else None,
    )


def families_converted(
    checkpoint: Checkpoint, manifest: Manifest, origin: Checkpoint | None
) -> tuple[Told, ...]:
    """What the manifest and the headers alone tell: the families that were converted."""
    members: dict[str, list[str]] = defaultdict(list)
    for name, conversion in manifest.conversions.items():
        members[conversion["family"]].append(name)
    before = {new: old for old, new in manifest.renamed.items()}
    return tuple(
        Told(
            name=family,
            action="convert",
            reason=None,
            tensors=len(names),
            bytes_before=sum(_bytes(origin, before.get(name, name)) for name in names) if origin else None,
            bytes_after=sum(_bytes(checkpoint, name) for name in names),
            scale_bytes=sum(_bytes(checkpoint, name + end) for name in names for end in SCALE_SUFFIXES),
            block=block_of(manifest, names[0]),
        )
        for family, names in sorted(members.items())
    )


def block_of(manifest: Manifest, name: str) -> tuple[int, int]:
    rows, cols = manifest.conversions[name]["block"]
    return rows, cols


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.tensors[name].bytes if name in checkpoint.tensors else 0
