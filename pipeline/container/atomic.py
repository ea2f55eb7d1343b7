"""A file appears under its name when it is whole, never in part. Everything small that the pipeline writes goes here.

The bytes go into `NAME.part` beside it, to the disk, and then take the name; an interrupted write leaves the earlier
file as it was, and at most a `.part` that the next write replaces.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardmill.pipeline.container.filesystem import sync_file

PART_SUFFIX = ".part"
_NAME_BYTES_MAX = 255  # of every file system in use


@contextmanager
def whole_file(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path` when the block ends, as a new inode; an error leaves `path` alone.

    `sync`: its bytes are on the disk before it gets its name. Raises OSError that names `path`, also of a full disk,
    whose own error names no file.
    """
    part = _part_of(path)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            if sync:
                sync_file(file.fileno(), path)
        part.replace(path)
    except OSError as error:
        _discard(part)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        _discard(part)
        raise


def _part_of(path: Path) -> Path:
    """The name of a file while it is written. A name too long for the suffix is replaced by its digest."""
    name = path.name + PART_SUFFIX
    if len(os.fsencode(name)) > _NAME_BYTES_MAX:
        name = hashlib.sha256(os.fsencode(path.name)).hexdigest() + PART_SUFFIX
    return path.with_name(name)


def _discard(part: Path) -> None:
    """Takes the part away; one that can't be is replaced by the next write."""
    with suppress(OSError):
        part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` never holds a part of it."""
    with whole_file(path) as file:
        file.write(data)
