"""Digests of files that are there already: the one loop that reads a file to hash it.

What a build writes is hashed as it is written (stages.rewrite, run.publish); this is for what must be read for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardmill.pipeline.container.files import CHUNK_BYTES, Buffers, Source
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.manifest.digest import TensorSplitter
from shardmill.pipeline.types import Header, Stat


def chunks_of(path: Path, stat: Stat | None = None, begin: int = 0) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of the file from `begin` to its end. Each view holds until the next is asked for.

    Raises CheckpointError where the file changes meanwhile, or has another stat than `stat`.
    """
    known = stat or file_stat(path)
    with Source(path, known) as source:
        yield from source.chunks(Buffers().get("chunk", CHUNK_BYTES), begin, known[0])


def sha256_of(path: Path) -> str:
    """sha256 of the file, hex."""
    digest = hashlib.sha256()
    for _, chunk in chunks_of(path):
        digest.update(chunk)
    return digest.hexdigest()


def tensors_of(path: Path, header: Header) -> Mapping[str, str]:
    """Tensor name -> digest of its data in a file that has this header and its size."""
    splitter = _splitter(header)
    for _, chunk in chunks_of(path, begin=header.data_begin):
        splitter.update(chunk)
    return splitter.digests()


def sha256_and_tensors_of(path: Path, header: Header) -> tuple[str, Mapping[str, str]]:
    """Both in one pass."""
    digest, splitter = hashlib.sha256(), _splitter(header)
    for offset, chunk in chunks_of(path):
        digest.update(chunk)
        splitter.update(chunk[max(0, header.data_begin - offset) :])
    return digest.hexdigest(), splitter.digests()


def _splitter(header: Header) -> TensorSplitter:
    return TensorSplitter([(ref.name, ref.bytes) for ref in header.tensors])
