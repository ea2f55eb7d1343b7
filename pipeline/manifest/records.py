"""Receipt and Manifest: what was made from what. No time, host, path or duration stands in either.

Law: `Manifest.from_json(m.to_json()) == m`, and `to_json` is canonical, so equal manifests have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TENSOR_ALGORITHM, canonical, key_of

MANIFEST_FORMAT = "shardmill/manifest/1"
MANIFEST_FILE = "shardmill.manifest.json"

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one shard turned out to be."""

    file: str
    key: str  # of the ShardPlan that it fulfils
    rewritten: bool
    file_bytes: int
    sha256: str | None
    tensors: Mapping[str, str]  # output tensor -> digest of its data
    sources: Mapping[str, str]  # parent tensor -> digest, for those whose bytes were changed
    counts: Mapping[str, Counts] = field(default_factory=dict)  # weight -> what its numerics counted
    repairs: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> bytes:
        return canonical(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Receipt:
        fields = json.loads(text)
        fields["repairs"] = tuple(fields["repairs"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and sha256 of a published file; the sha256 is None where none was wanted."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A receipt as the manifest keeps it; size and sha256 stand under `files`."""

    key: str
    rewritten: bool
    tensors: Mapping[str, str]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that can be proven about a published checkpoint, written beside it."""

    plan_key: str
    parent: Mapping[str, str | None]  # repository, revision
    parent_verified: bool
    recipe: str
    numerics: tuple[str, ...]
    algorithms: Mapping[str, str]
    files: Mapping[str, FileRecord]
    shards: Mapping[str, ShardRecord]
    conversions: Mapping[str, Mapping[str, Any]]
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    repairs: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> bytes:
        body = {
            "format": MANIFEST_FORMAT,
            "plan_key": self.plan_key,
            "parent": dict(self.parent),
            "parent_verified": self.parent_verified,
            "recipe": self.recipe,
            "numerics": sorted(self.numerics),
            "algorithms": dict(self.algorithms),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in self.files.items()},
            "shards": {name: _shard_fields(shard) for name, shard in self.shards.items()},
            "conversions": {name: dict(facts) for name, facts in self.conversions.items()},
            "dropped": sorted(self.dropped),
            "renamed": dict(self.renamed),
            "repairs": [dict(repair) for repair in self.repairs],
        }
        return canonical({**body, "self": key_of(body)})

    @classmethod
    def from_json(cls, text: bytes, origin: str = MANIFEST_FILE) -> Manifest:
        """Reads a manifest; raises CheckpointError where it is not one, or not the one that it was."""
        try:
            body = json.loads(text)
            claimed = body.pop("self")
            if body.pop("format") != MANIFEST_FORMAT:
                raise ValueError(f"its format is not {MANIFEST_FORMAT}")
            body["numerics"], body["dropped"] = tuple(body["numerics"]), tuple(body["dropped"])
            body["repairs"] = tuple(body["repairs"])
            body["files"] = {name: FileRecord(**fields) for name, fields in body["files"].items()}
            body["shards"] = {name: ShardRecord(**fields) for name, fields in body["shards"].items()}
            if outside := [name for name in body["files"] if _leads_outside(name)]:
                raise ValueError(f"it names {outside[0]!r}, which leads out of the folder")
            manifest = cls(**body)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{origin}: not a manifest of this version ({error}); delete it to build anew"
            ) from error
        if json.loads(manifest.to_json())["self"] != claimed:
            raise CheckpointError(f"{origin}: was edited since it was written; delete it to build anew")
        return manifest

    def input_digest(self, shard: str, tensor: str) -> str | None:
        """Digest of the parent's `tensor` that went into output file `shard`.

        A tensor that was passed on has the digest of its output; the changed ones are listed apart.
        """
        record = self.shards[shard]
        return record.sources.get(tensor) or record.tensors.get(self.renamed.get(tensor, tensor))


def _leads_outside(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts


def _shard_fields(shard: ShardRecord) -> dict[str, Any]:
    return {
        "key": shard.key,
        "rewritten": shard.rewritten,
        "tensors": dict(shard.tensors),
        "sources": dict(shard.sources),
    }


def manifest_algorithms(file_algorithm: str) -> dict[str, str]:
    return {"tensor": TENSOR_ALGORITHM, "file": file_algorithm}
