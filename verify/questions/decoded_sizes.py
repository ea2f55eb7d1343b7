"""How large weights are once decoded: the root mean square of a few rows of each, quantized or not.

Every weight is looked at where there are up to WEIGHTS_MAX; of more, a spread of each kind. Rows come from the
middle of four quarters, so that no single block speaks for a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.by_inputs import BY_INPUTS, INPUTS, decoded_by_inputs
from shardmill.verify.formats.declared import Declaration
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import F32, FLOATS, Linear
from shardmill.verify.formats.matrices import (
    Matrix,
    can_decode,
    matrix_of,
    matrix_of_parts,
    matrix_with_state,
    values,
)
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import UnreadableError

WEIGHTS_MAX = 8_192
FLOATS_MAX = 256
SAMPLES = 4
SAMPLE_ELEMENTS = 4_096
ROW_ELEMENTS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """Of one weight, decoded: f64 root mean square and largest magnitude of the rows looked at."""

    tensor: Tensor
    module: str
    quantized: bool
    rms: float
    largest: float


def sizes_of(
    checkpoint: Checkpoint, linears: Mapping[str, Linear], declared: Declaration | None
) -> list[Size]:
    """Sizes in the order of names; a weight that can't be decoded or read has none."""
    found: list[Size] = []
    weights = [
        linear
        for linear in linears.values()
        if can_decode(linear) or linear.kind in (*BY_ELEMENTS, "fp8-parts")
    ]
    with OpenFiles(checkpoint.source) as opened:
        for linear in _spread(weights, WEIGHTS_MAX):
            tensors = [
                *linear.scales.values(),
                *linear.extras.values(),
                *([linear.weight] if linear.weight else []),
            ]
            if linear.weight is not None and all(checkpoint.readable(tensor) for tensor in tensors):
                found += _measured(
                    linear.weight, linear.module, True, _rows_of(linear, declared, checkpoint, opened)
                )
        for tensor in _floats(checkpoint, linears):
            found += _measured(tensor, tensor.name, False, _float_rows(tensor, opened))
    return found


def _spread(weights: list[Linear], at_most: int) -> list[Linear]:
    step = -(-len(weights) // at_most) if weights else 1
    return weights[::step]


def _floats(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> Iterable[Tensor]:
    """Float matrices, a spread of them: what the model has that no quantizer touched."""
    matrices = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in FLOATS
        and name.endswith(".weight")
        and len(tensor.shape) == 2
        and min(tensor.shape) > 1
        if checkpoint.readable(tensor) and tensor.shape[1] <= ROW_ELEMENTS_MAX
    ]
    return matrices[:: max(-(-len(matrices) // FLOATS_MAX), 1)]


def _measured(tensor: Tensor, module: str, quantized: bool, strips: Iterator[F32]) -> list[Size]:
    squares, largest, count = 0.0, 0.0, 0
    try:
        for strip in strips:
            with np.errstate(all="ignore"):
                wide = strip.astype(np.float64)
                squares += float(np.multiply(wide, wide).sum())
                largest = max(largest, float(np.abs(wide).max(initial=0)))
            count += strip.size
    except UnreadableError:
        return []
    return [Size(tensor, module, quantized, float(np.sqrt(squares / count)), largest)] if count else []


def _rows_of(
    linear: Linear, declared: Declaration | None, checkpoint: Checkpoint, opened: OpenFiles
) -> Iterator[F32]:
    if linear.kind in BY_INPUTS:
        as_stored = bool(declared and declared.zeros_as_stored)
        for first in _places(linear.shape[0] // INPUTS, 1):
            yield decoded_by_inputs(linear, opened, first * INPUTS, (first + 1) * INPUTS, as_stored)
        return
    if linear.kind in BY_ELEMENTS:
        with_state = matrix_with_state(linear, opened)
        if with_state is not None:
            yield from _matrix_rows(with_state, opened)
        return
    if linear.kind == "fp8-parts":
        fused = matrix_of_parts(linear, checkpoint.config or {})
        if fused is not None:
            yield from _matrix_rows(fused, opened)
        return
    yield from _matrix_rows(matrix_of(linear, declared, checkpoint.manifest), opened)


def _float_rows(tensor: Tensor, opened: OpenFiles) -> Iterator[F32]:
    yield from _matrix_rows(Matrix(tensor), opened)


def _matrix_rows(matrix: Matrix, opened: OpenFiles) -> Iterator[F32]:
    rows, cols = matrix.shape
    height = max(min(SAMPLE_ELEMENTS // max(cols, 1), rows), 1)
    if cols > ROW_ELEMENTS_MAX:
        return
    for first in _places(rows, height):
        yield values(matrix, opened, first, min(first + height, rows))


def _places(rows: int, height: int) -> list[int]:
    """The first rows of up to SAMPLES stretches, each in the middle of its part."""
    if rows <= SAMPLES * height:
        return list(range(0, rows, height))
    return [(2 * part + 1) * rows // (2 * SAMPLES) - height // 2 for part in range(SAMPLES)]


def by_kind(sizes: Iterable[Size]) -> dict[str, list[Size]]:
    """The same module of other layers and experts together."""
    kinds: dict[str, list[Size]] = {}
    for size in sizes:
        kinds.setdefault(kind_of(size.module), []).append(size)
    return kinds
