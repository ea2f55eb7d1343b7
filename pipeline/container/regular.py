"""Small files are read whole, and only where they are files: to open a FIFO waits for ever, a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor to read the file at `path`. Raises OSError, which names it, where it is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            kind = (
                "is a folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "is a pipe or a device, not a file"
            )
            raise OSError(errno.EINVAL, kind, str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The file's bytes, `most` of them at most. Raises OSError that names path and call: a disk that fails midway
    tells Python of no path.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read() if most is None else file.read(most)
    except OSError as error:
        raise OSError(error.errno, f"read: {error.strerror}", str(path)) from None


def resolved(path: Path) -> Path:
    """The path without its links. Raises OSError where they lead in a circle, of which Python makes a RuntimeError."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
