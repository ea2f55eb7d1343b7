"""The central types: frozen, and each is born valid, so that nothing downstream checks them again.

Only the standard library is used here: planning needs no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from shardmill.pipeline.errors import CheckpointError

Shape = tuple[int, ...]
# What a write, a replacement or a touch of a file changes: size, mtime_ns, inode, ctime_ns.
Stat = tuple[int, int, int, int]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
README_FILE = "README.md"

# Bits an element takes, in the safetensors library's own order (its `Dtype` enum, narrowest alignment first).
# The library lays tensors out by descending place in this order, then by name; a test reads it off the library.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
DTYPE_RANK: Mapping[str, int] = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}


def tensor_bytes(dtype: str, shape: Shape) -> int:
    """Bytes that a tensor's data take. Raises CheckpointError for an unknown dtype or a split byte."""
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"dtype {dtype!r} is not one that safetensors knows ({', '.join(DTYPE_BITS)})")
    bits = DTYPE_BITS[dtype] * prod(shape)
    if bits % 8:
        raise CheckpointError(f"shape {list(shape)} of {dtype} ends inside a byte ({bits} bits)")
    return bits // 8


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor as a shard's header declares it. `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: Shape
    shard: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        try:
            expected = tensor_bytes(self.dtype, self.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.shard}: {self.name}: {error}") from None
        if self.end - self.begin != expected:
            raise CheckpointError(
                f"{self.shard}: {self.name}: {self.dtype} {list(self.shape)} takes {expected} bytes, "
                f"but its offsets [{self.begin}, {self.end}] span {self.end - self.begin}"
            )

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A shard's header: its tensors by offset, tiling the data without hole or overlap."""

    shard: str
    tensors: tuple[TensorRef, ...]
    metadata: Mapping[str, str]
    data_begin: int  # bytes from the start of the file to the start of the data
    digest: str = ""  # sha256 of the header's bytes, hex

    def __post_init__(self) -> None:
        place = 0
        for ref in self.tensors:
            if ref.begin != place:
                kind = "a hole" if ref.begin > place else "an overlap"
                raise CheckpointError(
                    f"{self.shard}: {ref.name} begins at byte {ref.begin} of the data where {place} is expected: {kind}"
                )
            place = ref.end

    @property
    def data_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def file_bytes(self) -> int:
        return self.data_begin + self.data_bytes


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The block that shares one scale: `rows` x `cols` elements."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"a block needs at least one row and one column, got [{self.rows}, {self.cols}]")

    def grid(self, shape: Shape) -> Shape:
        """Shape of the scales of a weight [R, C]: [ceil(R / rows), ceil(C / cols)]."""
        R, C = shape
        return (-(-R // self.rows), -(-C // self.cols))

    def __str__(self) -> str:
        return f"[{self.rows},{self.cols}]"


Part = Literal["bytes", "codes", "scales", "values"]


@dataclass(frozen=True, slots=True)
class Copy:
    """The tensor is passed on byte for byte."""

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return ((ref.name, ref.dtype, ref.shape, "bytes"),)


@dataclass(frozen=True, slots=True)
class QuantizeBlock:
    """A weight [R, C] becomes E4M3 codes and one F32 scale a block.

    The stored name ends in `_scale_inv`, DeepSeek's historical one; the number *multiplies* a code back to a weight.
    """

    block: BlockShape
    numerics: str  # the recipe of shardmill.kernels.block_fp8 that makes the bits, e.g. "amax/1"
    scale_suffix: str = "_scale_inv"

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return (
            (ref.name, "F8_E4M3", ref.shape, "codes"),
            (ref.name + self.scale_suffix, "F32", self.block.grid(ref.shape), "scales"),
        )


@dataclass(frozen=True, slots=True)
class Dequantize:
    """Block-FP8 codes [R, C] of the parent become BF16: code times its block's scale in f32, rounded once."""

    block: BlockShape  # the parent's
    numerics: str = "dequantize/1"

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return ((ref.name, "BF16", ref.shape, "values"),)


@dataclass(frozen=True, slots=True)
class Reblock:
    """Block-FP8 codes of the parent stay; each scale is repeated over the smaller blocks that lie in its own.

    So the child decodes to the parent's numbers exactly, whatever they were.
    """

    source_block: BlockShape
    block: BlockShape
    scale_suffix: str = "_scale_inv"
    numerics: str = "reblock/1"

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return (
            (ref.name, "F8_E4M3", ref.shape, "bytes"),
            (ref.name + self.scale_suffix, "F32", self.block.grid(ref.shape), "scales"),
        )


@dataclass(frozen=True, slots=True)
class Reconcile:
    """A global or block scale of an NVFP4 expert's gate or up, made to share one global scale with the other half."""

    numerics: str = "reconcile/1"

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return ((ref.name, ref.dtype, ref.shape, "values"),)


@dataclass(frozen=True, slots=True)
class Rename:
    """The tensor is passed on under another name."""

    name: str

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return ((self.name, ref.dtype, ref.shape, "bytes"),)


@dataclass(frozen=True, slots=True)
class Drop:
    """The tensor is left out, as the recipe declares."""

    def outputs(self, ref: TensorRef) -> tuple[tuple[str, str, Shape, Part], ...]:
        return ()


Action = Copy | QuantizeBlock | Dequantize | Reblock | Reconcile | Rename | Drop
Conversion = QuantizeBlock | Dequantize | Reblock  # what changes a weight's bytes or their meaning
ToBlocks = QuantizeBlock | Reblock  # what leaves a weight in block FP8
FromBlocks = Dequantize | Reblock  # what starts from the parent's block FP8, and so reads its scales

# Names that a block-FP8 weight's scales bear after the weight's own: DeepSeek's and compressed-tensors'.
SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class Piece:
    """One output tensor: where it lies, which parent tensor fills it, with which part of what the action makes."""

    ref: TensorRef
    source: TensorRef
    part: Part
    action: Action
    scales: TensorRef | None = None  # the parent's scales of `source`, where the action reads them
    reads: tuple[TensorRef, ...] = ()  # further tensors of the parent that the action reads


@dataclass(frozen=True, slots=True)
class Assignment:
    """A parent tensor, the family that its rule belongs to, and what is done with it."""

    source: TensorRef
    family: str
    action: Action
    scales: TensorRef | None = None  # the parent's scales of `source`, where the action reads them
    reads: tuple[TensorRef, ...] = ()  # further tensors of the parent that the action reads


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output file, whole but for its data.

    `pieces` stand in file order. A shard that is not `rewritten` equals the parent's file byte for byte.
    `key` is the digest of all that can change its bytes, except the parent's data, whose digests a receipt holds.
    """

    file: str
    header: Header
    pieces: tuple[Piece, ...]
    inputs: tuple[str, ...]  # files of the parent that are read
    rewritten: bool
    key: str


@dataclass(frozen=True)
class Parent:
    """A parent checkpoint as its headers declare it. Tensor names are unique over all shards."""

    folder: Path
    headers: tuple[Header, ...]  # in order of file name
    stats: Mapping[str, Stat]  # of every shard and every carried file
    config: Mapping[str, Any]  # config.json, parsed
    carried: tuple[str, ...]  # other files that the child gets, relative POSIX paths
    left: Mapping[str, str]  # other files that it does not get -> why
    single: bool  # one model.safetensors without an index
    replaced: Mapping[str, Path] = field(default_factory=dict)  # shards that a repair takes from elsewhere

    def path(self, file: str) -> Path:
        """Where the bytes of the parent's `file` are read."""
        return self.replaced.get(file, self.folder / file)

    @cached_property
    def tensors(self) -> dict[str, TensorRef]:
        return {ref.name: ref for header in self.headers for ref in header.tensors}

    @property
    def tensor_bytes(self) -> int:
        return sum(header.data_bytes for header in self.headers)

    @property
    def file_bytes(self) -> int:
        return sum(header.file_bytes for header in self.headers)


@dataclass(frozen=True, slots=True)
class FamilySummary:
    """What a family comes to: bytes of its tensors before and after, and of the scales that they gain."""

    name: str
    action: str
    reason: str | None
    tensors: int
    bytes_before: int
    bytes_after: int  # without the scales
    scale_bytes: int
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class LoadsAt:
    """Whether the result can be loaded at a tensor-parallel size; `reason` says why not."""

    tensor_parallel: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer except the bytes. The same recipe and headers give the same Plan, on any machine."""

    recipe: str
    repository: str | None
    revision: str | None
    shards: tuple[ShardPlan, ...]
    weight_map: Mapping[str, str]  # output tensor -> output file
    config: bytes  # config.json as it will be written
    config_entries: int
    readme: bytes
    conversions: Mapping[str, tuple[str, Conversion]]  # weight -> its family and what is done with it
    dropped: tuple[str, ...]
    renamed: Mapping[str, str]  # parent tensor -> output tensor
    repairs: tuple[Mapping[str, Any], ...]  # what was repaired, as far as headers tell
    carried: tuple[str, ...]
    single: bool
    families: tuple[FamilySummary, ...]
    loads: tuple[LoadsAt, ...]
    key: str

    @property
    def tensor_bytes(self) -> int:
        return sum(shard.header.data_bytes for shard in self.shards)

    @property
    def file_bytes(self) -> int:
        return sum(shard.header.file_bytes for shard in self.shards)

    @property
    def tensors(self) -> int:
        return len(self.weight_map)

    @property
    def numerics(self) -> tuple[str, ...]:
        return tuple(sorted({action.numerics for _, action in self.conversions.values()}))
