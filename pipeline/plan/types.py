"""The plan's own types: what each output tensor, file and family comes to. Frozen, and free of any byte of data.

What there is one of for each tensor is a tuple: a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from shardmill.pipeline.actions import Action, Conversion, Copy, Part
from shardmill.pipeline.types import FamilySummary, Header, TensorOrigin, TensorRef


class Piece(NamedTuple):
    """One output tensor: where it lies, which parent tensor fills it, with which part of what the action makes."""

    ref: TensorRef
    source: TensorRef
    part: Part
    action: Action
    scales: TensorRef | None = None  # the parent's scales of `source`, where the action reads them
    reads: tuple[TensorRef, ...] = ()  # further tensors of the parent that the action reads


class Assignment(NamedTuple):
    """A parent tensor, the family that its rule belongs to, and what is done with it."""

    source: TensorRef
    family: str
    action: Action
    scales: TensorRef | None = None  # the parent's scales of `source`, where the action reads them
    reads: tuple[TensorRef, ...] = ()  # further tensors of the parent that the action reads


def changed(assignments: Iterable[Assignment]) -> tuple[Assignment, ...]:
    """Those that don't pass a tensor on as it is."""
    return tuple(each for each in assignments if each.action.kind != "copy")


@dataclass(frozen=True)
class ShardPlan:
    """One output file, whole but for its data.

    A shard that is not `rewritten` equals the parent's file byte for byte.
    `key` is the digest of all that can change its bytes, except the parent's data, whose digests a receipt holds.
    """

    file: str
    header: Header
    made: tuple[Piece, ...]  # of a shard that is rewritten, in file order
    inputs: tuple[str, ...]  # files that are read, the parent's own of this name first where it has one
    rewritten: bool
    key: str

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Its tensors in file order. Those of a shard that is passed on are each their own source."""
        return self.made or tuple(Piece(ref, ref, "bytes", Copy()) for ref in self.header.tensors)


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
    config: bytes  # config.json as it will be written
    config_entries: int
    beside: Mapping[str, bytes]  # further files that declare what config.json does, as they will be written
    readme: bytes
    conversions: Mapping[str, tuple[str, Conversion]]  # weight -> its family and its action
    units: Mapping[
        str, tuple[int, int]
    ]  # the same weight -> (rows, columns) of the elements that share a scale
    dropped: tuple[str, ...]
    renamed: Mapping[str, str]  # parent tensor -> output tensor
    repairs: tuple[Mapping[str, Any], ...]  # what was repaired, as far as headers tell
    carried: tuple[str, ...]
    single: bool
    families: tuple[FamilySummary, ...]
    loads: tuple[LoadsAt, ...]
    key: str
    sources: Mapping[str, tuple[str | None, str | None]] = field(
        default_factory=dict
    )  # -> repository, revision
    origins: Mapping[str, TensorOrigin] = field(
        default_factory=dict
    )  # parent tensor -> where it is from instead

    @property
    def tensor_bytes(self) -> int:
        return sum(shard.header.data_bytes for shard in self.shards)

    @property
    def file_bytes(self) -> int:
        return sum(shard.header.file_bytes for shard in self.shards)

    @property
    def tensors(self) -> int:
        return sum(len(shard.header.tensors) for shard in self.shards)

    @property
    def weight_map(self) -> dict[str, str]:
        """Output tensor -> output file, by name."""
        return dict(sorted((ref.name, shard.file) for shard in self.shards for ref in shard.header.tensors))

    @property
    def converted_from(self) -> tuple[str, ...]:
        """The parent's weights that are converted."""
        sources = {
            piece.source.name: None
            for shard in self.shards
            for piece in shard.made
            if isinstance(piece.action, Conversion)
        }
        return tuple(sources)

    @property
    def numerics(self) -> tuple[str, ...]:
        return tuple(sorted({action.numerics for _, action in self.conversions.values()}))
