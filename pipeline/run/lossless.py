"""Whether every conversion keeps every number: each block is decoded again and counted, and none may lose anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardmill.pipeline.actions import Convert, Dequantize, QuantizeBlock, Reconcile
from shardmill.pipeline.manifest.records import Counts
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.run.schedule import task_of
from shardmill.pipeline.run.shard import count_blocks
from shardmill.pipeline.stages.job import Prepared, Settings, Watch, Worker


@dataclass(frozen=True, slots=True)
class Loss:
    """A family's blocks: how many there are, in how many a number is another after decoding, and one such weight."""

    family: str
    words: str
    weights: int
    blocks: int
    lossy: int
    first: str

    def __str__(self) -> str:
        return (
            f"family {self.family!r}: {self.lossy:,} of {self.blocks:,} blocks of {self.weights:,} weights lose "
            f"something ({self.words}), the first in {self.first}"
        )


def never_exact(plan: Plan) -> list[str]:
    """A sentence for each family whose action rounds by nature and counts no block."""
    found = {}
    for shard in plan.shards:
        for piece in shard.pieces:
            action = piece.action
            if isinstance(action, Dequantize):
                found[action.words()] = (
                    f"{piece.ref.name}: {action.words()} rounds to BF16 and counts nothing; write it as convert with "
                    f"source = 'fp8-block' and to = 'bf16', whose blocks are counted"
                )
            elif isinstance(action, Reconcile):
                found[action.words()] = (
                    f"{piece.ref.name}: {action.words()} rounds block scales again; keep it"
                )
    return list(found.values())


def losses(plan: Plan, counts: Mapping[str, Counts]) -> list[Loss]:
    """The families that lose something. counts: weight -> `blocks` and `exact_blocks`, of every one that is encoded."""
    by_family: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for name, (family, action) in plan.conversions.items():
        if isinstance(action, Convert | QuantizeBlock):
            counted = counts.get(name, {})
            blocks = counted.get("blocks", 0)
            row = (name, blocks, blocks - counted.get("exact_blocks", 0))
            by_family.setdefault((family, action.words()), []).append(row)
    return [
        Loss(
            family,
            words,
            len(rows),
            sum(blocks for _, blocks, _ in rows),
            sum(lossy for _, _, lossy in rows),
            next(name for name, _, lossy in rows if lossy),
        )
        for (family, words), rows in by_family.items()
        if any(lossy for _, _, lossy in rows)
    ]


def counted(prepared: Prepared, settings: Settings, watch: Watch) -> dict[str, Counts]:
    """Weight -> its counts, from the parent's data; nothing is written."""
    found: dict[str, Counts] = {}
    worker = Worker()
    for shard in prepared.plan.shards:
        if any(isinstance(piece.action, Convert | QuantizeBlock) for piece in shard.pieces):
            task = task_of(shard, prepared, prepared.parent.folder, settings)
            found.update(count_blocks(task, watch, worker))
    return found


def problems(prepared: Prepared, settings: Settings, watch: Watch) -> list[str]:
    """Why the plan is not lossless; empty where every block of every conversion is exact."""
    if refused := never_exact(prepared.plan):
        return refused
    return sentences(losses(prepared.plan, counted(prepared, settings, watch)))


def sentences(found: Iterable[Loss]) -> list[str]:
    return [f"{loss}; choose another format or numerics, or keep this family" for loss in found]


def uncounted(plan: Plan, before: Mapping[str, Counts]) -> Iterator[str]:
    """Files of the plan with a weight whose blocks an earlier build did not count."""
    for shard in plan.shards:
        names = {
            name
            for piece in shard.pieces
            if isinstance(piece.action, Convert | QuantizeBlock)
            for name in piece.action.mains(piece.source)
        }
        if any("exact_blocks" not in before.get(name, {}) for name in names):
            yield shard.file
