"""A shard's bytes: a Source is read at offsets into buffers that are reused, a Sink is written at offsets.

Offsets are bytes from the start of the file. Fresh memory is dear (a page fault costs more than the copy), so
nothing here allocates per call. A Source that changes while it is read, or since its header was, is refused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType

from shardmill.pipeline.container.filesystem import close_reader, is_refused, stat_or_none, sync_file
from shardmill.pipeline.container.hub import hub_bytes
from shardmill.pipeline.container.regular import open_regular
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.types import Stat

CHUNK_BYTES = 1 << 20  # the reading size at which one core copies fastest
_FICLONE = 0x40049409  # Linux ioctl: share the extents of another file
_SEND_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "sync_file_range") else None


class Source:
    """A parent's file, open for reading. Use as a context manager; leaving it checks that the file held still.

    Its ctime alone may move: somebody links it or changes its mode, or writes it and restores its times. Then
    `retouched` is set and `stat` is the new one, and the reader proves by the bytes which of the two it was.
    A shard in the sparse mirror of a hub's repository is fetched as it is read: `hub` holds its bytes, not the file.
    """

    def __init__(self, path: Path, stat: Stat, once: bool = False, connections: int | None = None) -> None:
        """`once`: nobody will want its bytes again soon, so they leave the page cache when it is closed.

        `connections`: how many ranges of a hub's file are asked for at a time.
        """
        self.path, self.stat, self._once = path, stat, once
        self.retouched = False
        self.hub = hub_bytes(path, connections)
        try:
            self.fd = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None

    def __enter__(self) -> Source:
        try:
            self._held_still("since its header was read")
        except BaseException:
            close_reader(self.fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._once:
            _forget(self.fd)
        close_reader(self.fd)
        if self.hub is not None:
            self.hub.close()
        if error is None:
            self._held_still("while it was read")

    def _held_still(self, when: str) -> None:
        now = stat_or_none(self.path)
        if now is None or now[:3] != self.stat[:3]:
            raise CheckpointError(f"{self.path}: changed {when}; let its writer finish, then build again")
        self.retouched |= now != self.stat
        self.stat = now

    def link(self, target: Path) -> None:
        """Makes `target` a hard link to this file, which moves its ctime and nothing else."""
        self._held_still("since its header was read")
        link = target.with_name(target.name + ".link")
        os.link(self.path.resolve(), link)
        link.replace(target)
        now = stat_or_none(self.path)
        if now is not None and now[:3] == self.stat[:3]:
            self.stat = now

    def read(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes at `offset`; raises CheckpointError where the file can't give them."""
        if self.hub is not None:
            self.hub.read_into(target, offset)
            return
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.fd, [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: byte {offset + done} cannot be read: {error.strerror}"
                ) from None
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}, was cut while it was read")
            done += count

    def chunks(self, buffer: memoryview, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) over [begin, end), each filling `buffer` or what is left."""
        for offset in range(begin, end, len(buffer)):
            view = buffer[: min(len(buffer), end - offset)]
            self.read(view, offset)
            yield offset, view


class Sink:
    """A new file of a known size. The room is reserved at once, so that a full disk is met before the work."""

    def __init__(
        self, path: Path, size: int, once: bool = False, anew: bool = True, sync: bool = True
    ) -> None:
        """`once` is as a Source's. `anew` False: another process has made the file. `sync` False: another one will wait
        for the disk.
        """
        self.path, self.size, self._once, self._waits = path, size, once, sync
        self._unsent = 0  # bytes written since the kernel was last asked to send them to the disk
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if anew else 0), 0o666)
        except OSError as failure:
            raise self._failed(failure) from None

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._waits:
                self._sync()
        finally:
            self._close()

    def _close(self) -> None:
        """A network file system may say only here that bytes did not arrive."""
        try:
            os.close(self.fd)
        except OSError as failure:
            raise self._failed(failure) from None

    def _sync(self) -> None:
        try:
            sync_file(self.fd, self.path)
        except OSError as failure:
            raise self._failed(failure) from None
        if self._once:
            _forget(self.fd)

    def reserve(self) -> None:
        try:
            self._allocate()
        except OSError as failure:
            raise self._failed(failure) from None

    def _allocate(self) -> None:
        if not self.size:
            return
        try:
            os.posix_fallocate(self.fd, 0, self.size)
        except OSError as failure:
            if not is_refused(failure, "fallocate", self.path, "a full disk is met only as it is written"):
                raise
            os.ftruncate(self.fd, self.size)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done:], offset + done)
            except OSError as failure:
                raise self._failed(failure) from None
        self._unsent += done
        if self._unsent >= _SEND_BYTES:
            _send(self.fd)
            self._unsent = 0

    def read(self, target: memoryview, offset: int) -> None:
        """Reads back what was written."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.fd, [target[done:]], offset + done)
            except OSError as failure:
                raise self._failed(failure, "read back") from None
            if count == 0:
                raise BuildError(f"{self.path}: byte {offset + done} was written but can't be read back")
            done += count

    def share(self, source: Source, how: str) -> bool:
        """Becomes `source` without a copy, by "reflink" or "hardlink"; False where the file systems can't."""
        if source.hub is not None:
            return False
        try:
            if how == "reflink":
                fcntl.ioctl(self.fd, _FICLONE, source.fd)
            elif how == "hardlink":
                source.link(self.path)
            return how != "copy"
        except OSError:
            return False

    def _failed(self, failure: OSError, what: str = "written") -> BuildError:
        advice = (
            "make room, then build again: it goes on where it stopped"
            if failure.errno == errno.ENOSPC
            else ""
        )
        return BuildError(
            f"{self.path}: cannot be {what}: {failure.strerror}" + (f"; {advice}" if advice else "")
        )


class Nowhere(Sink):
    """A sink that keeps nothing: for what is only counted."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        pass


def can_reflink(folder: Path) -> bool:
    """Whether the file system of `folder` shares extents between files: tried with two small ones."""
    with TemporaryFile(dir=folder) as one, TemporaryFile(dir=folder) as other:
        one.write(b"x" * mmap.PAGESIZE)
        one.flush()
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
        except OSError:
            return False
        return True


def _send(fd: int) -> None:
    """Starts writing the file's dirty pages to the disk, without waiting, so that the fsync at the end is short."""
    if _LIBC is not None:
        _LIBC.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def _forget(fd: int) -> None:
    """Lets the page cache drop a file. Where a build is larger than the memory, the kernel would else spend more time
    on finding pages to drop than on the disk: 22 s for 13.5 GB against 15 s."""
    with suppress(OSError):  # it is advice
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Buffers:
    """Named buffers of one worker, grown when asked for more and otherwise reused."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def get(self, name: str, size: int) -> memoryview:
        held = self._maps.get(name)
        if held is None or len(held) < size:
            held = self._maps[name] = mmap.mmap(-1, max(size, 1))
        return memoryview(held)[:size]
