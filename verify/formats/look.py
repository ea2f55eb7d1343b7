"""One pass over a tensor's bytes: its elements' law, its stretches of zeros, its blocks of zeros, its indices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from shardmill.verify.formats.linear import U8, Linear
from shardmill.verify.formats.values import ElementCheck, ValueRule
from shardmill.verify.formats.zeros import RUN_BYTES_MIN, STEP, Run, ZeroRuns, no_run
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

FRONT_BYTES = 4_096
BLOCKED = ("fp8-block", "fp8-grid", "mxfp8", "mxfp4", "gpt-oss", "nvfp4", "ct-nvfp4")  # held to their scales
_ROW_BYTES = {"nvfp4": 8, "ct-nvfp4": 8, "mxfp4": 16, "gpt-oss": 16, "mxfp8": 32}  # of a block of codes


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

    def add(self, name: str, seen: Sighting | int) -> None:
        """A number is the front of a weight in which nothing was seen."""
        if isinstance(seen, int):
            self.fronts[name] = seen
            return
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
    least_run: int = RUN_BYTES_MIN  # bytes
    block_bytes: int = 0  # bytes of one row of a block of codes; 0 = blocks are not looked at
    scales: bool = False  # whether these are block scales, of which none should be zero

    def glance(self, whole: U8) -> tuple[bool, int | None]:
        """A few tests of the whole tensor, in which there is nothing to find as a rule."""
        fine = (
            (self.law is None or self.law.holds(whole))
            and not (self.scales and not whole.min())
            and not (self.block_bytes and self.may_hold_a_zero_block(whole, 0))
            and (not self.runs or self._blocks_show_runs or no_run(whole, self.least_run))
        )
        return fine, _front(whole) if fine and self.runs and not self.of_a_vector else None

    @property
    def of_a_vector(self) -> bool:
        """Whether shorter runs count than in weights: a norm's, which is no copy of its sibling either."""
        return self.least_run < RUN_BYTES_MIN

    def begin(self) -> Look:
        return Look(self)

    @property
    def _step(self) -> int:
        """Words of 8 bytes between two that are looked at: one in every half row of a block."""
        return max(self.block_bytes // 16, 1)

    @property
    def _blocks_show_runs(self) -> bool:
        """Whether what is looked at for blocks of zeros holds all that is looked at for runs of zeros."""
        return bool(self.block_bytes) and STEP % self._step == 0 and self.tensor.bytes >= 8

    def may_hold_a_zero_block(self, strip: U8, seen: int) -> bool:
        """Whether a word is zero; words of small blocks begin where the blocks do. `seen`: bytes before the strip."""
        aligned = strip[-seen % 8 :]
        words = aligned[: len(aligned) // 8 * 8].view("<u8")[:: self._step]
        return bool(len(words)) and not words.min()


class Look:
    """Fed the bytes in order by `verify.reading.stream`; `outcome` is what it saw."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._seen = plan, 0
        self._front: int | None = None
        self._zero_block = self._zero_scale = False
        self._check = ElementCheck(plan.tensor, plan.law) if plan.law is not None else None
        self._runs = ZeroRuns(plan.tensor.bytes, plan.least_run) if plan.runs else None

    def feed(self, strip: U8) -> None:
        plan = self._plan
        if self._check is not None:
            self._check.feed(strip)
        if self._runs is not None:
            self._runs.feed(strip)
            if not self._seen and not plan.of_a_vector:
                self._front = _front(strip)
        if plan.block_bytes and not self._zero_block:
            self._zero_block = plan.may_hold_a_zero_block(strip, self._seen)
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


def _front(strip: U8) -> int:
    return xxh3_64_intdigest(strip[:FRONT_BYTES].data)


def block_bytes(linear: Linear) -> int:
    """Bytes of one row of a block of codes; 0 for a format whose blocks are not held to their scales."""
    if linear.kind not in BLOCKED or linear.weight is None or linear.grid is None or not linear.grid.shape:
        return 0
    columns = linear.shape[-1] if linear.shape else 0
    return _ROW_BYTES.get(linear.kind) or max(columns // max(linear.grid.shape[-1], 1), 8)


def whole(runs: tuple[Run, ...], tensor: Tensor) -> bool:
    """Whether every byte of the tensor is zero."""
    return bool(tensor.bytes) and runs == ((0, tensor.bytes),)


def zero_bytes(runs: tuple[Run, ...]) -> int:
    return int(np.sum([end - begin for begin, end in runs]))
