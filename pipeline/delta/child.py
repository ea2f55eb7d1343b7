"""A published checkpoint as a delta sees it: its manifest, its files with sizes, and its shards' headers when asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, STATE_FOLDER, Manifest
from shardmill.pipeline.types import Header

PRIVATE = frozenset({STATE_FOLDER, ".git", ".cache"})  # folders that are nobody's to publish


@dataclass(frozen=True)
class Child:
    """The checkpoint in `folder`. What its manifest says of its bytes is believed; sizes are compared."""

    folder: Path
    manifest_bytes: bytes

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.from_json(self.manifest_bytes, str(self.folder / MANIFEST_FILE))

    @cached_property
    def manifest_sha256(self) -> str:
        return hashlib.sha256(self.manifest_bytes).hexdigest()

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Published file -> bytes, the manifest and files beside it (a signature) included."""
        return {name: (self.folder / name).stat().st_size for name in published_names(self.folder)}

    @cached_property
    def _headers(self) -> dict[str, Header]:
        return {}

    def header(self, shard: str) -> Header:
        if shard not in self._headers:
            self._headers[shard] = read_header(self.folder / shard, shard)
        return self._headers[shard]

    def sha256(self, name: str) -> str | None:
        """What the manifest states for the file; None where it states none."""
        record = self.manifest.files.get(name)
        return record.sha256 if record else None


def open_child(folder: Path) -> Child:
    """The checkpoint in `folder`. Raises CheckpointError where it has no manifest, or not the files that it names."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path}: is missing, and a manifest is what proves a checkpoint; give a folder that `shardmill build` made"
        )
    child = Child(folder, path.read_bytes())
    for name, record in child.manifest.files.items():
        if child.sizes.get(name) != record.bytes:
            found = f"{child.sizes[name]} bytes" if name in child.sizes else "no such file"
            raise CheckpointError(
                f"{folder / name}: the manifest states {record.bytes} bytes, got {found}; "
                f"`shardmill verify integrity {folder}` tells all that is wrong"
            )
    return child


def published_names(folder: Path) -> Iterator[str]:
    """Every file of a checkpoint's folder as a relative POSIX path, sorted; state folders are left out."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in PRIVATE:
            yield name.as_posix()
