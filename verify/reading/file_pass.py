"""One file of a checkpoint, read once in strips: its sha256, the digests of its tensors, their values, their twins.

A strip is read into a buffer that is reused, and every reader of its bytes is fed from it while it is in the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Reader, Source
from shardmill.verify.rules.findings import Finding, UnreadableError

GAP_BYTES_MAX = 64 << 10  # runs of bytes closer than this are read as one
STRIP_BYTES = 1 << 20  # read, hashed and looked at while in the second-level cache

Strip = NDArray[np.uint8]
Buffers = tuple[Strip, Strip]


class Watch(Protocol):
    """What to look for in one tensor."""

    def glance(self, whole: Strip) -> tuple[bool, Any]:
        """Whether these bytes, all that it has, hold no fault at a glance, and the outcome; else a watcher is made."""

    def begin(self) -> Watcher: ...


class Watcher(Protocol):
    """Is fed one tensor's bytes in order, then asked."""

    def feed(self, strip: Strip) -> object: ...

    def findings(self) -> list[Finding]: ...

    @property
    def outcome(self) -> object:
        """What else it found out, to be given back in FileResult.outcomes; None for nothing."""


class Task(NamedTuple):
    """What to do with one tensor of a file."""

    tensor: Tensor
    digest: bool = False
    watch: Watch | None = None  # of its elements
    twin: Tensor | None = None  # of the other checkpoint, to be equal byte by byte


class FileJob(NamedTuple):
    """What to do with one file; its tasks lie in the order of their bytes and do not overlap."""

    file: str
    size: int
    sha256: bool
    tasks: tuple[Task, ...]

    @property
    def bytes(self) -> int:
        """To read, the twins' bytes left out."""
        return self.size if self.sha256 else sum(task.tensor.bytes for task in self.tasks)


class Found(NamedTuple):
    """The same as it comes from another process: tensors are known by their places in the job, which it has too."""

    file: str
    sha256: str
    digests: str  # of the tasks that ask for one, in their order, as far as the file could be read
    unequal: dict[str, int]
    findings: list[Finding]
    outcomes: list[tuple[int, Any]]  # (place of the task, its watcher's outcome)
    broken: bool  # the file could not be read to its end


def buffers() -> Buffers:
    return np.empty(STRIP_BYTES, np.uint8), np.empty(STRIP_BYTES, np.uint8)


class Pass:
    """One file, read once. Readers of a tensor's bytes are kept between strips where it is not within one."""

    def __init__(self, source: Source, other: Source | None, job: FileJob, buffers: Buffers) -> None:
        self._source, self._other, self._job, self._buffers = source, other, job, buffers
        self._digests: list[str] = []
        self._unequal: dict[str, int] = {}
        self._findings: list[Finding] = []
        self._outcomes: list[tuple[int, Any]] = []
        self._place = 0  # of the task that waits for bytes
        self._hash: xxhash.xxh3_128 | None = None
        self._watcher: Watcher | None = None
        self._twins: dict[str, Reader] = {}

    def run(self, progress: Callable[[int], None]) -> Found:
        sha = hashlib.sha256() if self._job.sha256 else None
        try:
            self._read(sha, progress)
        except UnreadableError as error:
            self._findings.append(error.finding)
            return self._found("", True)
        return self._found(sha.hexdigest() if sha is not None else "", False)

    def _read(self, sha: hashlib._Hash | None, progress: Callable[[int], None]) -> None:
        with ExitStack() as opened:
            reader = opened.enter_context(self._source.open(self._job.file))
            self._open_twins(opened)
            for begin, end in self._strips():
                strip = self._buffers[0][: end - begin]
                reader.read_into(begin, strip.data)
                if sha is not None:
                    sha.update(strip.data)
                self._feed(begin, end, strip)
                progress(end - begin)
            for place in range(self._place, len(self._job.tasks)):  # without bytes, at the end of the file
                self._place = place
                self._whole(self._job.tasks[place], self._buffers[0][:0])

    def _found(self, sha256: str, broken: bool) -> Found:
        digests = "".join(self._digests)
        return Found(self._job.file, sha256, digests, self._unequal, self._findings, self._outcomes, broken)

    def _open_twins(self, opened: ExitStack) -> None:
        for task in self._job.tasks:
            if task.twin is not None and self._other is not None and task.twin.file not in self._twins:
                self._twins[task.twin.file] = opened.enter_context(self._other.open(task.twin.file))

    def _strips(self) -> Iterator[tuple[int, int]]:
        """The whole file for a sha256; else the runs of bytes that the tasks need."""
        runs = (
            [(0, self._job.size)]
            if self._job.sha256
            else runs_of((task.tensor for task in self._job.tasks), GAP_BYTES_MAX)
        )
        for first, last in runs:
            for begin in range(first, last, STRIP_BYTES):
                yield begin, min(begin + STRIP_BYTES, last)

    def _feed(self, begin: int, end: int, strip: Strip) -> None:
        """Gives the strip, bytes [begin, end) of the file, to the tensors that lie in it."""
        for place in range(self._place, len(self._job.tasks)):
            task = self._job.tasks[place]
            first, last = task.tensor.begin, task.tensor.end
            self._place = place
            if first >= end:
                return
            if first == last:
                self._whole(task, strip[:0])
            elif first >= begin and last <= end:
                self._whole(task, strip[first - begin : last - begin])
            else:
                self._part(task, max(begin - first, 0), strip[max(first - begin, 0) : last - begin])
                if last > end:
                    return
        self._place = len(self._job.tasks)

    def _whole(self, task: Task, whole: Strip) -> None:
        """A tensor whose bytes all lie in one strip."""
        if task.digest:
            self._digests.append(xxhash.xxh3_128_hexdigest(whole.data))
        if task.watch is not None and len(whole):
            fine, outcome = task.watch.glance(whole)
            if not fine:
                watcher = task.watch.begin()
                watcher.feed(whole)
                self._ask(watcher)
            elif outcome is not None:
                self._outcomes.append((self._place, outcome))
        if task.twin is not None:
            self._compare(task, task.twin, 0, whole)

    def _part(self, task: Task, at: int, piece: Strip) -> None:
        """A piece of a tensor, from its byte `at` on."""
        if not at:
            self._hash = xxhash.xxh3_128() if task.digest else None
            self._watcher = task.watch.begin() if task.watch is not None else None
        if self._hash is not None:
            self._hash.update(piece.data)
        if self._watcher is not None:
            self._watcher.feed(piece)
        if task.twin is not None and task.tensor.name not in self._unequal:
            self._compare(task, task.twin, at, piece)
        if at + len(piece) == task.tensor.bytes:
            if self._hash is not None:
                self._digests.append(self._hash.hexdigest())
            if self._watcher is not None:
                self._ask(self._watcher)

    def _ask(self, watcher: Watcher) -> None:
        self._findings += watcher.findings()
        if (outcome := watcher.outcome) is not None:
            self._outcomes.append((self._place, outcome))

    def _compare(self, task: Task, other: Tensor, at: int, piece: Strip) -> None:
        twin = self._buffers[1][: len(piece)]
        self._twins[other.file].read_into(other.begin + at, twin.data)
        if not np.array_equal(piece, twin):
            self._unequal[task.tensor.name] = at + int(np.flatnonzero(piece != twin)[0])


def runs_of(tensors: Iterable[Tensor], gap_max: int = 0) -> list[tuple[int, int]]:
    """The runs of bytes that tensors of one file, in order, fill; runs at most `gap_max` bytes apart are joined."""
    runs: list[tuple[int, int]] = []
    for tensor in tensors:
        if runs and tensor.begin - runs[-1][1] <= gap_max:
            runs[-1] = (runs[-1][0], max(runs[-1][1], tensor.end))
        else:
            runs.append((tensor.begin, tensor.end))
    return runs
