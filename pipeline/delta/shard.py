"""One shard of the new checkpoint: its header, and its tensors from the old checkpoint's shards and from the delta."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.header import file_stat, parse_header
from shardmill.pipeline.delta.child import Child
from shardmill.pipeline.delta.records import Delta, NewFile, Run
from shardmill.pipeline.delta.write import tensors_file
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.stages.job import Passthrough
from shardmill.pipeline.types import Header


@dataclass(frozen=True)
class Job:
    """What a delta is applied to, and how unchanged files are passed on."""

    old: Child
    delta_folder: Path
    delta: Delta
    passthrough: Passthrough


def header_of(job: Job, name: str, file: NewFile) -> Header:
    if file.header_text is None:
        assert file.source is not None
        return job.old.header(file.source)
    return parse_header(file.header_text.encode(), name)


def make_shard(job: Job, name: str, file: NewFile, target: Path) -> None:
    header = header_of(job, name, file)
    text = _header_bytes(job, file)
    if header.file_bytes != file.bytes or len(text) != header.data_begin:
        raise CheckpointError(f"{name}: the delta states {file.bytes} bytes for it, its header another size")
    place, taken = header.data_begin, 0
    with Sink(target, file.bytes) as sink:
        sink.reserve()
        sink.write(text, 0)
        for run in file.runs:
            spans = _spans(job, name, file, run, taken)
            size = sum(end - begin for begin, end in spans)
            _refuse_size(name, place + size <= file.bytes, place + size, file)
            _copy_run(job, name, run, spans, sink, place)
            taken += size if run.file is None else 0
            place += size
    _refuse_size(name, place == file.bytes, place, file)


def _refuse_size(name: str, holds: bool, got: int, file: NewFile) -> None:
    if not holds:
        raise CheckpointError(f"{name}: the delta's tensors come to {got} bytes, expected {file.bytes}")


def _header_bytes(job: Job, file: NewFile) -> bytes:
    if file.header_text is not None:
        text = file.header_text.encode()
        return len(text).to_bytes(8, "little") + text
    source = str(file.source)
    with (job.old.folder / source).open("rb") as opened:
        return opened.read(job.old.header(source).data_begin)


def _spans(job: Job, name: str, file: NewFile, run: Run, begin: int) -> list[tuple[int, int]]:
    """Where the run's tensors are in the file that holds them. `begin` is the delta's next byte."""
    try:
        if run.file is None:
            sizes = {ref.name: ref.bytes for ref in header_of(job, name, file).tensors}
            return [(begin, begin + sum(sizes[tensor] for tensor in run.tensors))]
        header = job.old.header(run.file)
        refs = {ref.name: ref for ref in header.tensors}
        return [
            (header.data_begin + refs[tensor].begin, header.data_begin + refs[tensor].end)
            for tensor in run.tensors
        ]
    except KeyError as error:
        where = "its own header" if run.file is None else run.file
        raise CheckpointError(
            f"{name}: the delta takes the tensor {error} from where it is not: {where}; fetch the delta again"
        ) from None


def _copy_run(job: Job, name: str, run: Run, spans: list[tuple[int, int]], sink: Sink, place: int) -> None:
    """Writes the run's tensors at `place` of the shard."""
    path = job.delta_folder / tensors_file(name) if run.file is None else job.old.folder / run.file
    buffer = Buffers().get("chunk", CHUNK_BYTES)
    with Source(path, file_stat(path)) as source:
        for first, last in _joined(spans):
            for _, chunk in source.chunks(buffer, first, last):
                sink.write(chunk, place)
                place += len(chunk)


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans that touch as one, so that small tensors are read together."""
    open_span: tuple[int, int] | None = None
    for begin, end in spans:
        if open_span and open_span[1] == begin:
            open_span = (open_span[0], end)
            continue
        if open_span:
            yield open_span
        open_span = (begin, end)
    if open_span:
        yield open_span
