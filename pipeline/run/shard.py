"""Making one shard: the stages of scope "shard" over its source and sink. The unit of work that is scheduled."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.files import Sink, Source
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import arrange
from shardmill.pipeline.stages.job import Products, Settings, ShardJob, Watch, Worker
from shardmill.pipeline.types import Parent, Stat


@dataclass(frozen=True, slots=True)
class Input:
    """A file of the parent that making a shard reads."""

    path: Path
    stat: Stat
    data_begin: int


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
    def input_bytes(self) -> int:
        """Bytes that the progress of this task comes to."""
        return sum(each.stat[0] for each in self.inputs)


@dataclass(frozen=True, slots=True)
class StagedShard:
    """A shard whose bytes are all written, but may not be on the disk yet. It must be settled."""

    receipt: Receipt
    path: Path  # in the staging folder, under a name that no other staged has
    whole: Path  # its place there once it is on the disk
    file: ExitStack  # holds it open; to close it is to wait for the disk


def input_bytes(parent: Parent, shard: ShardPlan) -> int:
    """Bytes of the parent's files that making `shard` reads."""
    return sum(parent.stats[file][0] for file in shard.inputs)


def fill(task: ShardTask, watch: Watch, worker: Worker) -> StagedShard:
    """Runs the shard stages of the DAG over one shard. The caller finishes the StagedShard, which holds a file open."""
    store, dag = Store(task.out), arrange(task.dag_needs, STAGES)
    whole = store.staging / task.plan.file
    staged = whole.with_name(f"{whole.name}.{secrets.token_hex(4)}")
    linked = task.settings.passthrough == "hardlink"
    with ExitStack() as written, ExitStack() as read:
        opened = {
            shard: (read.enter_context(Source(each.path, each.stat, linked, task.once)), each.data_begin)
            for shard, each in zip(task.plan.inputs, task.inputs, strict=True)
        }
        sink = written.enter_context(Sink(staged, task.plan.header.file_bytes, task.once))
        if task.plan.rewritten:
            sink.reserve()
        source, data_begin = opened[task.plan.inputs[0]]
        job = ShardJob(task.plan, source, sink, task.settings, worker, watch, data_begin, opened)
        products = dag.run("shard", dag.of_shards(), job, Products(pieces=task.plan.pieces))
        read.close()  # which tells of a source that changed, before the sink is let go
        return StagedShard(products["receipt"], staged, whole, written.pop_all())


def finish_shard(staged: StagedShard, task: ShardTask) -> Receipt:
    """Waits for the disk; the shard's file and receipt are there when this returns.

    The file gets its name when it is whole: a worker of a cluster that was given up for dead may be at the same shard
    still, and no receipt may ever stand beside a file that is half made.
    """
    staged.file.close()
    staged.path.replace(staged.whole)
    Store(task.out).keep_receipt(staged.receipt)
    return staged.receipt


def make_shard(task: ShardTask, watch: Watch, worker: Worker) -> Receipt:
    """Makes one shard from the first byte to the last."""
    return finish_shard(fill(task, watch, worker), task)
