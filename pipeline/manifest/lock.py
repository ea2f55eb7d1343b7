"""The lock beside a recipe: which bytes the parent's published revision has. `shardmill pin` writes it.

A build holds its parent to the lock at next to no cost: a shard's tensor digests are computed anyway while it is
read, and the lock knows what they come to; only tensors that are dropped are read for it. Where the lock was taken
from a download's metadata alone, sizes and headers are compared, and the sha256 of what is passed on whole, unless the
build is paranoid. shardmill.pipeline.run.pin reads the files for both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TENSOR_ALGORITHM, key_of

LOCK_FORMAT = "shardmill/lock/1"
# What each digest in a lock is, and whether it holds against somebody who wants two files to have the same.
DIGESTS = {
    "sha256": {"of": "the file", "algorithm": "sha256", "cryptographic": True},
    "header": {"of": "the shard's header", "algorithm": "sha256", "cryptographic": True},
    "tensors": {
        "of": "the digests of the shard's tensors",
        "algorithm": TENSOR_ALGORITHM,
        "cryptographic": False,
    },
}
NOT_PINNED = (
    "give the parent that was pinned with --parent, fetch the file again, or pin this one (`shardmill pin`)"
)


@dataclass(frozen=True, slots=True)
class LockedFile:
    """Size and sha256 of a parent's file; of a shard also the sha256 of its header, and the digest of its tensors'
    digests, if it was read. A lock that was taken from a build has no sha256 of the files that the build rewrote: it
    read them in another order than theirs.
    """

    bytes: int
    sha256: str | None = None
    tensors: str | None = None
    header: str | None = None

    def __post_init__(self) -> None:
        if self.sha256 is None and self.tensors is None:
            raise ValueError("a file has neither a sha256 nor the digest of its tensors")


@dataclass(frozen=True, slots=True)
class Lock:
    """Every file of a parent's revision that a build reads; those of other checkpoints are called `source:file`."""

    repository: str | None
    revision: str | None
    files: Mapping[str, LockedFile]
    sources: Mapping[str, tuple[str | None, str | None]] = field(
        default_factory=dict
    )  # -> repository, revision

    def to_json(self) -> bytes:
        files = {
            name: {"bytes": f.bytes}
            | ({"sha256": f.sha256} if f.sha256 else {})
            | ({"tensors": f.tensors} if f.tensors else {})
            | ({"header": f.header} if f.header else {})
            for name, f in sorted(self.files.items())
        }
        body = {
            "format": LOCK_FORMAT,
            "repository": self.repository,
            "revision": self.revision,
            "digests": DIGESTS,
            "files": files,
            **(
                {"sources": {name: list(said) for name, said in self.sources.items()}} if self.sources else {}
            ),
        }
        return (json.dumps(body, indent=1) + "\n").encode()


def lock_path(recipe: Path) -> Path:
    """`pipeline.toml` -> `pipeline.lock`."""
    return recipe.with_suffix(".lock")


def load_lock(path: Path) -> Lock | None:
    """The lock at `path`, None where there is none; raises CheckpointError where it is not a lock."""
    if not path.exists():
        return None
    try:
        body = json.loads(read_regular(path))
        if body["format"] != LOCK_FORMAT:
            raise ValueError(f"its format is not {LOCK_FORMAT}")
        files = {name: LockedFile(**fields) for name, fields in body["files"].items()}
        sources = {name: (said[0], said[1]) for name, said in body.get("sources", {}).items()}
        return Lock(body["repository"], body["revision"], files, sources)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: not a lock of this version ({error}); run `shardmill pin` again"
        ) from None


def tensors_digest(digests: Mapping[str, str]) -> str:
    """One digest of a shard's tensor digests."""
    return key_of(dict(digests))


def holds_tensors(lock: Lock, shard: str, digests: Mapping[str, str]) -> bool:
    """Whether the bytes read from the parent's `shard` are the pinned ones; False where the lock can't tell.

    Raises CheckpointError where they are not.
    """
    pinned = lock.files[shard].tensors
    if pinned is None:
        return False
    if tensors_digest(digests) != pinned:
        raise CheckpointError(f"{shard}: its tensors are not those that were pinned; {NOT_PINNED}")
    return True


def refuse_other_sha256(lock: Lock, file: str, sha256: str) -> None:
    """Raises CheckpointError where the parent's `file` has another sha256 than the pinned one."""
    if lock.files[file].sha256 not in (None, sha256):
        raise CheckpointError(
            f"{file}: its sha256 is not the pinned one ({lock.files[file].sha256}); {NOT_PINNED}"
        )


def lock_facts(lock: Lock) -> dict[str, Any]:
    """What a pin came to, for the command's last line."""
    return {
        "files": len(lock.files),
        "bytes": sum(file.bytes for file in lock.files.values()),
        "computed": sum(file.tensors is not None for file in lock.files.values()),
        "without_sha256": sum(file.sha256 is None for file in lock.files.values()),
    }
