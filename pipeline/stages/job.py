"""What stages work with: a Checkpoint for those that see the whole, a ShardJob for those that run once a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from shardmill.pipeline.container.files import Buffers, Sink, Source
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.lock import Lock
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.plan.types import Assignment, Piece, Plan, ShardPlan
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.stages.dag import Dag
from shardmill.pipeline.types import Parent, TensorRef

Passthrough = Literal["copy", "reflink", "hardlink"]


class StoppedError(BuildError):
    """The build was asked to stop."""

    def __init__(self) -> None:
        super().__init__("stopped; build again to go on where it stopped")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a build goes about it. None of these changes a byte of a weight file."""

    workers: int = 1  # processes, where there are several
    kernel: str = "auto"
    file_digests: bool = True  # sha256 of every output file
    passthrough: Passthrough = "copy"
    paranoid: bool = False  # believe no stat, hash everything again
    strict: bool = False  # refuse NaN, Inf, matrices of zeros and empty tensors
    lossless: bool = (
        False  # count each block of every conversion, and publish nothing where one loses something
    )
    scheduler: str | None = None  # address of a dask.distributed scheduler; without one, this machine
    connections: int = 8  # ranges that are asked of a hub at a time, for each shard being made


@dataclass
class Watch:
    """The thread that looks on: it hears of each byte that is done, and able to stop the work."""

    advance: Callable[[int], None] = lambda count: None
    stop: threading.Event = field(default_factory=threading.Event)

    def done(self, count: int) -> None:
        """Reports `count` more bytes of input; raises StoppedError where the build is to stop."""
        if self.stop.is_set():
            raise StoppedError
        self.advance(count)


@dataclass(frozen=True, slots=True)
class Worker:
    """What goes from shard to shard: a core, buffers, and kernels with theirs. For one thread at a time."""

    core: int | None = None  # None: wherever the system likes
    buffers: Buffers = field(default_factory=Buffers)
    kernels: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """One shard being made."""

    plan: ShardPlan
    source: Source
    sink: Sink
    settings: Settings
    worker: Worker
    watch: Watch
    source_data_begin: int  # bytes from the start of the source file to its data
    inputs: Mapping[
        str, tuple[Source, int]
    ]  # each of the parent's files that it reads, and where its data begin
    rows: tuple[int, int] | None = (
        None  # of the one weight that is to be encoded, where others do its other rows
    )

    def place(self, ref: TensorRef) -> tuple[Source, int]:
        """The file that holds a parent's tensor, and the byte of it at which its data begin."""
        source, data_begin = self.inputs[ref.shard]
        return source, data_begin + ref.begin

    def read(self, ref: TensorRef, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes [begin, end) of a parent's tensor, whichever of the inputs holds it, in new memory: so a few."""
        source, place = self.place(ref)
        data = memoryview(bytearray((ref.bytes if end is None else end) - begin))
        source.read(data, place + begin)
        return data


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Bytes of a tensor that one worker has seen in their order."""

    begin: int  # from the tensor's first byte
    bytes: int
    digest: str


Runs = tuple[Run, ...]  # of a whole tensor, in order


@dataclass(frozen=True, slots=True)
class Quantized:
    """One weight [R, C], or some rows of it, encoded: codes and scales f32 [ceil(R/r), ceil(C/c)] are in the sink."""

    codes: Runs
    scales: Runs
    source: Runs
    counts: Mapping[str, int]
    is_zero: bool = False  # every weight is zero

    def joined(self, other: Quantized) -> Quantized:
        """With other rows of the same weight."""
        return Quantized(
            tuple(sorted(self.codes + other.codes)),
            tuple(sorted(self.scales + other.scales)),
            tuple(sorted(self.source + other.source)),
            {name: count + other.counts[name] for name, count in self.counts.items()},
            self.is_zero and other.is_zero,
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """An output tensor that a stage made from the parent's quantized tensors; its bytes are in the sink."""

    digest: str
    sources: Mapping[str, str]  # parent tensor that it was made from -> digest
    repair: Mapping[str, Any] | None = None  # what the manifest tells of it, where it is a repair
    counts: Mapping[str, int] | None = None  # what was counted of the weight that it is the main part of


class Products(TypedDict, total=False):
    """What flows along the DAG, by name. Stages make all but the plan, a shard's pieces and the list of receipts."""

    parent: Parent
    assignments: tuple[Assignment, ...]
    plan: Plan
    pieces: tuple[Piece, ...]  # of one shard
    codes: dict[str, Quantized]  # weight -> what `quantize` made of it
    scales: dict[str, Runs]  # scale tensor -> digests of its data, which is in the sink and sound
    values: dict[str, Decoded]  # output tensor -> what `dequantize` made
    converted: dict[str, Decoded]  # output tensor -> what `convert` made
    repairs: dict[str, Decoded]  # output tensor -> what `reconcile` made
    receipt: Receipt  # of one shard
    receipts: Sequence[Receipt]  # in the order of the plan
    index: bytes  # model.safetensors.index.json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What stages of the whole start from: the recipe, the parent's folder, and that of each [[source]] by its name."""

    recipe: Recipe
    folder: Path
    sources: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known before a byte of data is read."""

    dag: Dag
    checkpoint: Checkpoint
    products: Products  # parent, assignments and plan
    inputs: (
        str  # digest of what the plan was made from, taken before it was (shardmill.pipeline.run.unchanged)
    )
    lock: Lock | None = None  # what the parent is held to
    held_by_bytes: bool = False  # every file of the parent was hashed and is the pinned one
    began: int = 0  # nanoseconds: when the stats of what the plan was made from were taken

    @property
    def parent(self) -> Parent:
        return self.products["parent"]

    @property
    def plan(self) -> Plan:
        return self.products["plan"]
