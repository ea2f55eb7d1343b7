"""One pass over a tensor's bytes: its elements' law, its stretches of zeros, its blocks of zeros, its indices."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from shardmill.verify.formats.linear import U8
from shardmill.verify.formats.values import ElementCheck, ValueRule
from shardmill.verify.formats.zeros import RUN_BYTES_MIN, Run, ZeroRuns
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

FRONT_BYTES = 4_096


@dataclass(slots=True)
class Sightings:
    """What the pass saw beside its findings, of all tensors."""

    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)  # of zero bytes
    zero_blocks: set[str] = field(default_factory=set)  # codes in which a block may be all zero
    zero_scales: set[str] = field(default_factory=set)  # block scales of which one is zero
    fronts: dict[str, int] = field(default_factory=dict)  # a digest of a weight's first bytes
    seen: set[str] = field(default_factory=set)  # every tensor that was looked at to its end

    def add(self, name: str, seen: Sighting) -> None:
        self.seen.add(name)
        if seen.runs:
            self.runs[name] = seen.runs
        if seen.zero_block:
            self.zero_blocks.add(name)
        if seen.zero_scale:
            self.zero_scales.add(name)
        if seen.front is not None:
            self.fronts[name] = seen.front


@dataclass(slots=True)
class Sighting:
    """The same of one tensor. It can come from another process."""

    runs: tuple[Run, ...] = ()
    zero_block: bool = False
    zero_scale: bool = False
    front: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look for in one tensor."""

    tensor: Tensor
    law: ValueRule | None = None
    runs: bool = False
    least_run: int = RUN_BYTES_MIN  # bytes
    block_bytes: int = 0  # bytes of one row of a block of codes; 0 = blocks are not looked at
    scales: bool = False  # whether these are block scales, of which none should be zero


class Look:
    """Fed the bytes in order by `verify.reading.stream`; `outcome` is what it saw."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.outcome, self._seen = plan, Sighting(), 0
        self._check = ElementCheck(plan.tensor, plan.law) if plan.law is not None else None
        self._runs = ZeroRuns(plan.tensor.bytes, plan.least_run) if plan.runs else None

    def feed(self, strip: U8) -> None:
        if self._check is not None:
            self._check.feed(strip)
        if self._runs is not None:
            self._runs.feed(strip)
        if self._plan.block_bytes and not self.outcome.zero_block:
            self._blocks(strip)
        if self._plan.scales and not strip.all():
            self.outcome.zero_scale = True
        if self._plan.runs and not self._seen and self._plan.least_run == RUN_BYTES_MIN:
            self.outcome.front = crc32(strip[:FRONT_BYTES].data)
        self._seen += len(strip)

    def _blocks(self, strip: U8) -> None:
        """A word of zeros in every half row of a block; words of small blocks begin where the blocks do."""
        aligned = strip[-self._seen % 8 :]
        words = aligned[: len(aligned) // 8 * 8].view("<u8")
        if not bool(words[:: max(self._plan.block_bytes // 16, 1)].all()):
            self.outcome.zero_block = True

    def findings(self) -> list[Finding]:
        if self._runs is not None:
            self.outcome.runs = tuple(self._runs.finish())
        return self._check.findings() if self._check is not None else []


def whole(runs: tuple[Run, ...], tensor: Tensor) -> bool:
    """Whether every byte of the tensor is zero."""
    return bool(tensor.bytes) and runs == ((0, tensor.bytes),)


def zero_bytes(runs: tuple[Run, ...]) -> int:
    return int(np.sum([end - begin for begin, end in runs]))
