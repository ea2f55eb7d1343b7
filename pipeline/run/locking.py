"""One build at a time in an output folder, on whatever file system it is.

flock is asked first. Where a mount has none (NFS without its lock service, many FUSE systems), a file that names its
holder takes its place: one whose process is gone, on this host, is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.filesystem import close_reader, is_refused, named
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.state import read_object

HOLDER_SUFFIX = ".holder"


@contextmanager
def locked(path: Path, out: Path) -> Iterator[None]:
    """Holds the lock file `path` of the output folder `out`. Raises BuildError where another build has it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise BuildError(
            f"{path}: cannot be opened: {error.strerror}; make it writable, or choose another --out"
        ) from None
    try:
        if _flock(fd, path, out):
            yield
        else:
            with _holding(path.with_name(path.name + HOLDER_SUFFIX), out):
                yield
    finally:
        close_reader(fd)


def _flock(fd: int, path: Path, out: Path) -> bool:
    """Whether the lock is held; False where the file system has no flock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _busy(out, "wait until it ends") from None
        if not is_refused(
            error, "flock", path, "a second build from another host is noticed by its lock file alone"
        ):
            raise named(error, "flock", path) from None
        return False
    return True


@contextmanager
def _holding(path: Path, out: Path) -> Iterator[None]:
    """Holds the file `path`, which names this process, until the block ends."""
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    holder = read_object(path)
    if holder and holder != me and not _is_gone(holder, me["host"]):
        raise _busy(
            out,
            f"wait until it ends; if process {holder.get('pid')} on {holder.get('host')} is none, delete {path}",
        )
    write_whole(path, json.dumps(me).encode())
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _is_gone(holder: object, host: object) -> bool:
    """Whether the process that a holder's file names was one of this host and is there no more."""
    if not isinstance(holder, dict) or holder.get("host") != host:
        return False
    pid = holder.get("pid")
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _busy(out: Path, advice: str) -> BuildError:
    return BuildError(f"{out}: another build is at work in it; {advice}, or choose another --out")
