"""Weights as numbers, strip by strip: floats as they are, codes decoded with their scales.

Written from the formats alone. A weight of more than two axes is taken as a matrix [product of the others, last].
Values are f32; a code times its scale is one f32 multiplication, as the engines do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES
from shardmill.verify.formats.blocks import Block
from shardmill.verify.formats.schemes import FLOATS, PACKED, SECOND, Linear
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.source import Reader, Source

F32: TypeAlias = NDArray[np.float32]
COLUMNS_MAX = 1 << 22  # a row is the least that is held
STRIP_ELEMENTS = 1 << 17  # so that the arrays of a strip stay in the cache

DECODABLE = (
    "fp8-block",
    "fp8-tensor",
    "fp8-channel",
    "fp8-grid",
    "fp8-pbwo",
    "comfy-fp8",
    "nvfp4",
    "ct-nvfp4",
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that can be read as numbers: float, or codes with `linear` and `block` to decode them."""

    tensor: Tensor
    linear: Linear | None = None
    block: Block = (1, 1)

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.linear.shape if self.linear is not None else self.tensor.shape
        return prod(shape[:-1]), shape[-1] if shape else 1

    @property
    def tensors(self) -> list[Tensor]:
        """All that its values are made of."""
        return [self.tensor, *(self.linear.scales.values() if self.linear is not None else ())]


def can_decode(linear: Linear) -> bool:
    """Whether this module knows the format, and its scales are complete and of the right shape."""
    if linear.kind not in DECODABLE or linear.weight is None or linear.weight.dtype == "F8_E5M2":
        return False
    needed = SECOND.get(linear.kind)
    if linear.grid is None or (needed is not None and needed not in linear.scales):
        return False
    return len(linear.shape) >= 2 and 0 < linear.shape[-1] <= COLUMNS_MAX


class OpenFiles:
    """A source with its files held open, so that many small reads are cheap. For one thread."""

    def __init__(self, source: Source) -> None:
        self._source, self._readers, self._stack = source, dict[str, Reader](), ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def bytes(self, tensor: Tensor, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor's data."""
        if tensor.file not in self._readers:
            self._readers[tensor.file] = self._stack.enter_context(self._source.open(tensor.file))
        buffer = np.empty(end - begin, np.uint8)
        self._readers[tensor.file].read_into(tensor.begin + begin, buffer.data)
        return buffer

    def rows(self, tensor: Tensor, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) of a tensor taken as a matrix: u8 [rows, bytes of a row]."""
        row_bytes = DTYPE_BITS[tensor.dtype] * (tensor.shape[-1] if tensor.shape else 1) // 8
        return self.bytes(tensor, first * row_bytes, last * row_bytes).reshape(last - first, row_bytes)


def strips(matrix: Matrix, row_multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Row ranges of about STRIP_ELEMENTS, each but the last a multiple of `row_multiple` rows."""
    rows, cols = matrix.shape
    step = max(STRIP_ELEMENTS // (cols * row_multiple), 1) * row_multiple
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def values(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> F32:
    """f32 [last - first, columns]"""
    if matrix.linear is None:
        return floats(matrix.tensor, opened.rows(matrix.tensor, first, last))
    return decoded(matrix, opened, first, last)[0]


def floats(tensor: Tensor, raw: NDArray[np.uint8]) -> F32:
    """Little-endian BF16, F16 or F32 bytes as f32, the last axis shrunk accordingly."""
    assert tensor.dtype in FLOATS
    if tensor.dtype == "F32":
        return raw.view("<f4")
    if tensor.dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


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
    assert matrix.linear is not None
    raw = opened.rows(matrix.tensor, first, last)
    with np.errstate(all="ignore"):  # a faulty scale may be anything; other questions say so
        if matrix.linear.kind in PACKED:
            codes = np.empty((last - first, 2 * raw.shape[1]), np.uint8)
            codes[:, 0::2], codes[:, 1::2] = raw & 0xF, raw >> 4  # the even element lies in the low nibble
            return E2M1_VALUES[codes] * _expanded(matrix, opened, first, last), codes
        return E4M3_VALUES[raw] * _expanded(matrix, opened, first, last), raw


def _expanded(matrix: Matrix, opened: OpenFiles, first: int, last: int) -> F32:
    """The scale of each element: f32 that broadcasts to [last - first, columns]."""
    linear = matrix.linear
    assert linear is not None
    assert linear.grid is not None
    grid, (rows, cols) = linear.grid, matrix.block
    if grid.bytes * 8 == DTYPE_BITS[grid.dtype]:
        return _scalar(grid, opened)
    columns = prod(grid.shape[1:]) if linear.kind == "fp8-pbwo" else grid.shape[-1]
    if linear.kind == "fp8-channel":
        columns = 1
    row_bytes = columns * DTYPE_BITS[grid.dtype] // 8
    begin, end = first // rows, -(-last // rows)
    raw = opened.bytes(grid, begin * row_bytes, end * row_bytes).reshape(end - begin, row_bytes)
    scales = E4M3_VALUES[raw] if grid.dtype == "F8_E4M3" else _float_scales(grid, raw)
    if linear.kind == "nvfp4":
        scales = scales * _scalar(linear.scales["weight_scale_2"], opened)
    elif linear.kind == "ct-nvfp4":
        scales = scales / _scalar(linear.scales["weight_global_scale"], opened)
    tall = scales[np.arange(first, last) // rows - begin]
    return tall if columns == 1 else np.repeat(tall, cols, axis=1)[:, : matrix.shape[1]]


def _float_scales(tensor: Tensor, raw: NDArray[np.uint8]) -> F32:
    if tensor.dtype in ("F8_E8M0", "U8"):
        exponents: F32 = raw.astype(np.float32) - np.float32(127)
        return np.asarray(np.exp2(exponents), np.float32)
    return floats(tensor, raw)


def _scalar(tensor: Tensor, opened: OpenFiles) -> F32:
    raw = opened.bytes(tensor, 0, tensor.bytes)
    return _float_scales(tensor, raw)[:1]
