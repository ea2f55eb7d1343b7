"""Probing: is a family that is about to be quantized a BF16 copy of block FP8? A few blocks tell.

A block counts as native where kernels.recover proves that some scale and codes decode to it bit for bit. Fresh
weights never do, so a share between the two means another block size or a grid that starts elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite, encoder
from shardmill.pipeline.container.files import Source
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.types import BlockShape, Parent, TensorRef

BLOCKS_SAMPLED = 64
_PIECE_ELEMENTS = 1 << 18
_USUAL = BlockShape(128, 128)  # the block that published FP8 models have


@dataclass(frozen=True, slots=True)
class Probed:
    """How many of a family's sampled blocks of a shape are native FP8."""

    family: str
    block: BlockShape
    sampled: int
    exact: int

    def __str__(self) -> str:
        share = f"{100 * self.exact / self.sampled:.0f} % of {self.sampled} sampled blocks"
        return f"{self.family}: native FP8 at {self.block}: {share}"


def probe(plan: Plan, parent: Parent, seed: int) -> list[Probed]:
    """One Probed for each family that is quantized from BF16, at its own block and at [128,128]. Reads a few MB.

    Blocks are drawn by `seed`, so that a probe can be done again.
    """
    families: Mapping[tuple[str, BlockShape], list[TensorRef]] = defaultdict(list)
    for name, (family, action) in plan.conversions.items():
        ref = parent.tensors[name]
        if action.encodes and ref.dtype == "BF16":
            for block in dict.fromkeys((action.block, _USUAL)):
                families[family, block].append(ref)
    draws = np.random.SeedSequence(seed).spawn(len(families))
    return [
        _probed(family, block, refs, parent, np.random.Generator(np.random.PCG64(draw)))
        for ((family, block), refs), draw in zip(families.items(), draws, strict=True)
    ]


def _probed(
    family: str, block: BlockShape, refs: list[TensorRef], parent: Parent, draw: np.random.Generator
) -> Probed:
    exact = 0
    for _ in range(BLOCKS_SAMPLED):
        ref = refs[int(draw.integers(len(refs)))]
        rows, cols = block.grid(ref.shape)
        row, col = int(draw.integers(rows)), int(draw.integers(cols))
        try:
            exact += _is_native(ref, block, row, col, parent)
        except NonFinite as fault:
            raise CheckpointError(
                f"{ref.shard}: {ref.name}: the weight at row {row * block.rows + fault.row}, column "
                f"{col * block.cols + fault.col} is {fault.value}; fix the parent checkpoint, "
                f"or keep this tensor's family"
            ) from None
    return Probed(family, block, BLOCKS_SAMPLED, exact)


def _is_native(ref: TensorRef, block: BlockShape, row: int, col: int, parent: Parent) -> bool:
    """Whether one block of `ref`, BF16 and cut at the tensor's edges, is a copy of block FP8. It is read in pieces."""
    R, C = ref.shape
    header = next(header for header in parent.headers if header.shard == ref.shard)
    top, left = row * block.rows, col * block.cols
    rows, cols = min(block.rows, R - top), min(block.cols, C - left)
    width = min(cols, _PIECE_ELEMENTS)
    height = max(1, _PIECE_ELEMENTS // width)
    with Source(parent.path(ref.shard), parent.stats[ref.shard]) as source:

        def pieces() -> Iterator[tuple[int, int, NDArray[np.uint16]]]:
            for first in range(0, rows, height):
                for begin in range(0, cols, width):
                    part = np.empty((min(height, rows - first), min(width, cols - begin)), np.uint16)
                    for place, line in enumerate(part):
                        element = (top + first + place) * C + left + begin
                        source.read(line.data.cast("B"), header.data_begin + ref.begin + 2 * element)
                    yield first, begin, part

        counts = encoder("recover/1", (rows, cols), "numpy").choose(pieces, rows, 1)[1]
    return counts["exact_blocks"] == 1
