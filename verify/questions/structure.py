"""Index, headers and files against one another, in both directions. Needs no manifest, and of data a few rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardmill.verify.questions.copies import same_weights
from shardmill.verify.reading.checkpoint import SUFFIX, Checkpoint, Index
from shardmill.verify.reading.what_it_is import folder_is
from shardmill.verify.rules.findings import Finding

_NUMBERED = re.compile(r"^(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors$")


def structure_faults(checkpoint: Checkpoint) -> Iterator[Finding]:
    shards = [file for file in checkpoint.files if file.endswith(SUFFIX)]
    if not any("/" not in file for file in shards) and not checkpoint.headers:
        got = folder_is(checkpoint.files) or "none"
        yield Finding(
            "no-weights", checkpoint.source.where, "", "safetensors files in the folder itself", got
        )
    if checkpoint.index is not None:
        yield from _index_faults(checkpoint, checkpoint.index)
    elif any(_NUMBERED.match(file) for file in checkpoint.headers):
        yield Finding("no-index", "model.safetensors.index.json", "", "an index of the shards", "none")
    yield from _twice(checkpoint)
    yield from _series(checkpoint)


def _index_faults(checkpoint: Checkpoint, index: Index) -> Iterator[Finding]:
    named = set(index.weight_map.values())
    renamed = dict(_renamed(checkpoint, index, named))
    for file in sorted(named - set(checkpoint.files)):
        if file in renamed:
            yield Finding("renamed-shard", file, "", file, renamed[file])
        else:
            yield Finding("missing-shard", file, "", f"a file that {index.file} names", "none")
    yield from _names(checkpoint, index, renamed)
    native = {file for file in checkpoint.copies if file.startswith("consolidated")}  # vLLM may load it
    for file in sorted(checkpoint.headers.keys() | native):
        if file not in named and file not in renamed.values():
            copied = file in native and same_weights(checkpoint, file)
            slug = "copy-beside" if copied else "stray-shard"
            yield Finding(slug, file, "", f"a file that {index.file} names", "the model's weights" * copied)
    if index.total_size is not None and named <= set(checkpoint.headers):
        total = sum(tensor.bytes for file in named for tensor in checkpoint.headers[file].tensors)
        if total != index.total_size:
            yield Finding("total-size", index.file, "", f"{total:,}", f"{index.total_size:,}")


def _names(checkpoint: Checkpoint, index: Index, renamed: dict[str, str]) -> Iterator[Finding]:
    headers, tensors = checkpoint.headers, checkpoint.tensors
    lost = set(renamed) | {file for file in index.weight_map.values() if file not in headers}
    here: dict[str, frozenset[str]] = {}  # built where a name is not where the index says, and once
    placed = dict.fromkeys(headers, 0)  # file -> tensors that the index rightly names
    for name, file in index.weight_map.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.file == file:
            placed[file] += 1
        elif file not in lost:
            if file not in here:
                here[file] = frozenset(other.name for other in headers[file].tensors)
            if name in here[file]:
                continue
            if tensor is None:
                yield Finding("index-extra-tensor", file, name, f"a tensor that {index.file} lists", "none")
            else:
                yield Finding("index-wrong-shard", tensor.file, name, file, tensor.file)
    for file in set(index.weight_map.values()) & set(headers):
        if placed[file] == len(headers[file].tensors):
            continue
        for name in sorted({tensor.name for tensor in headers[file].tensors} - index.weight_map.keys()):
            yield Finding("index-lacks-tensor", file, name, f"an entry in {index.file}", "none")


def _renamed(checkpoint: Checkpoint, index: Index, named: set[str]) -> Iterator[tuple[str, str]]:
    """(name in the index, name on disk) of missing shards whose very tensors lie in a file the index doesn't name."""
    missing = named - set(checkpoint.files)
    if not missing:
        return
    expected: dict[str, set[str]] = {file: set() for file in missing}
    for name, file in index.weight_map.items():
        if file in expected:
            expected[file].add(name)
    strays = {
        frozenset(tensor.name for tensor in header.tensors): file
        for file, header in checkpoint.headers.items()
        if file not in named
    }
    for file, names in expected.items():
        if frozenset(names) in strays:
            yield file, strays[frozenset(names)]


def _twice(checkpoint: Checkpoint) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for file, header in checkpoint.headers.items():
        for tensor in header.tensors:
            other = first.setdefault(tensor.name, file)
            if other != file:
                yield Finding("duplicate-tensor", file, tensor.name, "one file", f"{other} and {file}")


def _series(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Shards that number themselves i of n must be n: a rewritten index can hide a lost one."""
    series: dict[tuple[str, int], set[int]] = {}
    listed = set(checkpoint.index.weight_map.values()) if checkpoint.index else set()
    for file in checkpoint.headers:
        match = _NUMBERED.match(file)
        if match:
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for file in listed:  # a missing file that the index names is a finding already
        match = _NUMBERED.match(file)
        if match:
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), present in sorted(series.items()):
        absent = count - len(present & set(range(1, count + 1)))
        if absent > 0:
            got = f"{len(present)} of them"
            yield Finding(
                "incomplete-shards", f"{stem}-*-of-{count:05d}.safetensors", "", f"{count} shards", got
            )
