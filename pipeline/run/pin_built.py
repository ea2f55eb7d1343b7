"""What a build knows of the parent that it has read: a lock taken from it reads nothing again.

What was passed on has its output's sha256. What was rewritten was read tensor by tensor, in the output's order, so of
its file there is the digest of its tensors' digests, which is not cryptographic, and the sha256 of its header.
"""

from __future__ import annotations

from pathlib import Path

from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.lock import LockedFile, tensors_digest
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.run.digests import some_tensors_of
from shardmill.pipeline.run.receipts import input_digests, receipt_before
from shardmill.pipeline.stages.job import Prepared


def read_by_build(out: Path, prepared: Prepared) -> dict[str, LockedFile]:
    """Shard of the parent -> what the build in `out` found it to be, of those that are still as they were then.

    Tensors that the build dropped are read here. Raises CheckpointError where `out` holds no finished build of the
    plan.
    """
    memory, plan, parent = Store(out).load(), prepared.plan, prepared.parent
    if memory.manifest is None or memory.manifest.plan_key != plan.key:
        what = "no finished build" if memory.manifest is None else "the build of another recipe or parent"
        raise CheckpointError(f"{out}: holds {what}; build it with this recipe from this parent first")
    receipts = [receipt_before(memory.manifest, shard) for shard in plan.shards]
    digests = input_digests(plan.shards, receipts)
    whole = {receipt.file: receipt.sha256 for receipt in receipts if not receipt.rewritten}
    found = {}
    for header in parent.headers:
        path, stat = parent.path(header.shard), parent.stats[header.shard]
        if memory.stats.parent.get(header.shard) != stat or header.shard in parent.replaced:
            continue
        refs = parent.pinned(header)
        unread = [ref for ref in refs if ref.name not in digests]
        read = {**digests, **(some_tensors_of(path, header, unread, stat) if unread else {})}
        own = {parent.own_name(ref.name): read[ref.name] for ref in refs}
        sha256 = None if header.shard in parent.others else whole.get(header.shard)
        found[header.shard] = LockedFile(stat[0], sha256, tensors_digest(own), header.digest)
    return found
