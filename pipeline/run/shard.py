"""Making one shard: the stages of scope "shard" over its source and sink. The unit of work that is scheduled."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardmill.pipeline.container.files import Nowhere, Sink, Source
from shardmill.pipeline.container.filesystem import replace
from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import Counts, Receipt
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Piece, ShardPlan
from shardmill.pipeline.run.digests import steadily, tensors_in
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import Dag, arrange
from shardmill.pipeline.stages.job import Products, Settings, ShardJob, Watch, Worker
from shardmill.pipeline.types import Parent, Stat, TensorRef

_NAME_SHOWN = 48  # letters of a file's name, in that under which it is made


@dataclass(frozen=True, slots=True)
class Input:
    """A file of the parent that making a shard reads."""

    path: Path
    stat: Stat
    data_begin: int
    header: str  # its digest


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Everything that making one shard needs; can be sent to another process."""

    plan: ShardPlan
    dag_needs: Mapping[str, tuple[str, ...]]
    inputs: tuple[Input, ...]  # as the plan's: the shard's own file first
    out: Path
    settings: Settings
    once: bool = False  # the build is larger than the memory: keep none of its bytes in the page cache

    @property
    def dag(self) -> Dag:
        return arrange(self.dag_needs, STAGES)

    @property
    def input_bytes(self) -> int:
        """Bytes that the progress of this task comes to."""
        return sum(each.stat[0] for each in self.inputs)


@dataclass(frozen=True, slots=True)
class StagedShard:
    """A shard whose bytes are all written, but may not be on the disk yet. It must be finished."""

    receipt: Receipt
    inputs: Mapping[str, Stat]  # the parent's files that it was made from, as they were then
    path: Path  # in the staging folder, under a name that no other staged has
    whole: Path  # its place there once it is on the disk
    file: ExitStack  # holds it open; to close it is to wait for the disk


def input_bytes(parent: Parent, shard: ShardPlan) -> int:
    """Bytes that making `shard` reads: the parent's files, and of other checkpoints' files what is taken."""
    taken = {
        ref
        for piece in shard.pieces
        for ref in (piece.source, piece.scales, *piece.reads)
        if ref and ref.shard in parent.others
    }
    return sum(parent.stats[file][0] for file in shard.inputs if file not in parent.others) + sum(
        ref.bytes for ref in taken
    )


def fill(task: ShardTask, watch: Watch, worker: Worker) -> StagedShard:
    """Runs the shard stages of the DAG over one shard. The caller finishes the StagedShard, which holds a file open."""
    staged = _new_place(task)
    with ExitStack() as written:
        sink = written.enter_context(Sink(staged, task.plan.header.file_bytes, task.once))
        if task.plan.rewritten:
            sink.reserve()
        products = Products(pieces=task.plan.pieces)
        made, stats = _run(task, task.dag.of_shards(), products, sink, watch, worker)
        return StagedShard(made["receipt"], stats, staged, _whole(task), written.pop_all())


def count_blocks(task: ShardTask, watch: Watch, worker: Worker) -> dict[str, Counts]:
    """Weight -> how many blocks it has and how many are exact, of each that is encoded; nothing is written."""
    names = [name for name in task.dag.of_shards() if name in ("quantize", "convert")]
    pieces = task.plan.pieces
    made, _ = _run(task, names, Products(pieces=pieces), Nowhere(), watch, worker)
    found = {name: each.counts for name, each in made.get("codes", {}).items()}
    return found | {name: each.counts for name, each in made.get("converted", {}).items() if each.counts}


def begin_shared(task: ShardTask) -> Path:
    """Makes the file of a shard that several workers will fill, and returns its place."""
    staged = _new_place(task)
    with Sink(staged, task.plan.header.file_bytes, sync=False) as sink:
        sink.reserve()
    return staged


@dataclass(frozen=True, slots=True)
class Portion:
    """Some pieces of a shard, or of one weight's pieces some rows: what one of several workers makes."""

    pieces: tuple[Piece, ...]
    rows: tuple[int, int] | None = None


def fill_part(
    task: ShardTask, portions: Sequence[Portion], staged: Path, watch: Watch, worker: Worker
) -> Products:
    """What the stages that go piece by piece make of some portions; their bytes are in the file at `staged`."""
    made: dict[str, Any] = {}
    with Sink(staged, task.plan.header.file_bytes, anew=False, sync=False) as sink:
        for portion in portions:
            pieces = Products(pieces=portion.pieces)
            products, _ = _run(task, task.dag.by_piece(), pieces, sink, watch, worker, portion.rows)
            del products["pieces"]
            _add(made, products)
    return cast(Products, made)


def _add(made: dict[str, Any], products: Products) -> None:
    """Adds what one portion gave to what others did: rows of one weight are joined."""
    for name, product in products.items():
        known = made.setdefault(name, {})
        for key, value in cast(dict[str, Any], product).items():
            known[key] = known[key].joined(value) if key in known else value


def fill_rest(
    task: ShardTask, parts: Sequence[Products], staged: Path, watch: Watch, worker: Worker
) -> StagedShard:
    """Runs the other stages over a shard of which `parts` are done."""
    made: dict[str, Any] = {"pieces": task.plan.pieces}
    for part in parts:
        _add(made, part)
    names = [name for name in task.dag.of_shards() if name not in task.dag.by_piece()]
    with ExitStack() as written:
        sink = written.enter_context(Sink(staged, task.plan.header.file_bytes, task.once, anew=False))
        products, stats = _run(task, names, cast(Products, made), sink, watch, worker)
        return StagedShard(products["receipt"], stats, staged, _whole(task), written.pop_all())


def _run(
    task: ShardTask,
    names: Sequence[str],
    products: Products,
    sink: Sink,
    watch: Watch,
    worker: Worker,
    rows: tuple[int, int] | None = None,
) -> tuple[Products, dict[str, Stat]]:
    """Runs stages; where they make the receipt, also the Stats under which the inputs are what it tells of."""
    with ExitStack() as read:  # its end tells of a source that changed, before the sink is let go
        opened = {
            shard: (
                read.enter_context(Source(each.path, each.stat, task.once, task.settings.connections)),
                each.data_begin,
            )
            for shard, each in zip(task.plan.inputs, task.inputs, strict=True)
        }
        source, data_begin = opened[task.plan.inputs[0]]
        job = ShardJob(task.plan, source, sink, task.settings, worker, watch, data_begin, opened, rows)
        made = task.dag.run("shard", names, job, products)
    receipt = made.get("receipt")
    proven = (
        {
            shard: _proven(shard, opened[shard][0], each, task.plan, receipt)
            for shard, each in zip(task.plan.inputs, task.inputs, strict=True)
        }
        if receipt
        else {}
    )
    return made, proven


def _whole(task: ShardTask) -> Path:
    return Store(task.out).staging / task.plan.file


def _new_place(task: ShardTask) -> Path:
    whole = _whole(task)
    return whole.with_name(f"{whole.name[:_NAME_SHOWN]}.{secrets.token_hex(4)}")


def _proven(shard: str, source: Source, given: Input, plan: ShardPlan, receipt: Receipt) -> Stat:
    """The Stat under which an input's bytes are those that the receipt tells of.

    Where its ctime alone moved since its header was read, what was read of it is read again, header included. Raises
    CheckpointError where that is another now.
    """
    if not source.retouched:
        return source.stat
    wanted = {ref: digest for ref, digest in _read_from(plan, receipt) if ref.shard == shard}
    found, stat = steadily(
        source.path, source.stat, lambda again: tensors_in(again, given.data_begin, wanted)
    )
    changed = [ref.name for ref, digest in wanted.items() if found[ref.name] != digest]
    if read_header(source.path, shard).digest != given.header:
        changed.append("its header")
    if changed:
        raise CheckpointError(
            f"{source.path}: {changed[0]} changed while it was read; let its writer finish, then build again"
        )
    return stat


def _read_from(plan: ShardPlan, receipt: Receipt) -> Iterator[tuple[TensorRef, str]]:
    """The parent's tensors that a shard was made from, each with its digest."""
    for piece in plan.pieces:
        if piece.part == "bytes":
            yield piece.source, receipt.tensors[piece.ref.name]
        for ref in (piece.source, piece.scales, *piece.reads):
            if ref is not None and ref.name in receipt.sources:
                yield ref, receipt.sources[ref.name]


def finish_shard(staged: StagedShard, task: ShardTask) -> Receipt:
    """Waits for the disk; the shard's file and receipt are there when this returns.

    The file gets its name when it is whole: a worker of a cluster that was given up for dead may be at the same shard
    still, and no receipt may ever be beside a file that is half made.
    """
    staged.file.close()
    replace(staged.path, staged.whole)
    Store(task.out).keep_receipt(Staged(staged.receipt, file_stat(staged.whole), staged.inputs))
    return staged.receipt


def make_shard(task: ShardTask, watch: Watch, worker: Worker) -> Receipt:
    """Makes one shard from the first byte to the last."""
    return finish_shard(fill(task, watch, worker), task)
