"""Stage `scales`: the scales of every quantized weight, read back and checked before anything else is made of them.

A scale multiplies a code back to a weight. One that is zero, negative, infinite or NaN destroys its block
silently in every runtime, so none leaves here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardmill.pipeline.container.files import CHUNK_BYTES
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.job import Quantized, Runs, ShardJob


def scales(job: ShardJob, codes: Mapping[str, Quantized]) -> dict[str, Runs]:
    """Scale tensor's name -> digests of its F32 little-endian bytes, which are in the sink row by row of blocks."""
    checked = {}
    for piece in job.plan.pieces:
        if piece.part == "scales" and piece.action.encodes:
            _refuse_unsound(job, piece)
            checked[piece.ref.name] = codes[piece.source.name].scales
    return checked


def _refuse_unsound(job: ShardJob, piece: Piece) -> None:
    buffer = job.worker.buffers.get("chunk", CHUNK_BYTES)
    for done in range(0, piece.ref.bytes, len(buffer)):
        view = buffer[: min(len(buffer), piece.ref.bytes - done)]
        job.sink.read(view, job.plan.header.data_begin + piece.ref.begin + done)
        values = np.frombuffer(view, "<f4")
        sound = np.isfinite(values) & (values > 0)
        if not sound.all():
            place = int(np.flatnonzero(~sound)[0])
            block = [int(side) for side in np.unravel_index(done // 4 + place, piece.ref.shape)]
            raise BuildError(
                f"{piece.ref.name}: the scale of block {block} is {values[place]}, which is not finite and positive; "
                f"this is a fault of the encoder {piece.action.words()}, report it"
            )
