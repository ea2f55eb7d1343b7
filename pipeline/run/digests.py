"""Digests of files that are there already: the one loop that reads a file to hash it.

What a build writes is hashed as it is written (stages.rewrite, run.publish); this is for what must be read for it.
A file whose ctime alone moves meanwhile is read again: a link was made of it, or its mode changed, or it was written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Source
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TensorHash, TensorSplitter
from shardmill.pipeline.types import Header, Stat, TensorRef

Found = TypeVar("Found")
_TRIES = 5


def steadily(path: Path, stat: Stat | None, read: Callable[[Source], Found]) -> tuple[Found, Stat]:
    """What `read` finds in a file that nobody touches meanwhile, and the Stat under which that holds.

    Raises CheckpointError where the file changes, or has another size, mtime or inode than `stat`.
    """
    known = stat or file_stat(path)
    for _ in range(_TRIES):
        with Source(path, known) as source:
            opened = source.stat
            found = read(source)
        if source.stat == opened:
            return found, opened
        known = source.stat
    raise CheckpointError(f"{path}: is touched again and again while it is read; stop that, then build again")


def sha256_of(path: Path, stat: Stat | None = None) -> str:
    """sha256 of the file, hex."""
    return steadily(path, stat, _sha256)[0]


def tensors_of(path: Path, header: Header, stat: Stat | None = None) -> Mapping[str, str]:
    """Tensor name -> digest of its data in a file that has this header and its size."""
    return steadily(path, stat, lambda source: _tensors(source, header))[0]


def sha256_and_tensors_of(path: Path, header: Header) -> tuple[str, Mapping[str, str]]:
    """Both in one pass."""
    return steadily(path, None, lambda source: _both(source, header))[0]


def some_tensors_of(path: Path, header: Header, wanted: Iterable[TensorRef], stat: Stat) -> dict[str, str]:
    """The digests of the `wanted` tensors of a file alone."""
    refs = list(wanted)
    return steadily(path, stat, lambda source: tensors_in(source, header.data_begin, refs))[0]


def tensors_in(source: Source, data_begin: int, refs: Iterable[TensorRef]) -> dict[str, str]:
    """Tensor name -> digest, read from an open file."""
    return {ref.name: _digest(source, data_begin + ref.begin, data_begin + ref.end) for ref in refs}


def _digest(source: Source, begin: int, end: int) -> str:
    digest = TensorHash()
    for _, chunk in source.chunks(_buffer(), begin, end):
        digest.update(chunk)
    return digest.hexdigest()


def _sha256(source: Source) -> str:
    digest = hashlib.sha256()
    for _, chunk in source.chunks(_buffer(), 0, source.stat[0]):
        digest.update(chunk)
    return digest.hexdigest()


def _tensors(source: Source, header: Header) -> Mapping[str, str]:
    splitter = _splitter(header)
    for _, chunk in source.chunks(_buffer(), header.data_begin, header.file_bytes):
        splitter.update(chunk)
    return splitter.digests()


def _both(source: Source, header: Header) -> tuple[str, Mapping[str, str]]:
    digest, splitter = hashlib.sha256(), _splitter(header)
    for offset, chunk in source.chunks(_buffer(), 0, header.file_bytes):
        digest.update(chunk)
        splitter.update(chunk[max(0, header.data_begin - offset) :])
    return digest.hexdigest(), splitter.digests()


def _buffer() -> memoryview:
    return Buffers().get("chunk", CHUNK_BYTES)


def _splitter(header: Header) -> TensorSplitter:
    return TensorSplitter([(ref.name, ref.bytes) for ref in header.tensors])
