"""Rows, columns and blocks of integers against the parent's, for codes that may have been chosen with data.

GPTQ moves a weight by whole steps to make good what its neighbours lost, so that no bound on single weights holds. What
holds is likeness: the cosine between a row, a column or a block and the parent's, and for most of a block's larger
weights their size. Of a real sentence model rounded by GPTQ on real text, 4 bits in groups of 32 and 128, with and
without activation order, damped by 0.1 % to 1 %, the least cosines were these, and AWQ's were above them:
`tests/verify/tools/chosen_with_data.py` has the algorithms and the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.blocks import Block

# (members, least cosine): strangers are alike by chance, the more the fewer there are
ROW = ((64, 0.5), (32, 0.15), (16, -0.3))
COLUMN = ((64, 0.12), (32, 0.0), (16, -0.3))
BLOCK = ((64, 0.35), (32, 0.1), (16, -0.5))
EIGHT = ((16, 0.9),)  # of eight bits, whatever part
QUIET = 0.1  # of the strip's root mean square; smaller groups are the rounding's own
LARGE = 0.6  # of the block's root mean square
TIMES = 1.5  # most larger weights of a block by more than this, or less than its inverse: another scale
SURELY_MORE, SURELY_LESS = 1.8, 0.52  # gains that clipping an outlier to its half does not make
ALIKE = 0.9  # cosine of a block that differs in scale alone
MEMBERS_MIN = 8
NAMED_MAX = 3

F64 = NDArray[np.float64]


@dataclass(slots=True)
class LocalFits:
    """Sums of products by row, column and block of a matrix [rows, columns], fed in strips of rows."""

    shape: tuple[int, int]
    block: Block
    eight_bits: bool = False
    order: NDArray[np.int64] | None = None  # columns by their groups, where these do not follow one another
    _columns: F64 = field(init=False)
    _blocks: F64 = field(init=False)
    _odd: list[str] = field(default_factory=list)
    _whole: F64 = field(default_factory=lambda: np.zeros(3))

    def __post_init__(self) -> None:
        high, wide = self.block
        self._columns = np.zeros((3, self.shape[1]))
        tall = (3, -(-self.shape[0] // high), -(-self.shape[1] // wide))
        self._blocks = np.zeros(tall if high > 1 else (3, 0, 0))

    def feed(self, first: int, got: NDArray[Any], want: NDArray[Any]) -> None:
        """Rows from `first` on, as decoded and as the parent has them."""
        if self.order is not None:  # a fault may keep to places as well as to groups
            self._name_blocks(first, got, want)
            got, want = got[:, self.order], want[:, self.order]
        by_block, quiet = self._name_blocks(first, got, want)
        rows = by_block.sum(2)
        self._whole += rows.sum(1)
        self._name(rows, got.shape[1], ROW, quiet, lambda place: f"row {first + place}")
        self._columns += self._products(got, want).sum(1, dtype=np.float64)
        if self.block[0] > 1:
            for part in range(3):
                np.add.at(self._blocks[part], (first + np.arange(len(got))) // self.block[0], by_block[part])
            return
        name = self._namer(first, by_block.shape[2])
        for place in np.flatnonzero(self._rescaled(got, want, by_block).reshape(-1)):
            self._odd.append(f"{name(int(place))} (another scale)")

    def _products(self, got: NDArray[Any], want: NDArray[Any]) -> NDArray[Any]:
        return np.stack([got * got, got * want, want * want])

    def _name_blocks(self, first: int, got: NDArray[Any], want: NDArray[Any]) -> tuple[F64, float]:
        """(sums of products by block, what a quiet block has an element); names the odd ones of one row."""
        edges = np.arange(0, got.shape[1], self.block[1])
        by_block = np.add.reduceat(self._products(got, want), edges, axis=2, dtype=np.float64)
        quiet = QUIET**2 * float(want.size and by_block[2].sum() / want.size)
        if self.block[0] == 1:
            name = self._namer(first, by_block.shape[2])
            self._name(by_block.reshape(3, -1), self.block[1], BLOCK, quiet, name)
        return np.asarray(by_block), quiet

    def _namer(self, first: int, across: int) -> Callable[[int], str]:
        return lambda place: f"block [{first + place // across}, {place % across}]"

    def _rescaled(self, got: NDArray[Any], want: NDArray[Any], by_block: F64) -> NDArray[np.bool_]:
        """bool [rows, blocks]: most of the larger weights are larger, or smaller, by more than TIMES."""
        wide = self.block[1]
        if want.shape[1] % wide or wide < MEMBERS_MIN:
            return np.zeros(by_block.shape[1:], np.bool_)
        alike = by_block[1] > ALIKE * np.sqrt(by_block[0] * by_block[2])
        gain = by_block[1] / np.maximum(by_block[2], np.finfo(np.float64).tiny)
        some = alike & ((gain > TIMES) | (gain < 1 / TIMES))
        sure = alike & ((gain > SURELY_MORE) | (gain < SURELY_LESS))
        if not some.any():
            return np.asarray(some)
        rows, blocks = np.nonzero(some)
        theirs, ours = (m.reshape(len(m), -1, wide)[rows, blocks] for m in (want, got))
        large = np.abs(theirs) > LARGE * np.sqrt(by_block[2][rows, blocks] / wide)[:, None]
        sized = ours * np.sign(theirs)
        counts = [
            (large & (sized > TIMES * np.abs(theirs))).sum(1),
            (large & (sized * TIMES < np.abs(theirs))).sum(1),
        ]
        members = large.sum(1)
        some[rows, blocks] = (members >= MEMBERS_MIN) & (2 * np.maximum(*counts) > members)
        return np.asarray(some | sure)

    def _name(
        self,
        sums: F64,
        members: int,
        least: tuple[tuple[int, float], ...],
        quiet: float,
        name: Callable[[int], str],
    ) -> None:
        least = EIGHT if self.eight_bits else least
        limit = next((cosine for count, cosine in least if members >= count), None)
        if limit is None:
            return
        cosine = sums[1] / np.maximum(np.sqrt(sums[0] * sums[2]), np.finfo(np.float64).tiny)
        loud = sums[2] > quiet * members
        for place in np.flatnonzero(loud & ~(cosine >= limit)):
            self._odd.append(f"{name(int(place))} (cosine {cosine[place]:.2f})")

    def odd(self) -> Iterator[str]:
        """Rows, columns and blocks that are not the parent's, the first few by name."""
        rows, columns = self.shape
        quiet = QUIET**2 * float(self._whole[2]) / max(rows * columns, 1)
        order = self.order
        self._name(
            self._columns, rows, COLUMN, quiet, lambda n: f"column {n if order is None else int(order[n])}"
        )
        if self._blocks.size:
            high, wide = self.block
            self._name(
                self._blocks.reshape(3, -1), high * wide, BLOCK, quiet, self._namer(0, self._blocks.shape[2])
            )
        yield from self._odd[:NAMED_MAX]
        if len(self._odd) > NAMED_MAX:
            yield f"{len(self._odd) - NAMED_MAX:,} more"
