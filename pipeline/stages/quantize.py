"""Stage `quantize`: each converting weight is read strip by strip, encoded, and codes and scales put in their place.

A strip is a whole number of block rows of about a megabyte. Where one row of blocks is too large for that, its scales
are chosen from pieces of it first, and its codes made in a further pass. So memory grows neither with a tensor's rows
nor with its columns or its blocks; and neither that nor the number of workers changes a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import BlockEncoder, NonFinite, decode, rows_of
from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import widened
from shardmill.kernels.pieces import column_spans
from shardmill.pipeline.actions import QuantizeBlock
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.converting.parts import Count
from shardmill.pipeline.stages.exact import exact_blocks
from shardmill.pipeline.stages.job import Quantized, Run, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 20
ROW_BYTES_MAX = 16 << 20  # a row of blocks that has more is not held
ROW_BLOCKS_MAX = 1 << 16  # so is one that has more blocks; of so many at once the scales are chosen
PIECE_COLUMNS = 1 << 17  # of a row that is read in parts
_NUMPY_DTYPE = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # BF16 goes as its bits


def quantize(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Quantized]:
    """Weight name -> Quantized, for every piece of the shard that holds codes.

    Raises BuildError that names tensor, row and column where a weight is not finite.
    """
    encoded = [piece for piece in pieces if piece.part == "codes"]
    if not encoded:
        return {}
    scales = {
        piece.source.name: piece.ref
        for piece in job.plan.pieces
        if piece.part == "scales" and piece.action.encodes
    }
    return {piece.ref.name: _quantized(job, piece, scales[piece.source.name]) for piece in encoded}


@dataclass(slots=True)
class _Weight:
    """Rows [begin, end) of a weight [R, C] on their way, and what is known of them so far."""

    job: ShardJob
    source: TensorRef
    encoder: BlockEncoder
    begin: int
    end: int
    codes_begin: int  # places in the output file
    scales_begin: int
    codes_hash: Any = field(default_factory=TensorHash)
    scales_hash: Any = field(default_factory=TensorHash)
    source_hash: Any = field(default_factory=TensorHash)
    counts: Counter[str] = field(default_factory=Counter)
    is_zero: bool = True

    @property
    def counts_exact(self) -> bool:
        """Whether blocks that decode to their own numbers are wanted, and not counted anyway."""
        return self.job.settings.lossless and self.encoder.recipe != "recover/1"

    @property
    def item(self) -> int:
        return np.dtype(_NUMPY_DTYPE[self.source.dtype]).itemsize

    def read(self, target: memoryview, row: int, col: int) -> None:
        """Fills `target` with what lies from [row, col] on."""
        source, begin = self.job.place(self.source)
        source.read(target, begin + (row * self.source.shape[1] + col) * self.item)

    def put(self, source: memoryview, codes: memoryview, row: int, col: int) -> None:
        """Writes the codes of the source's bytes, which begin at [row, col] and follow the last ones."""
        self.source_hash.update(source)
        self.codes_hash.update(codes)
        self.job.sink.write(codes, self.codes_begin + row * self.source.shape[1] + col)
        self.job.watch.done(len(source))

    def put_scales(self, scales: F32, codes: NDArray[np.uint8], first: int) -> None:
        """Writes the scales of the rows of blocks from `first` on, and notes whether they and the codes are zeros'."""
        # A block of zeros has the scale 1; only where all have it are the codes looked at.
        self.is_zero = self.is_zero and bool((scales == 1).all()) and not (codes & 0x7F).any()
        data = np.ascontiguousarray(scales, "<f4").tobytes()
        self.scales_hash.update(data)
        self.job.sink.write(data, self.scales_begin + 4 * first * scales.shape[1])


def _quantized(job: ShardJob, piece: Piece, scales: TensorRef) -> Quantized:
    action, source = piece.action, piece.source
    assert isinstance(action, QuantizeBlock)
    data_begin = job.plan.header.data_begin
    R, C = source.shape
    begin, end = job.rows or (0, R)
    weight = _Weight(
        job,
        source,
        _encoder(job, action),
        begin,
        end,
        data_begin + piece.ref.begin,
        data_begin + scales.begin,
    )
    held = min(action.block.rows, R) * C * weight.item <= ROW_BYTES_MAX
    if held and action.block.grid(source.shape)[1] <= ROW_BLOCKS_MAX:
        _by_strips(weight)
    else:
        _by_pieces(weight)
    codes, blocks = (end - begin) * C, action.block.grid((end - begin, C))
    first = begin // action.block.rows * blocks[1]
    return Quantized(
        (Run(begin * C, codes, weight.codes_hash.hexdigest()),),
        (Run(4 * first, 4 * blocks[0] * blocks[1], weight.scales_hash.hexdigest()),),
        (Run(begin * C * weight.item, codes * weight.item, weight.source_hash.hexdigest()),),
        dict(weight.counts),
        weight.is_zero,
    )


def _by_strips(weight: _Weight) -> None:
    """Whole rows of blocks, each read once."""
    C = weight.source.shape[1]
    r, c = weight.encoder.block
    strip_rows = min(max(1, STRIP_BYTES // (r * C * weight.item)) * r, weight.end - weight.begin)
    buffers = weight.job.worker.buffers
    strip_buffer = buffers.get("strip", strip_rows * C * weight.item)
    codes_buffer = buffers.get("codes", strip_rows * C)
    grid = np.empty((-(-strip_rows // r), -(-C // c)), np.float32)
    for row in range(weight.begin, weight.end, strip_rows):
        rows = min(strip_rows, weight.end - row)
        strip, codes = strip_buffer[: rows * C * weight.item], codes_buffer[: rows * C]
        scales = grid[: -(-rows // r)]
        weight.read(strip, row, 0)
        matrix = _matrix(codes, "U8", C)
        try:
            weights = _matrix(strip, weight.source.dtype, C)
            weight.counts.update(weight.encoder.encode(weights, matrix, scales))
        except NonFinite as fault:
            raise _not_finite(weight.source, row, 0, fault) from None
        if weight.counts_exact:
            blocks, exact = exact_blocks(widened(weights), decode(matrix, scales, (r, c)), (r, c))
            weight.counts.update({"blocks": blocks, "exact_blocks": exact})
        weight.put(strip, codes, row, 0)
        weight.put_scales(scales, matrix, row // r)


def _by_pieces(weight: _Weight) -> None:
    """Each row of blocks twice or more often: its scales, from bands of its blocks, and then its codes in order."""
    C = weight.source.shape[1]
    r, c = weight.encoder.block
    codes_buffer = weight.job.worker.buffers.get("codes", STRIP_BYTES)
    count = Count((r, c), C)
    for row in range(weight.begin, weight.end, r):
        rows = min(r, weight.end - row)
        scales = _chosen(weight, row, rows)
        count.begin(row, row + rows)
        for own_row, col, piece in _pieces(weight, row, rows, 0, C):
            codes = codes_buffer[: piece.size]
            matrix = _matrix(codes, "U8", piece.shape[1])
            own = np.ascontiguousarray(scales[:, col // c : -(-(col + piece.shape[1]) // c)])
            weight.encoder.encode_with(piece, own, matrix)
            if weight.counts_exact:
                count.add(row + own_row, col, widened(piece) != decode(matrix, own, (r, c)))
            weight.put(piece.data.cast("B"), codes, row + own_row, col)
            weight.is_zero = weight.is_zero and not (matrix & 0x7F).any()
        weight.put_scales(scales, np.zeros(0, np.uint8), row // r)
        count.end()
    if weight.counts_exact:
        weight.counts.update(count.counts())


def _chosen(weight: _Weight, row: int, rows: int) -> F32:
    """The scales f32 [1, ceil(C/c)] of the row of blocks that begins at `row`."""
    C, c = weight.source.shape[1], weight.encoder.block[1]
    chosen = np.empty((1, -(-C // c)), np.float32)
    for begin in range(0, C, ROW_BLOCKS_MAX * c):
        end = min(begin + ROW_BLOCKS_MAX * c, C)
        blocks = slice(begin // c, -(-end // c))

        def pieces(begin: int = begin, end: int = end) -> Iterator[tuple[int, int, NDArray[Any]]]:
            for own_row, col, piece in _pieces(weight, row, rows, begin, end):
                yield own_row, col - begin, piece

        try:
            found, counts = weight.encoder.choose(pieces, rows, blocks.stop - blocks.start)
        except NonFinite as fault:
            raise _not_finite(weight.source, row, begin, fault) from None
        chosen[:, blocks] = found
        weight.counts.update(counts)
    return chosen


def _pieces(
    weight: _Weight, row: int, rows: int, begin: int, end: int
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(row from `row` on, column, part) of columns [begin, end) of some rows, in the order of the file."""
    C, c = weight.source.shape[1], weight.encoder.block[1]
    buffer = weight.job.worker.buffers.get("strip", STRIP_BYTES)
    whole = begin == 0 and end == C <= PIECE_COLUMNS
    step = max(1, STRIP_BYTES // (C * weight.item)) if whole else 1
    for own_row in range(0, rows, step):
        count = min(step, rows - own_row)
        for col, stop in [(0, C)] if whole else column_spans(begin, end, c, PIECE_COLUMNS):
            weight.job.watch.done(0)
            part = buffer[: count * (stop - col) * weight.item]
            weight.read(part, row + own_row, col)
            yield own_row, col, _matrix(part, weight.source.dtype, stop - col)


def _encoder(job: ShardJob, action: QuantizeBlock) -> BlockEncoder:
    kernels = job.worker.kernels
    if job.settings.kernel not in kernels:
        kernels[job.settings.kernel] = rows_of(job.settings.kernel)
    block = (action.block.rows, action.block.cols)
    return BlockEncoder(action.numerics, block, kernels[job.settings.kernel])


def _matrix(buffer: memoryview, dtype: str, cols: int) -> NDArray[Any]:
    return np.frombuffer(buffer, _NUMPY_DTYPE.get(dtype, np.uint8)).reshape(-1, cols)


def _not_finite(source: TensorRef, row: int, col: int, fault: NonFinite) -> BuildError:
    return BuildError(
        f"{source.shard}: {source.name}: the weight at row {row + fault.row}, column {col + fault.col} is "
        f"{fault.value}, which no scale can hold; fix the parent checkpoint, or keep this tensor's family"
    )
