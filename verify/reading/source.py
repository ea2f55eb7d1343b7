"""Where a checkpoint lies: names with sizes, and ranges of bytes. Nothing outside the given place is ever read.

`Folder` serves a folder or one file of it; `verify.reading.remote` serves http(s) and hubs by the same protocol.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from shardmill.verify.rules.findings import Finding, UnreadableError

ENTRIES_MAX = 100_000  # of a folder, its own folders included
DEPTH_MAX = 8
SPARSE_FROM = 1 << 34  # bytes; a smaller file is read whatever it holds
SPARSE_SHARE = 4  # below a quarter on the disk

# What a cut save or download leaves behind: the safetensors library's .tmpXXXXXX, downloaders' own endings.
_ORPHAN = re.compile(r"^\.tmp\w{6}$|\.(incomplete|part|partial|tmp|aria2|crdownload)$")


class Reader(Protocol):
    """One open file."""

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `begin` on. Raises UnreadableError where the file ends before."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Source(Protocol):
    """A place that holds a checkpoint's files."""

    where: str  # for people
    remote: bool  # reading everything costs transfer
    listed: bool  # `files` are all that there are; a web address is asked for known names alone

    @property
    def digests(self) -> Mapping[str, str]:
        """File -> the sha256 that the place itself states, where it does."""

    @property
    def transferred(self) -> int:
        """Bytes that came over a network so far."""

    def files(self) -> dict[str, int]:
        """Path relative to the place -> bytes, of every readable regular file but dotfiles."""

    def findings(self) -> list[Finding]:
        """What `files` left out and why."""

    def open(self, file: str) -> AbstractContextManager[Reader]: ...


def read(source: Source, file: str, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file."""
    buffer = bytearray(end - begin)
    with source.open(file) as reader:
        reader.read_into(begin, memoryview(buffer))
    return bytes(buffer)


class FileReader:
    """A regular file of a folder. Reads are positioned, so that a reader has no state but its descriptor."""

    def __init__(self, path: Path, file: str) -> None:
        self._file = file
        try:
            # O_NONBLOCK: a FIFO put here after the listing must not hang us.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableError(
                Finding("special-file", file, "", "a readable file", error.strerror or "")
            ) from None

    def read_into(self, begin: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], begin + done)
            except OSError as error:
                said = error.strerror or ""
                raise UnreadableError(
                    Finding("special-file", self._file, "", "a readable file", said)
                ) from None
            if got == 0:
                expected, there = f"{begin + len(buffer):,} bytes", f"{begin + done:,} bytes"
                raise UnreadableError(Finding("truncated-file", self._file, "", expected, there))
            done += got

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


class Folder:
    """A local folder, or one file of it (`only`)."""

    remote, listed = False, True
    transferred = 0

    def __init__(self, path: Path) -> None:
        self.digests: Mapping[str, str] = {}
        self.root = path if path.is_dir() else path.parent
        self.only = None if path.is_dir() else path.name
        self.where = str(path)
        self._findings: list[Finding] = []
        self.sparse: set[str] = set()  # files of which hardly anything was ever written

    def findings(self) -> list[Finding]:
        return self._findings

    def open(self, file: str) -> FileReader:
        return FileReader(self.root / file, file)

    def files(self) -> dict[str, int]:
        self._findings = []
        if self.only is not None:
            return {self.only: (self.root / self.only).stat().st_size}
        return dict(sorted(self._walk(self.root, "", DEPTH_MAX, [ENTRIES_MAX])))

    def _walk(self, folder: Path, prefix: str, depth: int, room: list[int]) -> Iterator[tuple[str, int]]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self._findings.append(
                Finding("special-file", prefix, "", "a readable folder", error.strerror or "")
            )
            return
        for entry in entries:
            room[0] -= 1
            if room[0] < 0:
                if room[0] == -1:
                    self._findings.append(
                        Finding(
                            "listing-bound",
                            prefix,
                            "",
                            f"at most {ENTRIES_MAX:,} entries",
                            "more; they were not looked at",
                        )
                    )
                return
            name = prefix + entry.name
            if _ORPHAN.search(entry.name) and entry.is_file(follow_symlinks=False):
                self._findings.append(Finding("orphan-file", name))
            elif entry.name.startswith("."):
                continue
            elif entry.is_dir(follow_symlinks=False):
                if depth:
                    yield from self._walk(Path(entry.path), name + "/", depth - 1, room)
                else:
                    said = f"folders of at most {DEPTH_MAX} levels"
                    self._findings.append(
                        Finding("listing-bound", prefix, "", said, "a deeper one; it was not looked at")
                    )
            else:
                yield from self._file(Path(entry.path), name)

    def _file(self, path: Path, name: str) -> Iterator[tuple[str, int]]:
        if path.is_symlink() and not self._stays(path):
            self._findings.append(Finding("link-leaves-folder", name, "", "", str(path.readlink())))
            return
        try:
            facts = path.stat()
        except OSError as error:
            self._findings.append(Finding("special-file", name, "", "a readable file", error.strerror or ""))
            return
        if stat.S_ISREG(facts.st_mode):
            if facts.st_size > SPARSE_FROM and 512 * facts.st_blocks < facts.st_size // SPARSE_SHARE:
                self.sparse.add(name)
                got = f"{512 * facts.st_blocks:,} of {facts.st_size:,} bytes"
                self._findings.append(Finding("sparse-file", name, "", "a file that was written whole", got))
            yield name, facts.st_size
        elif not stat.S_ISDIR(facts.st_mode):
            self._findings.append(
                Finding("special-file", name, "", "a regular file", stat.filemode(facts.st_mode))
            )

    def _stays(self, link: Path) -> bool:
        """Whether a link ends in this folder, or in the blobs of the Hugging Face cache that this snapshot is of."""
        root, target = Path(os.path.realpath(self.root)), Path(os.path.realpath(link))
        if target.is_relative_to(root):
            return True
        return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
