"""Errors by row, by column and by block, so that one wrong row in a large weight is not lost in its mean.

Rounding to the nearest code moves a weight of about its group's size by a known share at most (E4M3 1/16, E2M1 1/3,
scales' own rounding added). Where most such weights of a row, column or block moved further, and the weight as a whole
did not, that row, column or block is another one. Integers, which are often not rounded to the nearest, are held to
`local_fits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.blocks import Block

MOVED = {
    "fp8": 0.125,
    "fp4": 0.4,
    "table": 0.5,
    "table4": 0.5,
}  # share of max(|got|, |want|): twice E4M3's rounding, E2M1's with its scale's, that of bitsandbytes' tables
LARGE = 0.6  # of the root mean square of its group: smaller weights may round to anything
QUIET = 0.1  # groups below this share of the strip's root mean square may be lost by a shared scale
SHARE = 0.5  # of a group's large weights that moved too far: it is another group
WHOLE_MAX = 0.1  # of all large weights; above, the weight was not rounded to the nearest
MEMBERS_MIN = 6
NAMED_MAX = 3

Counts = NDArray[np.int64]


@dataclass(slots=True)
class LocalErrors:
    """Counts of large weights, and of those that moved too far, by row, column and block of a matrix [rows, cols]."""

    shape: tuple[int, int]
    block: Block
    kind: str  # of MOVED
    _columns: Counts = field(init=False)
    _blocks: Counts = field(init=False)
    _odd: list[str] = field(default_factory=list)
    _whole: Counts = field(default_factory=lambda: np.zeros(2, np.int64))

    def __post_init__(self) -> None:
        rows, cols = self.shape
        self._columns = np.zeros((2, cols), np.int64)
        high, wide = self.block
        self._blocks = np.zeros((2, -(-rows // high), -(-cols // wide)) if high > 1 else (2, 0, 0), np.int64)

    def feed(self, first: int, got: NDArray[Any], want: NDArray[Any]) -> None:
        """Rows from `first` on, as decoded and as the parent has them."""
        largest, far = np.maximum(np.abs(got), np.abs(want)), np.abs(got - want)
        large = self._large(largest, want)
        moved = large & (far > MOVED[self.kind] * largest)
        self._whole += (np.count_nonzero(large), np.count_nonzero(moved))
        rows = np.stack([large.sum(1), moved.sum(1)])
        self._name(rows, lambda place: f"row {first + place}")
        self._columns += np.stack([large.sum(0), moved.sum(0)])
        self._by_block(first, large, moved)

    def _large(self, largest: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
        wide = self.block[1] if self.kind in ("fp4", "table", "table4") else want.shape[1]
        if want.shape[1] % wide:
            wide = want.shape[1]
        squares = np.square(want, dtype=np.float64).reshape(len(want), -1, wide).mean(2)
        mean = np.sqrt(squares.mean()) if squares.size else 0.0
        size = np.sqrt(squares)
        limit = np.where(size > QUIET * mean, LARGE * size, np.inf)
        return np.asarray(largest > np.repeat(limit, wide, axis=1))

    def _by_block(self, first: int, large: NDArray[np.bool_], moved: NDArray[np.bool_]) -> None:
        high, wide = self.block
        edges = np.arange(0, large.shape[1], wide)
        counts = np.stack([np.add.reduceat(part, edges, axis=1, dtype=np.int64) for part in (large, moved)])
        if high > 1:
            places = (first + np.arange(len(large))) // high
            for part in range(2):
                np.add.at(self._blocks[part], places, counts[part])
        else:
            columns = counts.shape[2]
            self._name(counts.reshape(2, -1), lambda n: f"block [{first + n // columns}, {n % columns}]")

    def _name(self, counts: Counts, name: Any) -> None:
        for place in np.flatnonzero((counts[0] >= MEMBERS_MIN) & (counts[1] > SHARE * counts[0])):
            share = counts[1][place] / counts[0][place]
            self._odd.append(f"{name(int(place))} ({share:.0%} of its larger weights)")

    def odd(self) -> Iterator[str]:
        """Rows, columns and blocks that are not the parent's, the first few by name."""
        large, moved = self._whole
        if not large or moved > WHOLE_MAX * large:
            return
        self._name(self._columns, lambda place: f"column {place}")
        if self._blocks.size:
            columns = self._blocks.shape[2]
            self._name(self._blocks.reshape(2, -1), lambda n: f"block [{n // columns}, {n % columns}]")
        yield from self._odd[:NAMED_MAX]
        if len(self._odd) > NAMED_MAX:
            yield f"{len(self._odd) - NAMED_MAX:,} more"
