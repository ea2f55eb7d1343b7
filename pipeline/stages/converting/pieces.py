"""Converting a weight whose rows, or rows of blocks, are too wide to be held: in pieces, in the order of the file.

Where the target's elements share a scale over many rows or columns, a row of blocks is seen first for its scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.formats.base import Arrays, Setting
from shardmill.pipeline.stages.converting.parts import Count, Output, Parts, columns_per, runs, spans
from shardmill.pipeline.stages.converting.weight import (
    Weight,
    changed_scales,
    codes_of,
    made_of,
    not_finite,
    numbers_of,
    output_of,
    setting_of,
)


def encoded_in_pieces(weight: Weight, amax: np.float32 | None) -> tuple[dict[str, str], dict[str, int]]:
    """Role -> digest of each output, written; and the blocks that were counted. The parent's parts are not digested."""
    setting, output, parts = setting_of(weight, amax), output_of(weight), Parts(weight.job, weight.held)
    shape = (weight.rows, weight.held.shape[-1])
    count = Count(weight.unit(shape), shape[1])
    try:
        for expert in weight.matrices:
            for begin, end in _bands(weight, parts):
                _encode_band(_Band(weight, parts, expert, begin, end), setting, output, count)
    finally:
        parts.close()
    return output.digests(), count.counts() if weight.counted else {}


def _bands(weight: Weight, parts: Parts) -> Iterator[tuple[int, int]]:
    """Rows of blocks of the target; else runs of rows."""
    if weight.target.in_pieces is None:
        yield from runs(0, weight.rows, weight.held.shape[-1], parts.rows)
        return
    r = _target_block(weight)[0]
    for begin in range(0, weight.rows, r):
        yield begin, min(begin + r, weight.rows)


def _target_block(weight: Weight) -> tuple[int, int]:
    shape = (weight.rows, weight.held.shape[-1])
    r, c = weight.target.unit(shape, weight.action.params)
    return min(r, shape[0]), min(c, shape[1])


@dataclass(frozen=True, slots=True)
class _Band:
    """Some rows of one matrix, seen piece by piece."""

    weight: Weight
    parts: Parts
    expert: int
    begin: int
    end: int

    def pieces(self) -> Iterator[tuple[int, int, Arrays, NDArray[Any]]]:
        """(row, column, parts, part [k, n] of the weight), in the order of the file; rows count from the weight's."""
        weight, held = self.weight, self.weight.held
        C, shift = held.shape[-1], weight.first_row
        codes = codes_of(weight.job)
        target = columns_per(weight.target, weight.parts, (weight.rows, C), weight.action.params)
        across = list(spans(C, (*self.parts.units, *target.values()), _target_block(weight)[1]))
        for first, last in runs(shift + self.begin, shift + self.end, C, self.parts.rows):
            low, high = self.parts.aligned(first, last)
            for col, stop in across:
                weight.job.watch.done(0)
                arrays = self.parts.read(self.expert, (low, high), (col, stop))
                numbers = numbers_of(held, arrays, codes)
                yield first - shift, col, arrays, numbers[first - low : last - low]

    def numbers(self) -> Iterator[tuple[int, int, NDArray[Any]]]:
        for row, col, _, part in self.pieces():
            yield row - self.begin, col, part


def _encode_band(band: _Band, setting: Setting, output: Output, count: Count) -> None:
    weight, C = band.weight, band.weight.held.shape[-1]
    matrix, in_pieces = band.expert - weight.matrices.start, weight.target.in_pieces
    chosen = _chosen(band, setting)
    count.begin(band.begin, band.end)
    for row, col, arrays, part in band.pieces():
        rows, cols = (row, row + len(part)), (col, col + part.shape[1])
        if in_pieces is None:
            try:
                made = made_of(weight, arrays, part, setting)
            except NonFinite as fault:
                raise not_finite(weight, row, col, fault) from None
            output.put(matrix, rows, cols, made)
        else:
            c = _target_block(weight)[1]
            own = np.ascontiguousarray(chosen[:, col // c : -(-cols[1] // c)])
            made = {"codes": in_pieces.encode(part, own, setting)}
            output.put(matrix, rows, cols, made)
            made["scales"] = in_pieces.stored(own, setting)
        if weight.counted:
            count.add(row, col, widened(part) != weight.target.decode(made, setting))
            if in_pieces is None or (row == band.begin and _is_whole(weight, col)):
                count.changed += changed_scales(weight, arrays, made)
        weight.job.watch.done(sum(each.nbytes for each in arrays.values()))
    if in_pieces is not None:
        output.put(matrix, (band.begin, band.end), (0, C), {"scales": in_pieces.stored(chosen, setting)})
    count.end()


def _is_whole(weight: Weight, col: int) -> bool:
    """Whether a block begins at a column, of the same form in the parent."""
    shape = (weight.rows, weight.held.shape[-1])
    unit = weight.target.unit(shape, weight.action.params)
    return unit == weight.held.form.unit(shape, weight.held.params) and col % unit[1] == 0


def _chosen(band: _Band, setting: Setting) -> F32:
    """The scales f32 [1, ceil(C/c)] of a row of blocks; none where the format has none such."""
    in_pieces = band.weight.target.in_pieces
    if in_pieces is None:
        return np.empty((1, 0), np.float32)
    try:
        return in_pieces.choose(band.numbers, (band.end - band.begin, band.weight.held.shape[-1]), setting)
    except NonFinite as fault:
        raise not_finite(band.weight, band.begin, 0, fault) from None


def wide_rows(weight: Weight) -> Iterator[tuple[int, int, Arrays]]:
    """(row, end, parts of some columns of these rows) of the weight's first matrix, for a survey."""
    parts = Parts(weight.job, weight.held)
    try:
        for begin, end in runs(0, weight.rows, weight.held.shape[-1], parts.rows):
            band = _Band(weight, parts, weight.matrices.start, begin, end)
            for _, _, arrays, _ in band.pieces():
                yield begin, end, arrays
    finally:
        parts.close()
