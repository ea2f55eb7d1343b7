"""Stage `reconcile`, a repair: gate and up of an NVFP4 expert get one global scale.

A fused w13 kernel keeps the gate's `weight_scale_2` for both halves, so where the two differ, up decodes wrong by
their ratio, silently. The larger becomes the scale of both; the other half's E4M3 block scales are multiplied by
own / larger and rounded to nearest even. The FP4 codes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.kernels.nvfp4 import code_energy, rescale
from shardmill.pipeline.actions import Reconcile
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

PARTS_PER_MILLION = 1_000_000
CHUNK_BYTES = 1 << 18  # of block scales; their codes take eight times that


def reconcile(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each global or block scale of a family that is reconciled."""
    return {piece.ref.name: _repaired(job, piece) for piece in pieces if isinstance(piece.action, Reconcile)}


def _repaired(job: ShardJob, piece: Piece) -> Decoded:
    own_ref, partner_ref, codes_ref = piece.reads
    own, partner = _scalar(job, own_ref), _scalar(job, partner_ref)
    larger = max(own, partner)
    facts = None
    if piece.source == own_ref:
        digest = _put(job, piece, 0, np.array([larger], "<f4").view(np.uint8), TensorHash()).hexdigest()
    elif own == larger:
        digest = _passed_on(job, piece)
    else:
        digest, facts = _block_scales(job, piece, own, larger, codes_ref)
    job.watch.done(piece.ref.bytes)
    read = {piece.source, own_ref, partner_ref} | ({codes_ref} if codes_ref.shard != job.plan.file else set())
    return Decoded(digest, {ref.name: _digest(job, ref) for ref in read}, facts)


def _passed_on(job: ShardJob, piece: Piece) -> str:
    seen = TensorHash()
    for begin, end in _chunks(piece.source.bytes):
        _put(job, piece, begin, np.frombuffer(job.read(piece.source, begin, end), np.uint8), seen)
    return seen.hexdigest()


def _put(job: ShardJob, piece: Piece, begin: int, data: NDArray[np.uint8], seen: Any) -> Any:
    job.sink.write(data.data, job.plan.header.data_begin + piece.ref.begin + begin)
    seen.update(data.data)
    return seen


def _digest(job: ShardJob, ref: TensorRef) -> str:
    seen = TensorHash()
    for begin, end in _chunks(ref.bytes):
        seen.update(job.read(ref, begin, end))
    return seen.hexdigest()


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, size)


def _block_scales(
    job: ShardJob, piece: Piece, own: np.float32, larger: np.float32, codes_ref: TensorRef
) -> tuple[str, dict[str, Any]]:
    """The half's block scales under the larger global scale, written, and what that did to its weights.

    Errors are relative, in parts per million: `before` is what a kernel serves that applies the larger scale to the
    parent's block scales, `after` what re-rounding leaves.
    """
    seen, sums = TensorHash(), np.zeros(3)
    codes_each = codes_ref.bytes // piece.source.bytes  # bytes of codes under one block scale
    for begin, end in _chunks(piece.source.bytes):
        before = np.frombuffer(job.read(piece.source, begin, end), np.uint8)
        after, lost = rescale(before, own, larger)
        if lost.any():
            place = begin + int(np.flatnonzero(lost)[0])
            raise BuildError(
                f"{piece.source.shard}: {piece.source.name}: block scale {place} would vanish under the global scale "
                f"{larger} of its other half ({own} is its own); keep this expert, or serve it unfused"
            )
        codes = np.frombuffer(job.read(codes_ref, begin * codes_each, end * codes_each), np.uint8)
        sums += _squares(before, after, own, larger, code_energy(codes, len(before)))
        _put(job, piece, begin, after, seen)
    norm = float(np.sqrt(sums[0])) or 1.0
    served, left = (float(np.sqrt(each)) / norm for each in sums[1:])
    facts = {
        "repair": "reconcile/1",
        "tensor": piece.source.name,
        "error_before_ppm": round(served * PARTS_PER_MILLION),
        "error_after_ppm": round(left * PARTS_PER_MILLION),
    }
    return seen.hexdigest(), facts


def _squares(
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    own: np.float32,
    larger: np.float32,
    energy: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Of some groups: the square of their weights, and of what is wrong with them as served and as left."""
    true = E4M3_VALUES[before].astype(np.float64) * float(own)  # per group, times the codes
    served = E4M3_VALUES[before].astype(np.float64) * float(larger)
    left = E4M3_VALUES[after].astype(np.float64) * float(larger)
    return np.array(
        [(energy * true**2).sum(), (energy * (served - true) ** 2).sum(), (energy * (left - true) ** 2).sum()]
    )


def _scalar(job: ShardJob, ref: TensorRef) -> np.float32:
    value: np.float32 = np.frombuffer(job.read(ref), "<f4")[0]
    if not (np.isfinite(value) and value > 0):
        raise BuildError(f"{ref.shard}: {ref.name} is {value}; a global scale must be finite and positive")
    return value
