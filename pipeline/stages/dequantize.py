"""Stage `dequantize`: what starts from the parent's block FP8. Codes become BF16, or get the scales of smaller blocks.

Strip by strip, as in `quantize`; a weight's scales may lie in another file of the parent than its codes. Scales that
are not finite and positive, and codes that are NaN, are refused with their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.block_fp8_to_bf16 import decode_to_bf16
from shardmill.kernels.formats import F32, bf16_to_f32
from shardmill.pipeline.actions import Dequantize, Reblock
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 19  # of codes; their BF16 takes twice that


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
    R, C = source.shape
    scales, scales_digest = _parent_scales(job, piece)
    strip_rows = min(max(1, STRIP_BYTES // (block[0] * C)) * block[0], R)
    codes_buffer = job.worker.buffers.get("codes", strip_rows * C)
    values_buffer = job.worker.buffers.get("values", 2 * strip_rows * C)
    codes_hash, values_hash = TensorHash(), TensorHash()
    file, source_place = job.place(source)
    for row in range(0, R, strip_rows):
        rows = min(strip_rows, R - row)
        codes, values = codes_buffer[: rows * C], values_buffer[: 2 * rows * C]
        file.read(codes, source_place + row * C)
        codes_hash.update(codes)
        grid = scales[row // block[0] : -(-(row + rows) // block[0])]
        try:
            decode_to_bf16(_matrix(codes, np.uint8, C), grid, block, _matrix(values, np.uint16, C))
        except NonFinite as fault:
            raise BuildError(
                f"{source.shard}: {source.name}: row {row + fault.row}, column {fault.col} decodes to {fault.value}; "
                f"fix the parent checkpoint, or keep this tensor's family"
            ) from None
        values_hash.update(values)
        job.sink.write(values, job.plan.header.data_begin + piece.ref.begin + 2 * row * C)
        job.watch.done(len(codes))
    assert piece.scales is not None
    sources = {source.name: codes_hash.hexdigest(), piece.scales.name: scales_digest}
    return Decoded(values_hash.hexdigest(), sources)


def _finer_scales(job: ShardJob, piece: Piece, action: Reblock) -> Decoded:
    """The parent's scales, each repeated over the smaller blocks that lie in its own; F32 in the sink."""
    scales, digest = _parent_scales(job, piece)
    rows, cols = piece.ref.shape
    down, across = (
        action.source_block.rows // action.block.rows,
        action.source_block.cols // action.block.cols,
    )
    finer = np.ascontiguousarray(scales.repeat(down, axis=0)[:rows].repeat(across, axis=1)[:, :cols])
    data = finer.astype("<f4", copy=False).tobytes()
    job.sink.write(data, job.plan.header.data_begin + piece.ref.begin)
    assert piece.scales is not None
    return Decoded(TensorHash(data).hexdigest(), {piece.scales.name: digest})


def _parent_scales(job: ShardJob, piece: Piece) -> tuple[F32, str]:
    """The parent's scales of the piece's weight, f32 [ceil(R/r), ceil(C/c)], and the digest of their bytes."""
    ref = piece.scales
    assert ref is not None
    data = job.read(ref)
    flat = (
        bf16_to_f32(np.frombuffer(data, np.uint16))
        if ref.dtype == "BF16"
        else np.frombuffer(data, np.float32)
    )
    scales: F32 = flat.reshape(ref.shape)
    _refuse_unsound(ref, scales)
    return scales, TensorHash(data).hexdigest()


def _refuse_unsound(ref: TensorRef, scales: F32) -> None:
    sound = np.isfinite(scales) & (scales > 0)
    if not sound.all():
        row, col = np.argwhere(~sound)[0]
        raise BuildError(
            f"{ref.shard}: {ref.name}: the scale of block [{row}, {col}] is {scales[row, col]}, a scale must be finite "
            f"and positive; fix the parent checkpoint"
        )


def _matrix(buffer: memoryview, dtype: Any, cols: int) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype).reshape(-1, cols)
