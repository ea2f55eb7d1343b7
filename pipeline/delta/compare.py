"""What changed between two checkpoints, from their manifests and headers alone: a Delta, and no tensor is read.

A tensor is the old one where digest and size are the same, whatever its name and file. The digests that decide are
xxh3-128 and so no proof against malice; the proof is the sha256 of each file that is made, compared when it is applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from shardmill.pipeline.delta.child import Child
from shardmill.pipeline.delta.merge import merge_patch
from shardmill.pipeline.delta.records import Changes, Delta, Needed, NewFile, Run
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.types import Header, TensorRef

Place = tuple[str, str]  # file and tensor of the old checkpoint
Identity = tuple[str, int]  # digest and bytes of a tensor


def compare(old: Child, new: Child, sha256_of: Callable[[Path], str]) -> Delta:
    """The Delta from `old` to `new`. `sha256_of` hashes the small files for which a manifest states nothing."""
    places = _places(old)
    names = {name: _digest(old, name, sha256_of) for name in old.sizes}
    by_sha256 = {digest: name for name, digest in sorted(names.items(), reverse=True) if digest}
    files = {}
    for name, size in new.sizes.items():
        sha256 = _digest(new, name, sha256_of)
        same = name if sha256 and names.get(name) == sha256 else by_sha256.get(sha256 or "")
        header = new.header(name).digest if name in new.manifest.shards else None
        if same is not None:
            files[name] = NewFile("same", size, sha256, source=same, header=header)
        elif header is not None:
            files[name] = _shard(old, new, name, sha256, places)
        else:
            files[name] = _patch(old, new, name, sha256) or NewFile("whole", size, sha256)
    return Delta(
        old.manifest_sha256, new.manifest_sha256, _needs(old, files), files, _changes(old, new, files)
    )


def _digest(child: Child, name: str, sha256_of: Callable[[Path], str]) -> str | None:
    if name == MANIFEST_FILE:
        return child.manifest_sha256
    known = child.sha256(name)
    return known if known or name in child.manifest.shards else sha256_of(child.folder / name)


def _places(old: Child) -> Mapping[Identity, list[Place]]:
    found: dict[Identity, list[Place]] = {}
    for shard, record in old.manifest.shards.items():
        for ref in old.header(shard).tensors:
            identity = (record.tensors[ref.name], ref.bytes)
            found.setdefault(identity, []).append((shard, ref.name))
    return found


def _shard(
    old: Child, new: Child, name: str, sha256: str | None, places: Mapping[Identity, list[Place]]
) -> NewFile:
    header, digests = new.header(name), new.manifest.shards[name].tensors
    sources = [_source(ref, digests[ref.name], name, places) for ref in header.tensors]
    runs = tuple(_runs(header.tensors, sources))
    held = name if name in old.manifest.shards and old.header(name).digest == header.digest else None
    if held and all(run.file == name for run in runs) and _in_order(header, runs):
        return NewFile("same", header.file_bytes, sha256, source=name, header=header.digest)
    fresh = {
        ref.name: digests[ref.name]
        for ref, source in zip(header.tensors, sources, strict=True)
        if source is None
    }
    text = None if held else _header_text(new.folder / name, header)
    return NewFile(
        "shard",
        header.file_bytes,
        sha256,
        source=held,
        header=header.digest,
        header_text=text,
        runs=runs,
        digests=fresh,
    )


def _source(ref: TensorRef, digest: str, shard: str, places: Mapping[Identity, list[Place]]) -> Place | None:
    """Where the old checkpoint has the tensor's bytes: best under its own name, then in the file of that name."""
    found = places.get((digest, ref.bytes), [])
    return min(found, key=lambda place: (place[1] != ref.name, place[0] != shard, place), default=None)


def _runs(tensors: Iterable[TensorRef], sources: Iterable[Place | None]) -> Iterator[Run]:
    pairs = zip(tensors, sources, strict=True)
    for file, run in groupby(pairs, key=lambda pair: pair[1][0] if pair[1] else None):
        yield Run(file, tuple(source[1] if source else ref.name for ref, source in run))


def _in_order(header: Header, runs: Iterable[Run]) -> bool:
    return [name for run in runs for name in run.tensors] == [ref.name for ref in header.tensors]


def _header_text(path: Path, header: Header) -> str:
    with path.open("rb") as file:
        return file.read(header.data_begin)[8:].decode()


def _patch(old: Child, new: Child, name: str, sha256: str | None) -> NewFile | None:
    """The manifest as a patch of the old one: most of it is the digests of unchanged tensors."""
    if name != MANIFEST_FILE:
        return None
    source, target = json.loads(old.manifest_bytes), json.loads(new.manifest_bytes)
    patch = merge_patch(source, target)
    if patch is None or canonical(target) != new.manifest_bytes:
        return None
    return NewFile("patch", len(new.manifest_bytes), sha256, source=name, patch=patch)


def _needs(old: Child, files: Mapping[str, NewFile]) -> dict[str, Needed]:
    named = {file.source for file in files.values()} | {
        run.file for file in files.values() for run in file.runs
    }
    return {
        name: Needed(old.sizes[name], old.header(name).digest if name in old.manifest.shards else None)
        for name in sorted(name for name in named if name)
    }


def _changes(old: Child, new: Child, files: Mapping[str, NewFile]) -> Changes:
    before, after = _tensors(old), _tensors(new)
    gone, fresh = before.keys() - after.keys(), after.keys() - before.keys()
    renamed = _renamed({name: before[name] for name in gone}, {name: after[name] for name in fresh})
    moved = {file.source: name for name, file in files.items() if file.how == "same" and file.source != name}
    left = old.sizes.keys() - new.sizes.keys()
    renamed_files = {source: name for source, name in sorted(moved.items()) if source in left}
    return Changes(
        changed=tuple(sorted(name for name in before.keys() & after.keys() if before[name] != after[name])),
        added=tuple(sorted(fresh - set(renamed.values()))),
        removed=tuple(sorted(gone - renamed.keys())),
        renamed=renamed,
        removed_files=tuple(sorted(left - renamed_files.keys())),
        renamed_files=renamed_files,
    )


def _tensors(child: Child) -> dict[str, str]:
    return {
        name: digest for shard in child.manifest.shards.values() for name, digest in shard.tensors.items()
    }


def _renamed(gone: Mapping[str, str], fresh: Mapping[str, str]) -> dict[str, str]:
    """Old name -> new name of tensors with the same digest, each new name once."""
    waiting: dict[str, list[str]] = {}
    for name in sorted(fresh, reverse=True):
        waiting.setdefault(fresh[name], []).append(name)
    return {name: waiting[digest].pop() for name, digest in sorted(gone.items()) if waiting.get(digest)}
