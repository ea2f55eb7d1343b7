"""A file appears under its name when it is whole, never in part. Everything small that the pipeline writes goes here.

The bytes go into `NAME.part` beside it, to the disk, and then take the name; an interrupted write leaves the earlier
file as it was, and at most a `.part` that the next write replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardmill.pipeline.container.filesystem import sync_file

PART_SUFFIX = ".part"


@contextmanager
def whole_file(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path` when the block ends, as a new inode; an error leaves `path` alone.

    `sync`: its bytes are on the disk before it gets its name. Raises OSError that names `path`, also of a full disk,
    whose own error names no file.
    """
    part = path.with_name(path.name + PART_SUFFIX)
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


def _discard(part: Path) -> None:
    """Takes the part away; one that can't be is replaced by the next write."""
    with suppress(OSError):
        part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` never holds a part of it."""
    with whole_file(path) as file:
        file.write(data)
