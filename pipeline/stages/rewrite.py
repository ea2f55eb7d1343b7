"""Stage `rewrite`: the output file, from its header to its last byte, and the receipt of what it holds.

The file is walked once in its own order: what the parent holds is copied in runs of adjacent tensors; codes and
scales, already in place, are read back. So the file's sha256 is taken in the same pass, and every code is seen twice
by different code: as it was made, and as it is in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardmill.pipeline.container.files import CHUNK_BYTES
from shardmill.pipeline.container.header import header_bytes
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.digest import TensorHash, TensorSplitter
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.census import Census
from shardmill.pipeline.stages.job import Decoded, Quantized, Run, Runs, ShardJob
from shardmill.pipeline.types import TensorRef

Digests = dict[str, str]
Odd = dict[str, dict[str, int]]


class _NoHash:
    """Stands where no sha256 is wanted."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> None:
        return None


def rewrite(
    job: ShardJob,
    pieces: tuple[Piece, ...],
    codes: Mapping[str, Quantized],
    scales: Mapping[str, Runs],
    **made_elsewhere: Mapping[str, Decoded],
) -> Receipt:
    """Fills the sink and returns its Receipt. `made_elsewhere`: what the stages that rewrite accepts have put in it."""
    made = {name: decoded for product in made_elsewhere.values() for name, decoded in product.items()}
    file_hash = hashlib.sha256() if job.settings.file_digests else _NoHash()
    placed = {
        **{name: quantized.codes for name, quantized in codes.items()},
        **scales,
        **{name: (Run(0, 0, decoded.digest),) for name, decoded in made.items()},
    }
    odd: Odd = {name: {"zero": 1} for name, quantized in codes.items() if quantized.is_zero}
    digests = (
        _rewritten(job, pieces, file_hash, placed, odd)
        if job.plan.rewritten
        else _passed_on(job, file_hash, odd)
    )
    sources = {
        piece.source.name: _source_digest(job, piece, codes[piece.ref.name].source)
        for piece in pieces
        if piece.ref.name in codes
    }
    for decoded in made.values():
        sources.update(decoded.sources)
    return Receipt(
        file=job.plan.file,
        key=job.plan.key,
        rewritten=job.plan.rewritten,
        file_bytes=job.plan.header.file_bytes,
        sha256=file_hash.hexdigest(),
        tensors=digests,
        sources=sources,
        counts={
            **{name: quantized.counts for name, quantized in codes.items() if quantized.counts},
            **{name: decoded.counts for name, decoded in made.items() if decoded.counts},
        },
        repairs=tuple(decoded.repair for decoded in made.values() if decoded.repair),
        values=odd,
    )


def _rewritten(
    job: ShardJob,
    pieces: Sequence[Piece],
    file_hash: Any,
    placed: Mapping[str, Runs],
    odd: Odd,
) -> Digests:
    """`placed`: digests of the tensors whose bytes earlier stages put into the sink. `odd` gains what copies hold."""
    digests: Digests = {}
    head = header_bytes(job.plan.header)
    job.sink.write(head, 0)
    file_hash.update(head)
    for run in _runs(pieces):
        name = run[0].ref.name
        if run[0].part == "bytes":
            digests.update(_copy_run(job, run, file_hash, odd))
        else:
            digests[name] = _read_back(job, run[0], placed[name], file_hash)
    return digests


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, those that are adjacent both in the source and in the output together."""
    run: list[Piece] = []
    for piece in pieces:
        follows = run and piece.part == run[-1].part == "bytes" and _is_next(piece.source, run[-1].source)
        if run and not follows:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _is_next(ref: TensorRef, before: TensorRef) -> bool:
    """Whether a tensor's data begin where those of `before` end."""
    return ref.shard == before.shard and ref.begin == before.end


def _copy_run(job: ShardJob, run: Sequence[Piece], file_hash: Any, odd: Odd) -> Digests:
    source, begin = job.place(run[0].source)
    end = begin + run[-1].source.end - run[0].source.begin
    shift = job.plan.header.data_begin + run[0].ref.begin - begin
    splitter = TensorSplitter([(piece.ref.name, piece.ref.bytes) for piece in run])
    census = Census([piece.ref for piece in run])
    for offset, chunk in source.chunks(job.worker.buffers.get("chunk", CHUNK_BYTES), begin, end):
        job.sink.write(chunk, offset + shift)
        file_hash.update(chunk)
        splitter.update(chunk)
        census.update(chunk)
        job.watch.done(len(chunk))
    odd.update(census.found())
    return splitter.digests()


def _read_back(job: ShardJob, piece: Piece, known: Runs, file_hash: Any) -> str:
    """The digest of what earlier stages put in place, read again where the file is hashed or several wrote it."""
    if len(known) == 1 and isinstance(file_hash, _NoHash):
        return known[0].digest
    begin = job.plan.header.data_begin + piece.ref.begin
    digest = _whole_digest(job, job.sink.read, begin, piece.ref, known, file_hash)
    if digest is None:
        raise BuildError(
            f"{job.plan.file}: {piece.ref.name}: the read-back differs from what was written; check the disk"
        )
    return digest


def _source_digest(job: ShardJob, piece: Piece, known: Runs) -> str:
    """The digest of a weight in the parent, which is read again where several workers read its rows."""
    if len(known) == 1:
        return known[0].digest
    source, begin = job.place(piece.source)
    digest = _whole_digest(job, source.read, begin, piece.source, known, _NoHash())
    if digest is None:
        raise CheckpointError(
            f"{source.path}: {piece.source.name} changed while it was read; let its writer finish, then build again"
        )
    return digest


def _whole_digest(
    job: ShardJob,
    read: Callable[[memoryview, int], None],
    begin: int,
    ref: TensorRef,
    known: Runs,
    file_hash: Any,
) -> str | None:
    """The digest of a tensor that is read from `begin` on; None where one of the runs `known` of it has another."""
    seen, buffer = TensorHash(), job.worker.buffers.get("chunk", CHUNK_BYTES)
    runs = TensorSplitter([(str(run.begin), run.bytes) for run in known]) if len(known) > 1 else None
    for done in range(0, ref.bytes, len(buffer)):
        view = buffer[: min(len(buffer), ref.bytes - done)]
        read(view, begin + done)
        file_hash.update(view)
        seen.update(view)
        if runs:
            runs.update(view)
    digest = seen.hexdigest()
    found = list(runs.digests().values()) if runs else [digest]
    return digest if found == [run.digest for run in known] else None


def _passed_on(job: ShardJob, file_hash: Any, odd: Odd) -> Digests:
    """The parent's file, whole: shared extents where asked for and possible, else a copy; hashed in either case."""
    size = job.plan.header.file_bytes
    shared = job.sink.share(job.source, job.settings.passthrough)
    if not shared:
        job.sink.reserve()
    buffer = job.worker.buffers.get("chunk", CHUNK_BYTES)
    splitter = TensorSplitter([(ref.name, ref.bytes) for ref in job.plan.header.tensors])
    census = Census(job.plan.header.tensors)
    for begin, end in ((0, job.source_data_begin), (job.source_data_begin, size)):
        for offset, chunk in job.source.chunks(buffer, begin, end):
            if not shared:
                job.sink.write(chunk, offset)
            file_hash.update(chunk)
            if begin:
                splitter.update(chunk)
                census.update(chunk)
            job.watch.done(len(chunk))
    odd.update(census.found())
    return splitter.digests()
