"""Whether a staged shard is still the one that was made: by its stat, else by its bytes."""

from __future__ import annotations

from pathlib import Path

from shardmill.pipeline.container.filesystem import stat_or_none
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.run.digests import sha256_of, tensors_of
from shardmill.pipeline.types import Header


def is_as_staged(staging: Path, staged: Staged, paranoid: bool = False) -> bool:
    """Whether the file's stat proves that nobody wrote it since its receipt."""
    receipt = stat_or_none(staging.parent / "receipts" / f"{staged.receipt.file}.json")
    return (
        not paranoid
        and receipt is not None
        and stat_or_none(staging / staged.receipt.file) == staged.stat
        and staged.stat[3] < receipt[3]  # one clock: it had moved on, so a later write shows
    )


def holds_receipt(path: Path, header: Header, receipt: Receipt) -> bool:
    """Whether the file has this header and the bytes that its receipt tells of."""
    try:
        if (
            read_header(path, header.shard).digest != header.digest
            or tensors_of(path, header) != receipt.tensors
        ):
            return False
        return receipt.sha256 is None or sha256_of(path) == receipt.sha256
    except (CheckpointError, OSError):
        return False
