"""A folder appears under its name when it is whole, never in part: it is filled as `.NAME.part` beside it and renamed.

An interrupted run leaves at most that folder, which the next run of the same command empties. Two runs at once are
known apart by a lock on it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill.pipeline.container.atomic import PART_SUFFIX
from shardmill.pipeline.container.filesystem import sync_folder
from shardmill.pipeline.container.regular import resolved
from shardmill.pipeline.errors import BuildError, OutputFolderError


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `out` when the block ends; an error leaves nothing behind.

    Raises OutputFolderError where `out` is there already and not an empty folder, or another run is filling it.
    """
    target = resolved(out)
    refuse_taken(out)
    part = target.with_name(f".{target.name}{PART_SUFFIX}")
    if part.is_symlink():
        raise BuildError(f"{part}: is a link; files there would be deleted, remove the link")
    part.mkdir(parents=True, exist_ok=True)
    handle = os.open(part, os.O_RDONLY)
    try:
        _lock(handle, part, out)
        _empty(part)
        yield part
        _sync(part)
        refuse_taken(out)
        part.rename(target)
        sync_folder(target.parent)
    except BaseException:
        if _holds(handle, part):
            shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def refuse_taken(out: Path) -> None:
    """Raises OutputFolderError where `out` is a file, or a folder that holds something."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise OutputFolderError(f"{out}: exists already and is not an empty folder; give another name")


def refuse_within(out: Path, *folders: Path) -> None:
    """Raises OutputFolderError where `out` is one of the folders that are read, or in it."""
    for folder in folders:
        if resolved(out).is_relative_to(resolved(folder)):
            raise OutputFolderError(
                f"{out}: is within {folder}, which it would spoil; give a folder beside it"
            )


def _lock(handle: int, part: Path, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BuildError(f"{out}: another run is writing it; let that one end") from None
    except OSError:  # a file system without locks
        return
    if not _is_same(handle, part):
        raise BuildError(f"{out}: another run has just written it; nothing is left to do")


def _holds(handle: int, part: Path) -> bool:
    """Whether `part` is this run's: it is still the folder behind `handle`, and no other run has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return _is_same(handle, part)


def _is_same(handle: int, part: Path) -> bool:
    return part.exists() and part.stat().st_ino == os.fstat(handle).st_ino


def _empty(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _sync(folder: Path) -> None:
    for root, _, _ in os.walk(folder):
        sync_folder(Path(root))
