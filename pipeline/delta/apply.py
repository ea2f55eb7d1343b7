"""Applies a delta: makes exactly the new checkpoint from the old one, or nothing.

The old checkpoint is compared (manifest, sizes, headers) before a byte is written. Every file that is made is read
back and held to the new manifest's sha256, or, where that has none, to the digests of header and tensors. The folder
gets its name last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Sink, Source
from shardmill.pipeline.container.folder import refuse_taken, refuse_within, whole_folder
from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.delta.child import open_child
from shardmill.pipeline.delta.merge import merged
from shardmill.pipeline.delta.records import DELTA_FILE, Delta, NewFile
from shardmill.pipeline.delta.shard import Job, header_of, make_shard
from shardmill.pipeline.delta.write import tensors_file
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE, Manifest
from shardmill.pipeline.run.digests import sha256_of, tensors_of
from shardmill.pipeline.stages.job import Passthrough
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE

_LAST = (MANIFEST_FILE, SINGLE_FILE, INDEX_FILE)


@dataclass(frozen=True)
class Applied:
    linked: int
    copied: int
    made: int  # files of which the delta holds a part
    bytes: int


def apply_delta(old: Path, delta_folder: Path, out: Path, passthrough: Passthrough) -> Applied:
    """Makes the new checkpoint as the folder `out`. Raises CheckpointError or BuildError and leaves nothing there."""
    refuse_within(out, old, delta_folder)
    refuse_taken(out)
    path = delta_folder / DELTA_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; give the folder that `shardmill delta` wrote")
    delta = Delta.from_bytes(path.read_bytes(), str(path))
    job = Job(open_child(old), delta_folder, delta, passthrough)
    _refuse_other(job)
    _refuse_incomplete(job)
    linked = 0
    with whole_folder(out) as part:
        for name in sorted(delta.files, key=lambda name: (name in _LAST and _LAST.index(name) + 1, name)):
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            linked += _make(job, name, part)
        _verify(delta, part)
    same = sum(file.how == "same" for file in delta.files.values())
    total = sum(file.bytes for file in delta.files.values())
    return Applied(linked, same - linked, len(delta.files) - same, total)


def _refuse_other(job: Job) -> None:
    """Raises CheckpointError where the old checkpoint is not the one that the delta starts from."""
    old, delta = job.old, job.delta
    if old.manifest_sha256 != delta.old_manifest:
        what = "the new one already" if old.manifest_sha256 == delta.new_manifest else "another checkpoint"
        raise CheckpointError(
            f"{old.folder / MANIFEST_FILE}: expected the sha256 {delta.old_manifest}, got {old.manifest_sha256}: "
            f"it is {what}; give the checkpoint that the delta was made from"
        )
    for name, needed in delta.needs.items():
        got = old.sizes.get(name)
        if got != needed.bytes:
            raise CheckpointError(
                f"{old.folder / name}: expected {needed.bytes} bytes, got {'no file' if got is None else got}; "
                f"give the checkpoint that the delta was made from"
            )
        if needed.header is not None and old.header(name).digest != needed.header:
            raise CheckpointError(
                f"{old.folder / name}: its header is another than the delta needs; fetch the file again"
            )


def _refuse_incomplete(job: Job) -> None:
    """Raises CheckpointError where the delta lacks a file, or holds a part of one."""
    for name, expected in _held(job):
        path = job.delta_folder / name
        got = path.stat().st_size if path.is_file() else None
        if got != expected:
            raise CheckpointError(
                f"{path}: expected {expected} bytes, got {'no file' if got is None else got}; fetch the delta again"
            )


def _held(job: Job) -> Iterator[tuple[str, int]]:
    for name, file in job.delta.files.items():
        if file.how == "whole":
            yield f"files/{name}", file.bytes
        elif file.digests:
            refs = header_of(job, name, file).tensors
            yield tensors_file(name), sum(ref.bytes for ref in refs if ref.name in file.digests)


def _make(job: Job, name: str, part: Path) -> bool:
    """Makes one file; whether it is a link."""
    file, target = job.delta.files[name], part / name
    if file.how == "same":
        return _pass_on(job.old.folder / str(file.source), target, job.passthrough)
    if file.how == "whole":
        return _pass_on(job.delta_folder / "files" / name, target, "copy")
    if file.how == "patch":
        write_whole(target, _patched(job, file))
    else:
        make_shard(job, name, file, target)
    return False


def _patched(job: Job, file: NewFile) -> bytes:
    """The new manifest, from the old one."""
    try:
        return canonical(merged(json.loads(job.old.manifest_bytes), file.patch))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{job.delta_folder / DELTA_FILE}: its patch of {MANIFEST_FILE} gives none ({error}); fetch the delta again"
        ) from None


def _pass_on(path: Path, target: Path, how: Passthrough) -> bool:
    stat = file_stat(path)
    with Source(path, stat) as source, Sink(target, stat[0]) as sink:
        if sink.share(source, how):
            return how == "hardlink"
        sink.reserve()
        for offset, chunk in source.chunks(Buffers().get("chunk", CHUNK_BYTES), 0, stat[0]):
            sink.write(chunk, offset)
    return False


def _verify(delta: Delta, part: Path) -> None:
    """Raises CheckpointError where a file is not what the new manifest describes."""
    data = (part / MANIFEST_FILE).read_bytes()
    manifest = Manifest.from_json(data, MANIFEST_FILE)
    for name in sorted(manifest.files.keys() - delta.files.keys()):
        raise CheckpointError(
            f"{name}: the new manifest names it and the delta does not make it; make it again"
        )
    for name, file in delta.files.items():
        record = manifest.files.get(name)
        stated = record.sha256 if record else None
        expected = delta.new_manifest if name == MANIFEST_FILE else stated or file.sha256
        if expected is not None:
            _refuse_difference(name, "sha256", expected, sha256_of(part / name))
        else:
            header = read_header(part / name, name)
            _refuse_difference(name, "sha256 of its header", str(file.header), header.digest)
            stated_tensors = manifest.shards[name].tensors if name in manifest.shards else {}
            for tensor, digest in tensors_of(part / name, header).items():
                _refuse_difference(f"{name}: {tensor}", "digest", stated_tensors.get(tensor), digest)


def _refuse_difference(what: str, kind: str, expected: str | None, got: str) -> None:
    if expected != got:
        raise CheckpointError(
            f"{what}: expected the {kind} {expected}, got {got}: the old checkpoint or the delta is damaged; "
            f"nothing was written; `shardmill verify integrity` tells what of the old one, else fetch the delta again"
        )
