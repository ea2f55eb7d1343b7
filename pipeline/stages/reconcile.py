"""Stage `reconcile`, a repair: gate and up of an NVFP4 expert get one global scale.

A fused w13 kernel keeps the gate's `weight_scale_2` for both halves, so where the two differ, up decodes wrong by
their ratio, silently. The larger becomes the scale of both; the other half's E4M3 block scales are multiplied by
own / larger and rounded to nearest even. The FP4 codes stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.formats import E4M3_VALUES
from shardmill.kernels.nvfp4 import code_energy, rescale
from shardmill.pipeline.actions import Reconcile
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

PARTS_PER_MILLION = 1_000_000


def reconcile(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each global or block scale of a family that is reconciled."""
    return {piece.ref.name: _repaired(job, piece) for piece in pieces if isinstance(piece.action, Reconcile)}


def _repaired(job: ShardJob, piece: Piece) -> Decoded:
    own_ref, partner_ref, codes_ref = piece.reads
    default_arithmetic()
    own, partner = _scalar(job, own_ref), _scalar(job, partner_ref)
    larger = max(own, partner)
    before = np.frombuffer(job.read(piece.source), np.uint8)
    facts = None
    if piece.source == own_ref:
        after = np.array([larger], "<f4").view(np.uint8)
    elif own == larger:
        after = before
    else:
        after, facts = _block_scales(job, piece, before, own, larger, codes_ref)
    data = after.tobytes()
    job.sink.write(data, job.plan.header.data_begin + piece.ref.begin)
    job.watch.done(len(data))
    read = {piece.source, own_ref, partner_ref} | ({codes_ref} if codes_ref.shard != job.plan.file else set())
    sources = {ref.name: TensorHash(job.read(ref)).hexdigest() for ref in read}
    return Decoded(TensorHash(data).hexdigest(), sources, facts)


def _block_scales(
    job: ShardJob,
    piece: Piece,
    before: NDArray[np.uint8],
    own: np.float32,
    larger: np.float32,
    codes_ref: TensorRef,
) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """The half's block scales under the larger global scale, and what that did to its weights.

    Errors are relative, in parts per million: `before` is what a kernel serves that applies the larger scale to the
    parent's block scales, `after` what re-rounding leaves.
    """
    after, lost = rescale(before, own, larger)
    if lost.any():
        place = int(np.flatnonzero(lost)[0])
        raise BuildError(
            f"{piece.source.shard}: {piece.source.name}: block scale {place} would vanish under the global scale "
            f"{larger} of its other half ({own} is its own); keep this expert, or serve it unfused"
        )
    energy = code_energy(np.frombuffer(job.read(codes_ref), np.uint8), len(before))
    served, left = _errors(before, after, own, larger, energy)
    facts = {
        "repair": "reconcile/1",
        "tensor": piece.source.name,
        "error_before_ppm": round(served * PARTS_PER_MILLION),
        "error_after_ppm": round(left * PARTS_PER_MILLION),
    }
    return after, facts


def _errors(
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    own: np.float32,
    larger: np.float32,
    energy: NDArray[np.float64],
) -> tuple[float, float]:
    true = E4M3_VALUES[before].astype(np.float64) * float(own)  # per group, times the codes
    norm = float(np.sqrt((energy * true**2).sum())) or 1.0
    served = E4M3_VALUES[before].astype(np.float64) * float(larger)
    left = E4M3_VALUES[after].astype(np.float64) * float(larger)
    return (
        float(np.sqrt((energy * (served - true) ** 2).sum())) / norm,
        float(np.sqrt((energy * (left - true) ** 2).sum())) / norm,
    )


def _scalar(job: ShardJob, ref: TensorRef) -> np.float32:
    value: np.float32 = np.frombuffer(job.read(ref), "<f4")[0]
    if not (np.isfinite(value) and value > 0):
        raise BuildError(f"{ref.shard}: {ref.name} is {value}; a global scale must be finite and positive")
    return value
