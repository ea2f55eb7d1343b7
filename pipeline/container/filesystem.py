"""What some file systems refuse: each refusal that harms nothing is passed over, and said once at the end.

Network and FUSE mounts answer ENOSYS, EOPNOTSUPP, EINVAL, EBADF or ENOLCK to calls that they do not have. Without a
lock, an fsync of a folder or a reservation a build is right all the same, and only less guarded. A call that it can't
do without fails with the path and the call in its error.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.types import Stat

# Answers that mean: this file system has no such call. Any other is a fault of the file or the disk.
REFUSALS: Final = frozenset(
    (
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
        errno.EINVAL,
        errno.EBADF,
        errno.ENOLCK,
        errno.EXDEV,
        errno.ENOTTY,
    )
)
_NO_SUCH_NAME: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP))
_SECOND = 1_000_000_000  # nanoseconds
_FINE_GRAIN = 10_000_000  # a tick of the slowest kernel clock in use, in nanoseconds
_COARSE_GRAIN = 2 * _SECOND  # FAT's; ext4 with small inodes and HFS+ keep whole seconds

_losses: dict[str, str] = {}


def is_refused(error: OSError, call: str, path: Path, lost: str) -> bool:
    """Whether `error` says that the file system has no such call. `lost` is noted then: what that means."""
    if error.errno not in REFUSALS:
        return False
    _losses.setdefault(call, f"{path}: {call}: {error.strerror}; {lost}")
    return True


def note_losses(found: list[str]) -> None:
    """Takes over what another process of this build has passed over: each sentence once."""
    for sentence in found:
        call = sentence.partition(": ")[2].partition(": ")[0]
        _losses.setdefault(call, sentence)


def losses() -> list[str]:
    """What was passed over since this was last asked, a sentence for each call."""
    found = list(_losses.values())
    _losses.clear()
    return found


def named(error: OSError, call: str, path: Path) -> OSError:
    """The same error with the path and the call in its words."""
    return OSError(error.errno, f"{call}: {error.strerror}", str(path))


def sync_file(fd: int, path: Path) -> None:
    """Waits until the file's bytes are on the disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        if not is_refused(error, "fsync", path, "a power cut may lose what was just written"):
            raise named(error, "fsync", path) from None


def sync_folder(path: Path) -> None:
    """Waits until the names in the folder are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise named(error, "open", path) from None
    try:
        os.fsync(handle)
    except OSError as error:
        if not is_refused(error, "fsync of a folder", path, "a power cut may lose the last names in it"):
            raise named(error, "fsync of a folder", path) from None
    finally:
        close_reader(handle)


def replace(source: Path, target: Path) -> None:
    """`source` takes the name `target`. Between two mounts it is copied beside the target first."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise OSError(error.errno, f"rename to {target}: {error.strerror}", str(source)) from None
        _copied_over(source, target)


def _copied_over(source: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        shutil.copyfile(source, part)
        facts = source.stat()
        os.utime(part, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        with part.open("rb") as file:
            sync_file(file.fileno(), part)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise named(error, "copy", target) from None
    source.unlink()


def remove(path: Path) -> None:
    """Takes away a file, or a folder and all that is in it. A link goes, and what it leads to stays."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise named(error, "remove", path) from None


def close_reader(fd: int) -> None:
    """Closes what was only read, or locked: nothing is lost where a mount can't say so."""
    with suppress(OSError):
        os.close(fd)


def stat_or_none(path: Path) -> Stat | None:
    """The file's Stat; None where there is no file of that name."""
    try:
        return file_stat(path) if path.is_file() else None
    except OSError as error:
        if error.errno in _NO_SUCH_NAME:
            return None
        raise


def shows_later_writes(stat: Stat, since: int) -> bool:
    """Whether every write after `since` (nanoseconds) must give the file another Stat: git's racy entries.

    A file that was written within the clock's last grain before `since` may be written again under the same time.
    """
    return ripe_at(stat) <= since


def ripe_at(stat: Stat) -> int:
    """The time (nanoseconds) from which on a write shows in the file's times."""
    changed = stat[3]
    return changed + (_FINE_GRAIN if changed % _SECOND else _COARSE_GRAIN)


def wait_for_fine_clock(stat: Stat, now: int) -> float:
    """Seconds to wait until a write would show, where that is but a tick; 0 where it is none or too long."""
    left = ripe_at(stat) - now
    return left / _SECOND if 0 < left <= _FINE_GRAIN and stat[3] % _SECOND else 0.0
