"""GPTQ's and AWQ's weights as numbers: (code - zero) * scale, by the group of each input.

They are stored [inputs, outputs], so that a row of the weight is a column of the file. Words hold codes of 2, 3, 4 or 8
bits as one stream, the lowest bits first; AWQ's words hold eight outputs in an order of their own. GPTQ's first layout
stores each zero less one (AutoGPTQ's `qzeros -= 1`), `gptq_v2` and AWQ store it as it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.forms.codes import AWQ_ORDER, words
from shardmill.verify.formats.linear import F32, U8, Linear, bits_of
from shardmill.verify.formats.opened import floats
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.open_files import OpenFiles

BY_INPUTS = ("gptq", "awq")
INPUTS = 32  # whole words of every width of code
BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}


def can_decode_by_inputs(linear: Linear) -> bool:
    """Whether codes, zeros and scales are there, of shapes that fit, and of a width that fills words."""
    grid, zeros = linear.scales.get("scales"), linear.extras.get("qzeros")
    if linear.kind not in BY_INPUTS or linear.weight is None or grid is None or zeros is None:
        return False
    if any(tensor.dtype != "I32" for tensor in (linear.weight, zeros)):
        return False
    bits, (inputs, outputs) = bits_of(linear), (*linear.shape, 0, 0)[:2]
    shapes = zeros.shape == (grid.shape[0], outputs * bits // 32) and grid.shape[-1] == outputs
    whole = bits in BITS[linear.kind] and outputs * bits % 32 == inputs % INPUTS == 0 < outputs
    return whole and len(grid.shape) == 2 and shapes and 0 < grid.shape[0] <= inputs


def decoded_rows(
    linear: Linear, opened: OpenFiles, first: int, last: int, as_stored: bool = False
) -> tuple[F32, U8]:
    """(values, codes) of outputs [first, last), each [last - first, inputs]. `as_stored`: zeros of gptq_v2."""
    weight, grid, zeros = linear.weight, linear.scales["scales"], linear.extras["qzeros"]
    assert weight is not None
    bits = bits_of(linear)
    begin, end = first // INPUTS * INPUTS, -(-last // INPUTS) * INPUTS  # whole words of outputs
    asked = slice(first - begin, last - begin)
    by_group = _columns(zeros, opened, begin * bits // 32, end * bits // 32)
    if linear.kind == "awq":
        stored = _in_order(words(by_group, bits))[:, asked]
        raw = _columns(weight, opened, begin * bits // 32, end * bits // 32)
        codes = np.ascontiguousarray(_in_order(words(raw, bits))[:, asked].T)
    else:
        stored = words(by_group, bits)[:, asked]
        raw = _columns(weight, opened, first, last).view("<u4")
        codes = words(np.ascontiguousarray(raw.T).view(np.uint8), bits)
    scales = floats(grid, _columns(grid, opened, first, last))
    taken = stored.astype(np.float32)
    if linear.kind == "gptq" and not as_stored:
        taken = taken + np.float32(1)
    places = groups_of(linear, opened, 0, linear.shape[0])
    with np.errstate(all="ignore"):  # a faulty scale may be anything; other questions say so
        return (codes.astype(np.float32) - taken.T[:, places]) * scales.T[:, places], codes


def decoded_by_inputs(
    linear: Linear, opened: OpenFiles, first: int, last: int, as_stored: bool = False
) -> F32:
    """Inputs [first, last), multiples of INPUTS, of all outputs: f32 [last - first, outputs]; one read each."""
    weight, grid, zeros = linear.weight, linear.scales["scales"], linear.extras["qzeros"]
    assert weight is not None
    bits = bits_of(linear)
    scales = floats(grid, opened.rows(grid, 0, grid.shape[0]))
    stored = words(opened.rows(zeros, 0, zeros.shape[0]), bits)
    places = groups_of(linear, opened, first, last)
    with np.errstate(all="ignore"):
        if linear.kind == "awq":
            codes = _in_order(words(opened.rows(weight, first, last), bits))
            return (codes.astype(np.float32) - _in_order(stored)[places]) * scales[places]
        rows = opened.rows(weight, first * bits // 32, last * bits // 32).view("<u4")
        codes = words(np.ascontiguousarray(rows.T).view(np.uint8), bits).T
        taken = stored[places].astype(np.float32) + np.float32(not as_stored)
        return (codes.astype(np.float32) - taken) * scales[places]


def groups_of(linear: Linear, opened: OpenFiles, first: int, last: int) -> NDArray[np.int64]:
    """The group of each input: from g_idx, or, without one or with a senseless one, in their order."""
    groups = linear.scales["scales"].shape[0]
    in_order = np.arange(first, last) // -(-linear.shape[0] // groups)
    index = linear.extras.get("g_idx")
    if index is None or index.dtype != "I32" or index.shape != (linear.shape[0],):
        return in_order
    places = opened.bytes(index, first * 4, last * 4).view("<i4").astype(np.int64)
    return places if places.min() >= 0 and places.max() < groups else in_order


def _columns(tensor: Tensor, opened: OpenFiles, first: int, last: int) -> U8:
    """u8 [rows, bytes of columns first to last]"""
    width = DTYPE_BITS[tensor.dtype] // 8
    return opened.columns(tensor, first * width, last * width)


def _in_order(codes: U8) -> U8:
    """Columns in their own order again: nibble i of a word holds its column AWQ_ORDER[i]."""
    order = np.argsort(AWQ_ORDER)
    return codes.reshape(codes.shape[0], -1, 8)[:, :, order].reshape(codes.shape)
