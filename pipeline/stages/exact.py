"""Counting what a conversion keeps: a block is exact where each of its numbers is decoded as it was."""

from __future__ import annotations

import numpy as np

from shardmill.kernels.formats import F32


def exact_blocks(values: F32, decoded: F32, unit: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a strip [rows, C] has, and in how many of them every number is decoded as it was."""
    r, c = unit
    differ = (values != decoded).astype(np.uint8)
    rows = np.maximum.reduceat(differ, np.arange(0, differ.shape[0], r), axis=0)
    blocks = np.maximum.reduceat(rows, np.arange(0, differ.shape[1], c), axis=1)
    return blocks.size, int((blocks == 0).sum())
