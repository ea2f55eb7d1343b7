"""Every byte of a checkpoint in one pass: sha256 of files, xxh3-128 of tensors, values, comparison with the parent.

Pinned threads take whole files, the largest first. A file is read once, in strips, into a buffer that is reused; every
reader of its bytes is fed from that strip while it is in the cache. Results come back by file, so that their order
never depends on the threads.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Reader, Source
from shardmill.verify.reading.threads import THREADS_MAX, pinned
from shardmill.verify.rules.findings import Finding, UnreadableError

GAP_BYTES_MAX = 64 << 10  # runs of bytes closer than this are read as one
SMALL_BYTES = 4 << 20  # done sooner than a thread is started and pinned
STRIP_BYTES = 1 << 20  # read, hashed and looked at while in the second-level cache

Strip = NDArray[np.uint8]
Buffers = tuple[Strip, Strip]


class Watcher(Protocol):
    """Is fed one tensor's bytes in order, then asked."""

    def feed(self, strip: Strip) -> object: ...

    def findings(self) -> list[Finding]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What to do with one tensor of a file."""

    tensor: Tensor
    digest: bool = False
    watch: Callable[[], Watcher] | None = None  # makes the one that looks at its elements
    twin: Tensor | None = None  # of the other checkpoint, to be equal byte by byte


@dataclass(frozen=True, slots=True)
class FileJob:
    """What to do with one file; its tasks lie in the order of their bytes and do not overlap."""

    file: str
    size: int
    sha256: bool
    tasks: tuple[Task, ...]

    @property
    def bytes(self) -> int:
        """To read, the twins' bytes left out."""
        return self.size if self.sha256 else sum(task.tensor.bytes for task in self.tasks)


@dataclass(slots=True)
class FileResult:
    file: str
    sha256: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    unequal: dict[str, int] = field(
        default_factory=dict
    )  # tensor -> the first byte that differs from its twin's
    findings: list[Finding] = field(default_factory=list)


def stream(
    source: Source,
    jobs: Sequence[FileJob],
    other: Source | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, FileResult]:
    """Does all jobs; `other` holds the twins; `progress` hears of bytes as they are read, from any thread."""
    largest_first = sorted(jobs, key=lambda job: -job.bytes)

    def do(job: FileJob, buffers: Buffers) -> FileResult:
        return _Pass(source, other, job, buffers).run(progress)

    small = sum(job.bytes for job in jobs) < SMALL_BYTES
    done = pinned(do, largest_first, _buffers, 1 if small else THREADS_MAX)
    results = {job.file: result for job, result in zip(largest_first, done, strict=True)}
    return {job.file: results[job.file] for job in jobs}


def _buffers() -> Buffers:
    return np.empty(STRIP_BYTES, np.uint8), np.empty(STRIP_BYTES, np.uint8)


class _Pass:
    """One file, read once. The current task's readers of bytes are kept between strips."""

    def __init__(self, source: Source, other: Source | None, job: FileJob, buffers: Buffers) -> None:
        self._source, self._other, self._job, self._buffers = source, other, job, buffers
        self._result = FileResult(job.file)
        self._waiting = deque(job.tasks)
        self._hash: xxhash.xxh3_128 | None = None
        self._watcher: Watcher | None = None
        self._twins: dict[str, Reader] = {}

    def run(self, progress: Callable[[int], None]) -> FileResult:
        sha = hashlib.sha256() if self._job.sha256 else None
        try:
            with ExitStack() as opened:
                reader = opened.enter_context(self._source.open(self._job.file))
                self._open_twins(opened)
                self._begin()
                for begin, end in self._strips():
                    strip = self._buffers[0][: end - begin]
                    reader.read_into(begin, strip.data)
                    if sha is not None:
                        sha.update(strip.data)
                    self._feed(begin, end, strip)
                    progress(end - begin)
                while self._waiting:  # tensors without bytes at the end of the file
                    self._finish()
        except UnreadableError as error:
            self._result.findings.append(error.finding)
            return self._result
        if sha is not None:
            self._result.sha256 = sha.hexdigest()
        return self._result

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

    def _begin(self) -> None:
        if self._waiting:
            task = self._waiting[0]
            self._hash = xxhash.xxh3_128() if task.digest else None
            self._watcher = task.watch() if task.watch is not None else None

    def _finish(self) -> None:
        task = self._waiting.popleft()
        if self._hash is not None:
            self._result.digests[task.tensor.name] = self._hash.hexdigest()
        if self._watcher is not None:
            self._result.findings += self._watcher.findings()
        self._begin()

    def _feed(self, begin: int, end: int, strip: Strip) -> None:
        """Gives the strip, bytes [begin, end) of the file, to the tensors that lie in it."""
        while self._waiting and self._waiting[0].tensor.begin < end:
            tensor = self._waiting[0].tensor
            first, last = max(tensor.begin, begin), min(tensor.end, end)
            if first < last:
                self._feed_tensor(self._waiting[0], first - tensor.begin, strip[first - begin : last - begin])
            if tensor.end > end:
                return
            self._finish()

    def _feed_tensor(self, task: Task, at: int, piece: Strip) -> None:
        if self._hash is not None:
            self._hash.update(piece.data)
        if self._watcher is not None:
            self._watcher.feed(piece)
        if task.twin is not None and task.tensor.name not in self._result.unequal:
            twin = self._buffers[1][: len(piece)]
            self._twins[task.twin.file].read_into(task.twin.begin + at, twin.data)
            if not np.array_equal(piece, twin):
                first = at + int(np.flatnonzero(piece != twin)[0])
                self._result.unequal[task.tensor.name] = first


def runs_of(tensors: Iterable[Tensor], gap_max: int = 0) -> list[tuple[int, int]]:
    """The runs of bytes that tensors of one file, in order, fill; runs at most `gap_max` bytes apart are joined."""
    runs: list[tuple[int, int]] = []
    for tensor in tensors:
        if runs and tensor.begin - runs[-1][1] <= gap_max:
            runs[-1] = (runs[-1][0], max(runs[-1][1], tensor.end))
        else:
            runs.append((tensor.begin, tensor.end))
    return runs
