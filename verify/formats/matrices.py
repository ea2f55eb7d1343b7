"""Weights as numbers, strip by strip: floats as they are, codes decoded with their scales.

Written from the formats alone. A weight of more than two axes is taken as a matrix [product of the others, last].
Values are f32; a code times its scale is one f32 multiplication, as the engines do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.blocks import Block, block_of, fitting_block
from shardmill.verify.formats.by_elements import State, decoded_elements, state_of
from shardmill.verify.formats.by_inputs import (
    BY_INPUTS,
    INPUTS,
    can_decode_by_inputs,
    decoded_rows,
    groups_of,
)
from shardmill.verify.formats.declared import Declaration
from shardmill.verify.formats.forms.codes import e5m2
from shardmill.verify.formats.forms.whole_fp8 import rows_of_parts
from shardmill.verify.formats.linear import SECOND, Linear, bits_of, ones
from shardmill.verify.formats.opened import floats, scalar, scale_values
from shardmill.verify.formats.table import FORMS
from shardmill.verify.formats.zero_points import by_columns, fits, zeros_of
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.manifest import Manifest
from shardmill.verify.reading.open_files import OpenFiles

F32: TypeAlias = NDArray[np.float32]
COLUMNS_MAX = 1 << 22  # a row is the least that is held
STRIP_ELEMENTS = 1 << 17  # so that the arrays of a strip stay in the cache
WIDE_STRIP_ELEMENTS = 1 << 20  # where each strip is a read in every row of the file


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that can be read as numbers: float, or codes with `linear` and `block` to decode them."""

    tensor: Tensor
    linear: Linear | None = None
    block: Block = (1, 1)
    bits: int = 0  # of an integer code in words, where the config says it
    transposed: bool = False  # of floats: the tensor holds [..., columns, rows]
    zeros_as_stored: bool = False  # of GPTQ's second layout
    state: State | None = None  # of bitsandbytes' codes, which their file holds
    parts: tuple[int, ...] = ()  # rows under each scale of a fused weight

    @property
    def shape(self) -> tuple[int, int]:
        if self.state is not None:
            return prod(self.state.shape[:-1]), self.state.shape[-1]
        shape = self.linear.shape if self.linear is not None else self.tensor.shape
        if self.linear is not None and self.linear.kind in BY_INPUTS:
            return shape[1], shape[0]
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.linear is not None and self.linear.kind == "int-pack" and shape:
            shape = (*shape[:-1], shape[-1] * 4 // self.word_bits)
        return prod(shape[:-1]), shape[-1] if shape else 1

    @property
    def word_bits(self) -> int:
        """Bits of a code in I32 words; 4 unless the config or the shapes say more."""
        if self.linear is not None and self.linear.kind in ("gptq", "awq"):
            return bits_of(self.linear)
        return self.bits or 4

    @property
    def tensors(self) -> list[Tensor]:
        """All that its values are made of."""
        if self.linear is None:
            return [self.tensor]
        return [self.tensor, *self.linear.scales.values(), *self.linear.extras.values()]


def matrix_of(linear: Linear, declared: Declaration | None, manifest: Manifest | None = None) -> Matrix:
    """A quantized weight with the block and the bits that the checkpoint says or shows."""
    assert linear.weight is not None
    bits = declared.bits if declared is not None and declared.bits in (4, 8) else 0
    matrix = Matrix(linear.weight, linear, (1, 1), bits)
    if linear.kind in BY_INPUTS:
        group, as_stored = (
            block_of(linear, declared, manifest)[0],
            bool(declared and declared.zeros_as_stored),
        )
        return Matrix(linear.weight, linear, (1, group), zeros_as_stored=as_stored)
    block = fitting_block(linear, declared, manifest)
    if linear.kind == "int-pack" and bits == 8:
        block = (block[0], max(block[1] // 2, 1))
    return Matrix(linear.weight, linear, block, bits) if block != matrix.block else matrix


def matrix_with_state(linear: Linear, opened: OpenFiles) -> Matrix | None:
    """A weight of bitsandbytes' with the shape and the block that its file states; None where it states none."""
    state = state_of(linear, opened)
    if state is None:
        return None
    assert linear.weight is not None
    wide = state.block if not state.shape[-1] % state.block else state.shape[-1]
    return Matrix(linear.weight, linear, (1, wide), state=state)


def matrix_of_parts(linear: Linear, config: Mapping[str, Any]) -> Matrix | None:
    """A fused FP8 weight with a scale for each part; None where the config doesn't say where a part ends."""
    parts = rows_of_parts(linear, config)
    if linear.weight is None or not parts:
        return None
    return Matrix(linear.weight, linear, (1, linear.shape[-1]), parts=parts)


def can_decode(linear: Linear) -> bool:
    """Whether this module knows the format [..., rows, columns], and its scales are complete and of the right shape."""
    if linear.kind in BY_INPUTS:
        return can_decode_by_inputs(linear)
    form, grid = FORMS.get(linear.kind), linear.grid
    if (
        form is None
        or form.unpack is None
        or linear.weight is None
        or grid is None
        or linear.kind == "fp8-parts"
    ):
        return False
    if any(leaf not in linear.scales for leaf in form.needs[1:]) or form.grid(linear, grid):
        return False
    if linear.kind == "int-pack" and not fits(linear):
        return False
    others = [linear.scales[leaf] for leaf in form.needs[1:]]
    if grid.dtype not in form.scale_dtypes or not all(_is_total(linear, other) for other in others):
        return False
    return len(linear.shape) >= 2 and 0 < linear.shape[-1] <= COLUMNS_MAX and linear.shape[-2] > 0


def strips(matrix: Matrix, row_multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Row ranges of about STRIP_ELEMENTS, each but the last a multiple of `row_multiple` rows."""
    rows, cols = matrix.shape
    elements = STRIP_ELEMENTS
    if matrix.linear is not None and matrix.linear.kind in BY_INPUTS:
        elements, row_multiple = WIDE_STRIP_ELEMENTS, INPUTS
    step = max(elements // (cols * row_multiple), 1) * row_multiple
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def values(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> F32:
    """f32 [last - first, columns]"""
    if matrix.transposed:
        return _across(matrix.tensor, opened, first, last)
    if matrix.linear is None:
        return floats(matrix.tensor, opened.rows(matrix.tensor, first, last))
    return decoded(matrix, opened, first, last)[0]


def _across(tensor: Tensor, opened: OpenFiles, first: int, last: int) -> F32:
    """Rows [first, last) of the weight that is stored transposed: a short read in each of the stored rows."""
    stored, rows, width = tensor.shape[-2], tensor.shape[-1], DTYPE_BITS[tensor.dtype] // 8
    strips = []
    while first < last:
        bank, begin = divmod(first, rows)
        end = min(begin + last - first, rows)
        places = (((bank * stored + row) * rows + begin) * width for row in range(stored))
        raw = np.stack([opened.bytes(tensor, place, place + (end - begin) * width) for place in places])
        strips.append(floats(tensor, raw).T)
        first += end - begin
    return np.ascontiguousarray(np.concatenate(strips))


def _is_total(linear: Linear, scale: Tensor) -> bool:
    """Whether a scale of scales is one number, or one a matrix of a bank, or two: of gate's rows and of up's."""
    leading = linear.shape[:-2]
    halves = len(linear.shape) > 2 and not linear.shape[-2] % 2
    shapes = (leading, (*leading, 1), *(((*leading, 2),) if halves else ()))
    return scale.dtype == "F32" and (ones(scale.shape) or scale.shape in shapes)


def largest(matrix: Matrix, opened: OpenFiles) -> np.float32:
    """The largest magnitude of a whole weight; NaN takes no part."""
    return np.float32(
        max(float(np.nanmax(np.abs(values(matrix, opened, *strip)), initial=0)) for strip in strips(matrix))
    )


def rounded_as(tensor: Tensor, values: F32) -> F32:
    """f32 values rounded to a float tensor's dtype (nearest, ties to even), as f32; codes' values stay."""
    if tensor.dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if tensor.dtype != "BF16":
        return values
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (rounded.astype(np.uint32) << np.uint32(16)).view(np.float32)


def decoded(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> tuple[F32, NDArray[np.uint8]]:
    """(values, codes) of rows [first, last); codes one a byte."""
    linear = matrix.linear
    assert linear is not None
    if linear.kind in BY_INPUTS:
        return decoded_rows(linear, opened, first, last, matrix.zeros_as_stored)
    if matrix.state is not None:
        return decoded_elements(linear, matrix.state, opened, first, last)
    unpack = e5m2 if matrix.tensor.dtype == "F8_E5M2" else FORMS[linear.kind].unpack
    assert unpack is not None
    raw = opened.bytes(matrix.tensor, first * _row_bytes(matrix), last * _row_bytes(matrix))
    with np.errstate(all="ignore"):  # a faulty scale may be anything; other questions say so
        values, codes = unpack(raw.reshape(last - first, -1), matrix.word_bits)
        if linear.kind == "int-pack":
            values = _less_zeros(matrix, values, opened, first, last)
        return values * _expanded(matrix, opened, first, last), codes


def column_order(matrix: Matrix, opened: OpenFiles) -> NDArray[np.int64] | None:
    """i64 [columns]: the columns by the groups that share a scale; None where groups follow one another."""
    linear = matrix.linear
    if linear is None:
        return None
    if linear.kind == "gptq":
        groups = groups_of(linear, opened, 0, linear.shape[0])
    elif "weight_g_idx" in linear.extras:
        groups = by_columns(
            linear, np.arange(linear.scales["weight_scale"].shape[-1], dtype=np.float32)[None], 1, matrix.shape[1],
            opened.bytes,
        )[0].astype(np.int64)  # fmt: skip
    else:
        return None
    return None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable")


def _less_zeros(matrix: Matrix, values: F32, opened: OpenFiles, first: int, last: int) -> F32:
    linear = matrix.linear
    assert linear is not None
    zeros = zeros_of(linear, matrix.word_bits, first, last, opened.bytes)
    if zeros is None:
        return values
    return values - by_columns(linear, zeros, matrix.block[1], matrix.shape[1], opened.bytes)


def _row_bytes(matrix: Matrix) -> int:
    rows = matrix.shape[0]
    return matrix.tensor.bytes // max(rows, 1)


def _expanded(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> F32:
    """The scale of each element: f32 that broadcasts to [last - first, columns]."""
    linear = matrix.linear
    assert linear is not None
    assert linear.grid is not None
    grid, cols = linear.grid, matrix.block[1]
    if ones(grid.shape):
        return _seconded(linear, scalar(grid, opened), opened, first, last)
    places, columns = _scale_rows(matrix, grid, first, last)
    width = columns * DTYPE_BITS[grid.dtype] // 8
    begin, end = int(places[0]), int(places[-1]) + 1
    raw = opened.bytes(grid, begin * width, end * width).reshape(end - begin, width)
    tall = _seconded(linear, scale_values(grid, raw)[places - begin], opened, first, last)
    if linear.kind == "int-pack" and columns > 1:
        return by_columns(linear, tall, cols, matrix.shape[1], opened.bytes)
    return tall if columns == 1 else np.repeat(tall, cols, axis=1)[:, : matrix.shape[1]]


def _scale_rows(matrix: Matrix, grid: Tensor, first: int, last: int) -> tuple[NDArray[np.int64], int]:
    """(the row of the grid that each row of the matrix takes, the grid's columns), the grid as a matrix too."""
    linear = matrix.linear
    assert linear is not None
    high = linear.shape[-2]  # of one matrix of a bank
    banks = max(matrix.shape[0] // max(high, 1), 1)
    if (linear.kind in ("fp8-channel", "int8") and prod(grid.shape) == matrix.shape[0]) or linear.kind in (
        "fp8-tensor",
        "comfy-fp8",
        "mistral-fp8",
    ):
        columns = 1
    else:
        columns = grid.shape[2] if linear.kind == "fp8-pbwo" else grid.shape[-1]
    rows = np.arange(first, last)
    if matrix.parts:
        return np.searchsorted(np.cumsum(matrix.parts), rows, side="right"), 1
    of_a_bank = prod(grid.shape) // max(columns, 1) // banks
    return rows // high * of_a_bank + rows % high // matrix.block[0], columns


def _seconded(linear: Linear, scales: F32, opened: OpenFiles, first: int, last: int) -> F32:
    """Block scales of rows [first, last), times the scale of scales, or divided by it."""
    leaf = SECOND.get(linear.kind)
    if leaf is None:
        return scales
    totals = totals_of(linear, opened, first, last)
    return scales * totals if leaf == "weight_scale_2" else scales / totals


def totals_of(linear: Linear, opened: OpenFiles, first: int, last: int) -> F32:
    """The scale of scales of rows [first, last): f32 [1], or [last - first, 1] of a bank with a number a matrix."""
    tensor = linear.scales[SECOND[linear.kind]]
    numbers = scale_values(tensor, opened.bytes(tensor, 0, tensor.bytes)).reshape(-1)
    if len(numbers) == 1:
        return numbers
    high = linear.shape[-2] * prod(linear.shape[:-2]) // len(numbers)  # rows under one number
    return numbers[np.arange(first, last) // high].reshape(-1, 1)
