"""Stage `scales`: the scales of every quantized weight, checked and as the bytes that will be published.

A scale multiplies a code back to a weight. One that is zero, negative, infinite or NaN destroys its block
silently in every runtime, so none leaves here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.stages.job import Quantized, ShardJob


def scales(job: ShardJob, codes: Mapping[str, Quantized]) -> dict[str, bytes]:
    """Scale tensor's name -> its F32 little-endian bytes, row by row of blocks."""
    emitted = {}
    for piece in job.plan.pieces:
        if piece.part == "scales" and piece.action.encodes:
            values = codes[piece.source.name].scales
            sane = np.isfinite(values) & (values > 0)
            if not sane.all():
                row, col = np.argwhere(~sane)[0]
                raise BuildError(
                    f"{piece.ref.name}: the scale of block [{row}, {col}] is {values[row, col]}, which is not finite "
                    f"and positive; this is a fault of the encoder {piece.action.words()}, report it"
                )
            emitted[piece.ref.name] = values.astype("<f4", copy=False).tobytes()
    return emitted
