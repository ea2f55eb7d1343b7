"""Stage `quantize`: each converting weight is read strip by strip, encoded, and its codes put in their place.

A strip is a whole number of block rows of about a megabyte, so memory doesn't grow with the tensor. Neither the
strip's height nor the number of workers changes a byte.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import BlockEncoder, NonFinite, decode, rows_of
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.actions import QuantizeBlock
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.exact import exact_blocks
from shardmill.pipeline.stages.job import Quantized, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 20
_NUMPY_DTYPE = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # BF16 goes as its bits


def quantize(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Quantized]:
    """Weight name -> Quantized, for every piece of the shard that holds codes.

    Raises BuildError that names tensor, row and column where a weight is not finite.
    """
    return {piece.ref.name: _quantized(job, piece) for piece in pieces if piece.part == "codes"}


def _quantized(job: ShardJob, piece: Piece) -> Quantized:
    action, source = piece.action, piece.source
    assert isinstance(action, QuantizeBlock)
    R, C = source.shape
    item = np.dtype(_NUMPY_DTYPE[source.dtype]).itemsize
    block_rows = max(1, STRIP_BYTES // (action.block.rows * C * item))
    strip_rows = min(block_rows * action.block.rows, R)
    encode = _encoder(job, action).encode
    strip_buffer = job.worker.buffers.get("strip", strip_rows * C * item)
    codes_buffer = job.worker.buffers.get("codes", strip_rows * C)
    scales = np.empty(action.block.grid(source.shape), np.float32)
    codes_hash, source_hash, counts = TensorHash(), TensorHash(), Counter[str]()
    file, source_place = job.place(source)
    codes_place = job.plan.header.data_begin + piece.ref.begin
    is_zero = True
    for row in range(0, R, strip_rows):
        rows = min(strip_rows, R - row)
        strip, codes = strip_buffer[: rows * C * item], codes_buffer[: rows * C]
        file.read(strip, source_place + row * C * item)
        source_hash.update(strip)
        first = row // action.block.rows
        grid = scales[first : first + -(-rows // action.block.rows)]
        try:
            weights, made = _matrix(strip, source.dtype, rows, C), _matrix(codes, "U8", rows, C)
            counts.update(encode(weights, made, grid))
            counts.update(_exact(job, action, weights, made, grid))
        except NonFinite as fault:
            raise _not_finite(source, row, fault) from None
        # A block of zeros has the scale 1; only where all have it are the codes looked at.
        is_zero = is_zero and bool((grid == 1).all()) and not (np.frombuffer(codes, np.uint8) & 0x7F).any()
        codes_hash.update(codes)
        job.sink.write(codes, codes_place + row * C)
        job.watch.done(len(strip))
    return Quantized(scales, codes_hash.hexdigest(), source_hash.hexdigest(), dict(counts), is_zero)


def _exact(
    job: ShardJob,
    action: QuantizeBlock,
    weights: NDArray[Any],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> dict[str, int]:
    """The blocks of a strip and those that decode to its own numbers, where that is wanted and not counted anyway."""
    if not job.settings.lossless or action.numerics == "recover/1":
        return {}
    block = (action.block.rows, action.block.cols)
    blocks, exact = exact_blocks(widened(weights), decode(codes, scales, block), block)
    return {"blocks": blocks, "exact_blocks": exact}


def _encoder(job: ShardJob, action: QuantizeBlock) -> BlockEncoder:
    kernels = job.worker.kernels
    if job.settings.kernel not in kernels:
        kernels[job.settings.kernel] = rows_of(job.settings.kernel)
    block = (action.block.rows, action.block.cols)
    return BlockEncoder(action.numerics, block, kernels[job.settings.kernel])


def _matrix(buffer: memoryview, dtype: str, rows: int, cols: int) -> NDArray[Any]:
    return np.frombuffer(buffer, _NUMPY_DTYPE.get(dtype, np.uint8)).reshape(rows, cols)


def _not_finite(source: TensorRef, row: int, fault: NonFinite) -> BuildError:
    return BuildError(
        f"{source.shard}: {source.name}: the weight at row {row + fault.row}, column {fault.col} is {fault.value}, "
        f"which no scale can hold; fix the parent checkpoint, or keep this tensor's family"
    )
