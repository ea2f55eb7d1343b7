"""The private state of an output folder as values, and the one place where its files are parsed.

An output folder may come from a tarball or another machine, so its state is hostile input: a name that leads out of
the folder is refused, and a file of another form counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.records import Manifest, Receipt, leads_outside
from shardmill.pipeline.types import Stat

_STATE_BYTES_MAX = 1 << 28
_STAT_NUMBERS = 4
_NUMBER_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class StatCache:
    """The stats of files whose bytes the manifest describes, as they were when those bytes were judged."""

    parent: Mapping[str, Stat] = field(default_factory=dict)
    output: Mapping[str, Stat] = field(default_factory=dict)
    # Digest of everything that the build depended on (shardmill.pipeline.run.unchanged); "" where it can't be known.
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """A shard that is complete in the staging folder, and the stats under which that was so."""

    receipt: Receipt
    stat: Stat  # of the staged file
    inputs: Mapping[str, Stat]  # of the parent's files that it was made from


@dataclass(frozen=True)
class Memory:
    """What an output folder held when a build began: the earlier checkpoint, and what an interrupted build left."""

    place: str  # of the manifest, for its errors
    manifest_text: bytes | None
    stats: StatCache
    staged: Mapping[str, Staged]  # file -> each shard that is complete in the staging folder

    @cached_property
    def manifest(self) -> Manifest | None:
        """Parsed when it is first asked for. Raises CheckpointError where it is no manifest."""
        return None if self.manifest_text is None else Manifest.from_json(self.manifest_text, self.place)

    def trusted(self, paranoid: bool) -> StatCache:
        """The stats under which a file need not be read; none for a paranoid build."""
        return StatCache() if paranoid else self.stats

    @property
    def published(self) -> set[str]:
        """Files of the earlier checkpoint. Without a manifest the stats still name them."""
        return set(self.manifest.files if self.manifest else self.stats.output)


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of ours; an empty one where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > _STATE_BYTES_MAX:
            return {}
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_stats(fields: Mapping[str, Any], path: Path) -> StatCache:
    """The StatCache in `fields`; entries of another form are left out. `path` is the file's, for the error."""
    fingerprint = fields.get("fingerprint")
    output = _stats(fields.get("output"))
    refuse_outside(output, path)
    return StatCache(
        _stats(fields.get("parent")), output, fingerprint if isinstance(fingerprint, str) else ""
    )


def parse_staged(fields: Mapping[str, Any]) -> Staged | None:
    """The Staged in `fields`; None where they have another form."""
    try:
        receipt = Receipt.parse(fields["receipt"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    stat = _stat(fields.get("staged"))
    return Staged(receipt, stat, _stats(fields.get("inputs"))) if stat else None


def staged_fields(staged: Staged) -> dict[str, Any]:
    """What parse_staged reads."""
    inputs = {name: list(stat) for name, stat in staged.inputs.items()}
    return {"receipt": staged.receipt.as_json(), "staged": list(staged.stat), "inputs": inputs}


def refuse_outside(names: Iterable[object], path: Path) -> None:
    """Raises BuildError where a name read from `path` is none of a file inside the output folder."""
    if outside := [name for name in names if leads_outside(name)]:
        raise BuildError(
            f"{path}: names {outside[0]!r}, which leads out of the folder; "
            f"another program wrote it, delete {path.parent} to build anew"
        )


def _stats(value: object) -> dict[str, Stat]:
    if not isinstance(value, dict):
        return {}
    return {name: stat for name, numbers in value.items() if (stat := _stat(numbers))}


def _stat(value: object) -> Stat | None:
    if not isinstance(value, list) or len(value) != _STAT_NUMBERS:
        return None
    if not all(type(number) is int and 0 <= number < _NUMBER_LIMIT for number in value):
        return None
    size, mtime, inode, ctime = value
    return size, mtime, inode, ctime
