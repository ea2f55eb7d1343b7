"""The facts of a checkpoint: frozen, and each is born valid, so that nothing downstream checks them again.

Only the standard library is used here: planning needs no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

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
    bits = _tensor_bits(dtype, shape)
    if bits is None:
        raise CheckpointError(f"dtype {dtype!r} is not one that safetensors knows ({', '.join(DTYPE_BITS)})")
    if bits % 8:
        raise CheckpointError(f"shape {list(shape)} of {dtype} ends inside a byte ({bits} bits)")
    return bits // 8


@lru_cache(maxsize=1 << 12)  # a checkpoint has few shapes
def _tensor_bits(dtype: str, shape: Shape) -> int | None:
    """None: of an unknown dtype."""
    return DTYPE_BITS[dtype] * prod(shape) if dtype in DTYPE_BITS else None


class TensorRef(NamedTuple):
    """One tensor as a shard's header declares it. `begin` and `end` are bytes from the start of the data.

    A tuple, since a checkpoint has 150,000 of them. The Header that it is in has checked it.
    """

    name: str
    dtype: str
    shape: Shape
    shard: str
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A shard's header: its tensors by offset, each as large as dtype and shape say, without hole or overlap."""

    shard: str
    tensors: tuple[TensorRef, ...]
    metadata: Mapping[str, str]
    data_begin: int  # bytes from the start of the file to the start of the data
    digest: str = ""  # sha256 of the header's bytes, hex

    def __post_init__(self) -> None:
        place = 0
        for ref in self.tensors:
            _, dtype, shape, _, begin, end = ref
            if begin != place or (end - begin) * 8 != _tensor_bits(dtype, shape):
                raise CheckpointError(f"{self.shard}: {ref.name}{_why_wrong(ref, place)}")
            place = end

    @property
    def data_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def file_bytes(self) -> int:
        return self.data_begin + self.data_bytes


def _why_wrong(ref: TensorRef, place: int) -> str:
    """The end of a sentence about a tensor that its header has wrong, where `place` is its first byte."""
    if ref.dtype not in DTYPE_BITS:
        return f": dtype {ref.dtype!r} is not one that safetensors knows"
    try:
        expected = tensor_bytes(ref.dtype, ref.shape)
    except CheckpointError as error:
        return f": {error}"
    if ref.bytes != expected:
        return (
            f": {ref.dtype} {list(ref.shape)} takes {expected} bytes, "
            f"but its offsets [{ref.begin}, {ref.end}] span {ref.bytes}"
        )
    kind = "a hole" if ref.begin > place else "an overlap"
    return f" begins at byte {ref.begin} of the data where {place} is expected: {kind}"


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


# Names that a block-FP8 weight's scales bear after the weight's own: DeepSeek's and compressed-tensors'.
SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class LeftFile:
    """A file beside the shards that the child does not get: why, and how many bytes it has."""

    reason: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """A shard of the parent that a build has removed, its children being whole."""

    head: Path  # a file of its header and size, without its data
    stat: Stat  # that it had
    is_pinned: bool  # every byte of it was known to be the lock's


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """Where a tensor comes from that another checkpoint than the parent gives: the source, and its name there."""

    source: str
    name: str


@dataclass(frozen=True)
class Parent:
    """A parent checkpoint as its headers declare it, with what the recipe takes from other checkpoints.

    Tensor names are unique over all headers. A file of another checkpoint is called `source:file`; a tensor of a file
    that is not taken is called `source:name` in its header, one of the parent's own `:name`.
    """

    folder: Path
    headers: tuple[Header, ...]  # in order of file name, those of other checkpoints last
    stats: Mapping[str, Stat]  # of every shard and every carried file
    config: Mapping[str, Any]  # config.json, parsed
    carried: tuple[str, ...]  # other files that the child gets, relative POSIX paths
    left: Mapping[str, LeftFile]  # other files that it does not get
    single: bool  # one model.safetensors without an index
    replaced: Mapping[str, Path] = field(default_factory=dict)  # shards that a repair takes from elsewhere
    consumed: Mapping[str, bool] = field(
        default_factory=dict
    )  # shards that gave way to their children -> whether each was known to be the pinned one
    card: Mapping[str, str] = field(
        default_factory=dict
    )  # front matter of its README.md: key -> lines of YAML
    others: Mapping[str, Path] = field(default_factory=dict)  # each file of another checkpoint -> where it is
    origins: Mapping[str, TensorOrigin] = field(default_factory=dict)  # of the tensors that others give
    unused: frozenset[str] = frozenset()  # names in the headers of tensors that are not taken

    def path(self, file: str) -> Path:
        """Where the bytes of the parent's `file` are read: absolute, for a worker elsewhere has another folder."""
        place = self.others.get(file) or self.replaced.get(file, self.folder / file)
        return place.absolute()

    def own_name(self, name: str) -> str:
        """What a tensor in one of the headers is called in its file."""
        if name in self.origins:
            return self.origins[name].name
        return name.partition(":")[2] if name in self.unused else name

    def pinned(self, header: Header) -> tuple[TensorRef, ...]:
        """The tensors that a lock holds a file to: all of the parent's own, of another checkpoint's what is taken."""
        if header.shard not in self.others:
            return header.tensors
        return tuple(ref for ref in header.tensors if ref.name not in self.unused)

    @cached_property
    def own_headers(self) -> tuple[Header, ...]:
        """The headers of the parent's own files."""
        return tuple(header for header in self.headers if header.shard not in self.others)

    @cached_property
    def tensors(self) -> dict[str, TensorRef]:
        found = {ref.name: ref for header in self.headers for ref in header.tensors}
        return {name: ref for name, ref in found.items() if name not in self.unused} if self.unused else found

    @property
    def tensor_bytes(self) -> int:
        return sum(header.data_bytes for header in self.own_headers)

    @property
    def file_bytes(self) -> int:
        return sum(header.file_bytes for header in self.own_headers)


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
