"""Writes a delta: the bytes that the old checkpoint lacks, then the record of how the new one is made.

The data of new tensors are read once and held to the digests of the new checkpoint's manifest meanwhile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.folder import refuse_taken, refuse_within, whole_folder
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.delta.child import Child, open_child
from shardmill.pipeline.delta.compare import compare
from shardmill.pipeline.delta.records import DELTA_FILE, Delta, NewFile
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.run.digests import sha256_of


@dataclass(frozen=True)
class Written:
    delta: Delta
    bytes: int  # of all files of the delta


def write_delta(old: Path, new: Path, out: Path) -> Written:
    """Writes what turns the checkpoint `old` into `new` as the folder `out`. Raises ShardmillError in a sentence."""
    refuse_within(out, old, new)
    refuse_taken(out)
    target = open_child(new)
    delta = compare(open_child(old), target, sha256_of)
    with whole_folder(out) as part:
        for name, file in delta.files.items():
            if file.how == "whole":
                _write_file(target, name, file, part / "files" / name)
            elif file.digests:
                _write_tensors(target, name, file, part / tensors_file(name))
        write_whole(part / DELTA_FILE, delta.to_bytes())
        total = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    return Written(delta, total)


def tensors_file(shard: str) -> str:
    """Where a delta holds the data of a shard's new tensors."""
    return f"tensors/{shard}.bin"


def _write_file(new: Child, name: str, file: NewFile, path: Path) -> None:
    data = new.manifest_bytes if name == MANIFEST_FILE else (new.folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CheckpointError(
            f"{new.folder / name}: is not the file that the manifest describes; "
            f"`shardmill verify integrity {new.folder}` tells what is wrong"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)


def _write_tensors(new: Child, name: str, file: NewFile, path: Path) -> None:
    assert file.digests is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    header, source_path = new.header(name), new.folder / name
    refs = [ref for ref in header.tensors if ref.name in file.digests]
    buffer, place = Buffers().get("chunk", CHUNK_BYTES), 0
    with (
        Source(source_path, file_stat(source_path)) as source,
        Sink(path, sum(ref.bytes for ref in refs)) as sink,
    ):
        sink.reserve()
        for ref in refs:
            digest, begin = TensorHash(), header.data_begin
            for _, chunk in source.chunks(buffer, begin + ref.begin, begin + ref.end):
                sink.write(chunk, place)
                digest.update(chunk)
                place += len(chunk)
            if digest.hexdigest() != file.digests[ref.name]:
                raise CheckpointError(
                    f"{source_path}: {ref.name}: the manifest states the digest {file.digests[ref.name]}, got "
                    f"{digest.hexdigest()}; `shardmill verify integrity {new.folder}` tells what is wrong"
                )
