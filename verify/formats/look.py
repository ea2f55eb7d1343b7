"""One pass over a tensor's bytes: its elements' law, its stretches of zeros, its blocks of zeros, its indices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np

from shardmill.verify.formats.linear import U8
from shardmill.verify.formats.values import ElementCheck, ValueRule
from shardmill.verify.formats.zeros import Run, ZeroRuns, no_run
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

FRONT_BYTES = 4_096


class Sighting(NamedTuple):
    """What the pass saw in one tensor beside findings. It can come from another process."""

    runs: tuple[Run, ...] = ()  # of zero bytes
    zero_block: bool = False  # codes in which a block may be all zero
    zero_scale: bool = False  # block scales of which one is zero
    front: int | None = None  # a digest of a weight's first bytes


NOTHING = Sighting()


@dataclass(slots=True)
class Sightings:
    """The same of all tensors, by name."""

    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    zero_blocks: set[str] = field(default_factory=set)
    zero_scales: set[str] = field(default_factory=set)
    fronts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seen: Sighting) -> None:
        if seen.runs:
            self.runs[name] = seen.runs
        if seen.zero_block:
            self.zero_blocks.add(name)
        if seen.zero_scale:
            self.zero_scales.add(name)
        if seen.front is not None:
            self.fronts[name] = seen.front


class Plan(NamedTuple):
    """What to look for in one tensor."""

    tensor: Tensor
    law: ValueRule | None = None
    runs: bool = False
    block_bytes: int = 0  # bytes of one row of a block of codes; 0 = blocks are not looked at
    scales: bool = False  # whether these are block scales, of which none should be zero

    def glance(self, whole: U8) -> bool:
        """Whether these bytes hold nothing to tell. Of a weight there is always something: its front."""
        return not self.runs and _plain(self, whole)

    def begin(self) -> Look:
        return Look(self)


class Look:
    """Fed the bytes in order by `verify.reading.stream`; `outcome` is what it saw.

    Most tensors come in one piece in which there is nothing to find: a few tests of the whole piece show that.
    """

    __slots__ = ("_check", "_front", "_plan", "_runs", "_seen", "_zero_block", "_zero_scale")

    def __init__(self, plan: Plan) -> None:
        self._plan, self._seen = plan, 0
        self._front: int | None = None
        self._zero_block = self._zero_scale = False
        self._check: ElementCheck | None = None
        self._runs: ZeroRuns | None = None

    def feed(self, strip: U8) -> None:
        plan = self._plan
        if not self._seen:
            if plan.runs:
                self._front = crc32(strip[:FRONT_BYTES].data)
            if len(strip) == plan.tensor.bytes and _plain(plan, strip):
                self._seen = len(strip)
                return
            self._check = ElementCheck(plan.tensor, plan.law) if plan.law is not None else None
            self._runs = ZeroRuns(plan.tensor.bytes) if plan.runs else None
        if self._check is not None:
            self._check.feed(strip)
        if self._runs is not None:
            self._runs.feed(strip)
        if plan.block_bytes and not self._zero_block:
            self._zero_block = _may_hold_a_zero_block(plan, strip, self._seen)
        if plan.scales and not strip.min():
            self._zero_scale = True
        self._seen += len(strip)

    @property
    def outcome(self) -> Sighting | None:
        runs = self._runs.finish() if self._runs is not None else ()
        seen = Sighting(runs, self._zero_block, self._zero_scale, self._front)
        return seen if seen != NOTHING else None

    def findings(self) -> list[Finding]:
        return self._check.findings() if self._check is not None else []


def _plain(plan: Plan, whole: U8) -> bool:
    """Whether a tensor that lies here whole shows at a glance that there is nothing to find in it."""
    if plan.law is not None and not plan.law.holds(whole):
        return False
    if plan.scales and not whole.min():
        return False
    if plan.block_bytes and _may_hold_a_zero_block(plan, whole, 0):
        return False
    return not plan.runs or no_run(whole)


def _may_hold_a_zero_block(plan: Plan, strip: U8, seen: int) -> bool:
    """Looks at a word in every half row of a block; words of small blocks begin where the blocks do."""
    aligned = strip[-seen % 8 :]
    words = aligned[: len(aligned) // 8 * 8].view("<u8")
    return not bool(words[:: max(plan.block_bytes // 16, 1)].all())


def whole(runs: tuple[Run, ...], tensor: Tensor) -> bool:
    """Whether every byte of the tensor is zero."""
    return bool(tensor.bytes) and runs == ((0, tensor.bytes),)


def zero_bytes(runs: tuple[Run, ...]) -> int:
    return int(np.sum([end - begin for begin, end in runs]))
