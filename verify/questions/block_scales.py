"""Blocks and their scales held together: no zero scale over live codes, no live scale over codes of zero.

The first decodes to nothing what was something; the second is a hole in the codes, or scales of other weights.
Only weights in which the pass over the bytes saw a zero scale or a block of zeros are read again.

Tools give a block of zeros a scale of their own, one of ZERO_BLOCK_SCALES or one far from its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.linear import EXPONENTS, F32, Linear
from shardmill.verify.formats.look import BLOCKED, Sightings
from shardmill.verify.formats.matrices import Matrix, can_decode, decoded, matrix_of, strips
from shardmill.verify.formats.opened import scale_values
from shardmill.verify.formats.zeros import Run
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

# 1 (shardmill, ModelOpt), the epsilons of E4M3, BF16 and F32 (compressed-tensors)
ZERO_BLOCK_SCALES = (1.0, 0.125, 2.0**-7, 2.0**-23)
LIVE_RATIO = 16.0  # a scale within this ratio of the weight's median is meant for codes
ROW_ELEMENTS_MAX = 1 << 24  # of a strip of whole blocks; wider weights are left out
EDGE_BYTES = 8  # codes of zero that a stretch may take from the live blocks beside it
WEIGHTS_MAX = 10_000  # read again


@dataclass(frozen=True, slots=True)
class BlockLook:
    """A weight read again: its scales and whether each block has a code that is not zero, [block rows, columns]."""

    matrix: Matrix
    scales: F32
    live: NDArray[np.bool_]

    @property
    def nothing(self) -> NDArray[np.bool_]:
        """Blocks whose scale is zero, or the byte 0 of exponents, which is 2^-127; a small float is a scale."""
        linear = self.matrix.linear
        assert linear is not None
        assert linear.grid is not None
        return self.scales <= np.float32(2.0**-127 if linear.grid.dtype in EXPONENTS else 0.0)

    @property
    def empty(self) -> NDArray[np.bool_]:
        """Blocks of zero codes under a scale that is meant for codes, and so was not made for zeros."""
        with np.errstate(all="ignore"):
            meant = self.scales[self.live & (self.scales > 0)]
            middle = float(np.median(meant)) if meant.size else 0.0
            near = (self.scales > middle / LIVE_RATIO) & (self.scales < middle * LIVE_RATIO)
        return np.asarray(near & ~self.live & ~np.isin(self.scales, np.array(ZERO_BLOCK_SCALES, np.float32)))

    def vouches(self, runs: Iterable[Run]) -> bool:
        """Whether each stretch of zero bytes lies in blocks whose scales say that the converter saw zeros."""
        zeros = ~self.live & ~self.nothing & ~self.empty
        if self.matrix.tensor.dtype != "F8_E4M3" or len(self.matrix.tensor.shape) != 2:
            return False
        rows, cols = self.matrix.block
        width = self.matrix.tensor.shape[-1]
        return all(
            zeros[row // rows, first // cols : -(-last // cols)].all()
            for begin, end in runs
            for row, first, last in _pieces(begin, end, width)
        )


def _pieces(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(row, first column, column after the last) of a stretch, but for zero codes that touch its ends by chance."""
    begin += -begin % width if -begin % width <= EDGE_BYTES else 0
    end -= end % width if end % width <= EDGE_BYTES else 0
    while begin < end:
        row, column = divmod(begin, width)
        last = min(width, column + end - begin)
        yield row, column, last
        begin += last - column


def block_looks(
    checkpoint: Checkpoint, linears: Iterable[Linear], sightings: Sightings
) -> Iterator[BlockLook]:
    """Every weight that the pass over the bytes made a suspect, read again."""
    suspects = [linear for linear in linears if _suspect(linear, sightings)][:WEIGHTS_MAX]
    if not suspects:
        return
    declared = declaration(checkpoint.quantization)[0] if checkpoint.quantization else None
    with OpenFiles(checkpoint.source) as opened:
        for linear in suspects:
            tensors = [*linear.scales.values(), *([linear.weight] if linear.weight else [])]
            if all(checkpoint.readable(tensor) for tensor in tensors):
                look = _look(matrix_of(linear, declared, checkpoint.manifest), opened)
                if look is not None:
                    yield look


def _suspect(linear: Linear, sightings: Sightings) -> bool:
    if linear.kind not in BLOCKED or linear.weight is None or linear.grid is None:
        return False
    weight = linear.weight
    if weight.name not in sightings.zero_blocks and linear.grid.name not in sightings.zero_scales:
        return False
    return sightings.runs.get(weight.name) != ((0, weight.bytes),) and can_decode(linear)


def _look(matrix: Matrix, opened: OpenFiles) -> BlockLook | None:
    linear = matrix.linear
    assert linear is not None
    assert linear.grid is not None
    grid = linear.grid
    cols = matrix.shape[1]
    if matrix.block[0] * cols > ROW_ELEMENTS_MAX or (
        len(linear.shape) > 2 and linear.shape[-2] % matrix.block[0]
    ):
        return None
    scales = scale_values(grid, opened.bytes(grid, 0, grid.bytes)).reshape(-1, grid.shape[-1])
    live = np.concatenate(
        [_live(matrix, opened, first, last) for first, last in strips(matrix, matrix.block[0])]
    )
    return BlockLook(matrix, scales, live) if live.shape == scales.shape else None


def block_faults(look: BlockLook) -> Iterator[Finding]:
    linear, tensor = look.matrix.linear, look.matrix.tensor
    assert linear is not None
    assert linear.grid is not None
    name, file = linear.grid.name, linear.grid.file
    if (bad := look.nothing & look.live).any():
        expected = "a scale above zero over codes that are not zero"
        yield Finding("zero-scale", file, name, expected, _where(bad))
    if (bad := look.empty).any():
        yield Finding("zero-codes", tensor.file, tensor.name, "codes under a live scale", _where(bad))


def _live(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> NDArray[np.bool_]:
    """Whether a block has a code that is not zero: bool [block rows, block columns] of rows [first, last)."""
    assert matrix.linear is not None
    codes = decoded(matrix, opened, first, last)[1]
    magnitude = codes & (0x7 if matrix.linear.kind in PACKED_CODES else 0x7F)
    across = np.maximum.reduceat(magnitude, np.arange(0, magnitude.shape[1], matrix.block[1]), axis=1)
    return np.asarray(np.maximum.reduceat(across, np.arange(0, last - first, matrix.block[0]), axis=0) > 0)


PACKED_CODES = ("mxfp4", "gpt-oss", "nvfp4", "ct-nvfp4")


def _where(bad: NDArray[np.bool_]) -> str:
    row, column = np.argwhere(bad)[0]
    return f"{int(bad.sum()):,} of {bad.size:,} blocks, the first at [{row}, {column}]"
