"""GPTQ's and AWQ's weights as numbers. They are stored [inputs, outputs], so that a strip is of inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.forms.codes import AWQ_ORDER, words
from shardmill.verify.formats.linear import F32, U8, Linear, bits_of
from shardmill.verify.formats.matrices import floats
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles

INPUTS = 32  # whole words of every width of code


def can_decode_by_inputs(linear: Linear) -> bool:
    """Whether codes, zeros and scales are there, of shapes that fit, and of a width that fills words."""
    grid, zeros = linear.scales.get("scales"), linear.extras.get("qzeros")
    if linear.kind not in ("gptq", "awq") or linear.weight is None or grid is None or zeros is None:
        return False
    bits, (inputs, outputs) = bits_of(linear), (*linear.shape, 0, 0)[:2]
    shapes = zeros.shape == (grid.shape[0], outputs * bits // 32) and grid.shape[-1] == outputs
    return bits in (2, 4, 8) and len(grid.shape) == 2 and shapes and 0 < grid.shape[0] <= inputs


def decoded_by_inputs(linear: Linear, opened: OpenFiles, first: int, last: int) -> F32:
    """Inputs [first, last), multiples of INPUTS: f32 [last - first, outputs], a code less its zero, times its scale.

    GPTQ's old layout stores the zero less one (AutoGPTQ's `qzeros -= 1`); AWQ stores it.
    """
    weight, grid, zeros = linear.weight, linear.scales["scales"], linear.extras["qzeros"]
    assert weight is not None
    bits = bits_of(linear)
    scales = floats(grid, opened.rows(grid, 0, grid.shape[0]))
    stored = words(opened.rows(zeros, 0, zeros.shape[0]), bits)
    places = _groups(linear, grid, opened, first, last)
    if linear.kind == "awq":
        codes = _in_order(words(opened.rows(weight, first, last), bits))
        return (codes.astype(np.float32) - _in_order(stored)[places]) * scales[places]
    rows = opened.rows(weight, first * bits // 32, last * bits // 32).view("<u4")
    codes = words(np.ascontiguousarray(rows.T).view(np.uint8), bits).T
    return (codes.astype(np.float32) - stored[places].astype(np.float32) - np.float32(1)) * scales[places]


def _groups(linear: Linear, grid: Tensor, opened: OpenFiles, first: int, last: int) -> NDArray[np.int64]:
    """The group of each input: from g_idx, or, without one or with a senseless one, in their order."""
    in_order = np.arange(first, last) // -(-linear.shape[0] // grid.shape[0])
    index = linear.extras.get("g_idx")
    if index is None or index.dtype != "I32" or index.shape != (linear.shape[0],):
        return in_order
    places = opened.bytes(index, first * 4, last * 4).view("<i4").astype(np.int64)
    return places if places.min() >= 0 and places.max() < grid.shape[0] else in_order


def _in_order(codes: U8) -> U8:
    """Columns in their own order again: nibble i of a word holds its column AWQ_ORDER[i]."""
    order = np.argsort(AWQ_ORDER)
    return codes.reshape(codes.shape[0], -1, 8)[:, :, order].reshape(codes.shape)
