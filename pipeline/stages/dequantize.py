"""Stage `dequantize`: what starts from the parent's block FP8. Codes become BF16, or get the scales of smaller blocks.

Strip by strip, as in `quantize`; a weight's scales may lie in another file of the parent than its codes. Scales that
are not finite and positive, and codes that are NaN, are refused with their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.block_fp8_to_bf16 import decode_to_bf16
from shardmill.kernels.formats import F32, bf16_to_f32
from shardmill.kernels.pieces import column_spans
from shardmill.pipeline.actions import Dequantize, Reblock
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 19  # of codes; their BF16 takes twice that
ROW_BYTES_MAX = 8 << 20  # a row of blocks that has more codes is not held
PIECE_COLUMNS = 1 << 17  # of a row that is decoded in parts
SCALES_BYTES_MAX = 16 << 20  # more are not held


def dequantize(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each piece that is made from the parent's block FP8; its bytes are in place."""
    made = {}
    for piece in pieces:
        if isinstance(piece.action, Dequantize):
            made[piece.ref.name] = _values(job, piece, piece.action)
        elif isinstance(piece.action, Reblock) and piece.part == "scales":
            made[piece.ref.name] = _finer_scales(job, piece, piece.action)
    return made


def _values(job: ShardJob, piece: Piece, action: Dequantize) -> Decoded:
    """Codes [R, C] and scales -> BF16 [R, C] in the sink."""
    source, block = piece.source, (action.block.rows, action.block.cols)
    C = source.shape[1]
    assert piece.scales is not None
    scales = _Scales(job, piece.scales)
    codes_buffer = job.worker.buffers.get("codes", prod(_rows_held(source, block)))
    values_buffer = job.worker.buffers.get("values", 2 * len(codes_buffer))
    codes_hash, values_hash = TensorHash(), TensorHash()
    file, source_place = job.place(source)
    for row, col, rows, cols in _parts(source, block):
        job.watch.done(0)
        codes, values = codes_buffer[: rows * cols], values_buffer[: 2 * rows * cols]
        file.read(codes, source_place + row * C + col)
        codes_hash.update(codes)
        grid = scales.rows(row // block[0], -(-(row + rows) // block[0]))
        own = np.ascontiguousarray(grid[:, col // block[1] : -(-(col + cols) // block[1])])
        try:
            decode_to_bf16(_matrix(codes, np.uint8, cols), own, block, _matrix(values, np.uint16, cols))
        except NonFinite as fault:
            raise BuildError(
                f"{source.shard}: {source.name}: row {row + fault.row}, column {col + fault.col} decodes to "
                f"{fault.value}; fix the parent checkpoint, or keep this tensor's family"
            ) from None
        values_hash.update(values)
        job.sink.write(values, job.plan.header.data_begin + piece.ref.begin + 2 * (row * C + col))
        job.watch.done(len(codes))
    sources = {source.name: codes_hash.hexdigest(), piece.scales.name: scales.digest()}
    return Decoded(values_hash.hexdigest(), sources)


def _rows_held(source: TensorRef, block: tuple[int, int]) -> tuple[int, int]:
    """How many rows are decoded together, and of how many columns: rows of blocks where they can be held."""
    R, C = source.shape
    whole = min(block[0], R)
    if whole * C <= ROW_BYTES_MAX:
        return min(max(1, STRIP_BYTES // (whole * C)) * block[0], R), C
    return (max(1, STRIP_BYTES // C), C) if C <= PIECE_COLUMNS else (1, PIECE_COLUMNS)


def _parts(source: TensorRef, block: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """(row, column, rows, columns) in the order of the file, each of whole rows of blocks or in one."""
    R, C = source.shape
    step, most = _rows_held(source, block)
    home = max(step, block[0])
    for begin in range(0, R, home):
        for row in range(begin, min(begin + home, R), step):
            rows = min(step, min(begin + home, R) - row)
            for col, end in column_spans(0, C, block[1], most) if most < C else [(0, C)]:
                yield row, col, rows, end - col


def _finer_scales(job: ShardJob, piece: Piece, action: Reblock) -> Decoded:
    """The parent's scales, each repeated over the smaller blocks that lie in its own; F32 in the sink."""
    assert piece.scales is not None
    scales = _Scales(job, piece.scales)
    rows, cols = piece.ref.shape
    down, across = (
        action.source_block.rows // action.block.rows,
        action.source_block.cols // action.block.cols,
    )
    digest, place = TensorHash(), job.plan.header.data_begin + piece.ref.begin
    together = max(1, STRIP_BYTES // (4 * cols))
    for begin in range(0, rows, down):
        finer = scales.rows(begin // down, begin // down + 1).repeat(across, axis=1)[:, :cols]
        for row in range(begin, min(begin + down, rows), together):
            count = min(together, begin + down - row, rows - row)
            data = finer.repeat(count, axis=0).astype("<f4", copy=False).tobytes()
            digest.update(data)
            job.sink.write(data, place + 4 * row * cols)
    return Decoded(digest.hexdigest(), {piece.scales.name: scales.digest()})


class _Scales:
    """The parent's scales of a weight, f32 [ceil(R/r), ceil(C/c)]: held where they are few, else read row by row."""

    def __init__(self, job: ShardJob, ref: TensorRef) -> None:
        self._job, self._ref = job, ref
        self._hash = TensorHash()
        self._held = self._read(0, ref.shape[0]) if ref.bytes <= SCALES_BYTES_MAX else None
        self._last: tuple[tuple[int, int], F32] | None = None

    def rows(self, begin: int, end: int) -> F32:
        """Rows [begin, end), f32 [end - begin, m], finite and positive. They must be asked for in order."""
        if self._held is not None:
            return self._held[begin:end]
        if self._last is None or self._last[0] != (begin, end):
            self._last = None  # not two at once
            self._last = ((begin, end), self._read(begin, end))
        return self._last[1]

    def digest(self) -> str:
        """That of the bytes of all rows, which have been read."""
        return self._hash.hexdigest()

    def _read(self, begin: int, end: int) -> F32:
        ref = self._ref
        row = ref.bytes // ref.shape[0]
        data = self._job.read(ref, begin * row, end * row)
        self._hash.update(data)
        bf16 = ref.dtype == "BF16"
        flat = bf16_to_f32(np.frombuffer(data, np.uint16)) if bf16 else np.frombuffer(data, np.float32)
        scales: F32 = flat.reshape(-1, ref.shape[1])
        sound = np.isfinite(scales) & (scales > 0)
        if not sound.all():
            i, j = np.argwhere(~sound)[0]
            raise BuildError(
                f"{ref.shard}: {ref.name}: the scale of block [{begin + i}, {j}] is {scales[i, j]}, a scale must be "
                f"finite and positive; fix the parent checkpoint"
            )
        return scales


def _matrix(buffer: memoryview, dtype: Any, cols: int) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype).reshape(-1, cols)
