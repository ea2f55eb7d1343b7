"""Writes a toy parent into a folder: side files, one shard after the other, the index last.

A file appears under its name only when it is whole, and as a new inode, so that a child whose files are hard
links to an earlier parent's keeps its bytes. Memory is bounded by the largest tensor that is a copy of FP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardmill.pipeline.container.atomic import whole_file
from shardmill.pipeline.container.header import header_bytes, lay_out
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.toy.glm53 import METADATA, parent_files
from shardmill.pipeline.toy.side_files import readme, side_files
from shardmill.pipeline.toy.sizes import Size
from shardmill.pipeline.types import Header

INDEX_FILE = "model.safetensors.index.json"


def toy_headers(size: Size) -> list[Header]:
    """The headers of every file of the toy parent `size`, by file name."""
    files = parent_files(size.dimensions, size.cut())
    return [lay_out(tensors, file, METADATA) for file, tensors in sorted(files.items())]


def is_whole(folder: Path, headers: Iterable[Header]) -> bool:
    """Whether `folder` already holds all files of this parent, at their sizes."""
    paths = [(folder / header.shard, header.file_bytes) for header in headers]
    return (folder / INDEX_FILE).is_file() and all(
        p.is_file() and p.stat().st_size == size for p, size in paths
    )


def check_folder(folder: Path, size: Size) -> None:
    """Refuse a folder that holds anything but a toy parent of this size, whole or begun."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    mark = folder / "README.md"
    if folder.exists() and not (mark.is_file() and mark.read_text(errors="replace") == readme(size)):
        raise ShardmillError(
            f"{folder}: holds something other than a toy parent of size {size.name}; name a new or an empty folder"
        )


def write_parent(folder: Path, size: Size, headers: Iterable[Header], wrote: Callable[[int], None]) -> None:
    """Write the toy parent `size` into `folder`; `wrote` hears of each run of bytes that reached a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for name, text in side_files(size).items():
        _appear(folder / name, [text.encode()])
    headers = list(headers)
    for header in headers:
        if size.sparse:
            _appear(folder / header.shard, [header_bytes(header)], header.file_bytes)
            wrote(header.file_bytes)
        else:
            _appear(folder / header.shard, _counted(_shard(header), wrote))
    _appear(folder / INDEX_FILE, [_index(headers).encode()])


def _shard(header: Header) -> Iterator[bytes | memoryview]:
    from shardmill.pipeline.toy.weights import tensor_data

    yield header_bytes(header)
    for ref in header.tensors:
        yield from tensor_data(ref)


def _counted(
    pieces: Iterable[bytes | memoryview], wrote: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
        wrote(len(piece))


def _appear(path: Path, pieces: Iterable[bytes | memoryview], file_bytes: int | None = None) -> None:
    """Write `pieces` to `path`; with `file_bytes`, what they leave of it stays a hole that reads as zeros."""
    try:
        with whole_file(path, sync=False) as file:
            _write(file, pieces, file_bytes)
    except OSError as error:
        raise ShardmillError(f"{path}: cannot be written: {error.strerror}") from error


def _write(file: BinaryIO, pieces: Iterable[bytes | memoryview], file_bytes: int | None) -> None:
    for piece in pieces:
        file.write(piece)
    if file_bytes is not None:
        file.truncate(file_bytes)


def _index(headers: Iterable[Header]) -> str:
    headers = list(headers)
    weight_map = {ref.name: header.shard for header in headers for ref in header.tensors}
    total = sum(header.data_bytes for header in headers)
    value = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(value, indent=2) + "\n"
