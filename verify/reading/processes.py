"""Work spread over processes, each forked from this one and pinned to a CPU: they share no interpreter lock.

What is to be done is in memory when they are forked, so only results travel. Items are handed out by a pipe that
holds their numbers from the start: whoever is free reads the next.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Generic, NoReturn, Self, TypeVar

from shardmill.verify.reading.progress import Progress

WORKERS_MAX = 64
BATCHES_MAX = 1024  # of two bytes each: no pipe is too small for their numbers
_LOOK_MILLISECONDS = 50
_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1  # Linux prctl: the signal that a process gets when its parent dies
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

Item = TypeVar("Item")
Result = TypeVar("Result")
Room = TypeVar("Room")


def usable_cores() -> int:
    """The CPUs that this process may run on, and of these no more than its container's quota (cgroup v2) pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, _, period = _CPU_MAX.read_text().strip().partition(" ")
    except OSError:
        quota = period = ""
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, ceil(int(quota) / int(period)))
    return max(1, min(cores, WORKERS_MAX))


def forked(
    work: Callable[[Item, Room], Result],
    items: Sequence[Item],
    room: Callable[[], Room],
    workers: int,
    done: Progress | None = None,
) -> list[Result]:
    """`work` of each item, in the order of the items, as `Crew.results` gives it."""
    with Crew(work, items, room, workers, done) as crew:
        return crew.results()


class Crew(Generic[Result]):
    """Processes at work from the start. Leaving the block kills those that are not done."""

    def __init__(
        self,
        work: Callable[[Item, Room], Result],
        items: Sequence[Item],
        room: Callable[[], Room],
        workers: int,
        done: Progress | None = None,
    ) -> None:
        count = min(len(items), BATCHES_MAX)
        batches = [range(first, len(items), count) for first in range(count)]
        self._count, self._done = len(items), done or Progress(0, lambda done, total: None)
        self._done.share(workers)
        numbers = _numbers(count)
        self._pids: dict[int, int] = {}  # by the end of a pipe to read
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

        def loop(place: int, pipe: int) -> None:
            if len(cpus) >= workers:
                os.sched_setaffinity(0, {cpus[place]})
            self._done.take(place)
            own = room()
            while number := os.read(numbers, 2):
                batch = batches[int.from_bytes(number, "little")]
                _send(pipe, {place: work(items[place], own) for place in batch})
            _send(pipe, None)

        try:
            for place in range(workers):
                pipe, pid = _fork(place, loop)
                self._pids[pipe] = pid
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(numbers)

    def results(self) -> list[Result]:
        """In the order of the items. Raises the first exception of a worker, and ChildProcessError for a killed one."""
        results: dict[int, Result] = {}
        poll = select.poll()
        for pipe in self._pids:
            poll.register(pipe, select.POLLIN)
        while self._pids:
            for pipe, _ in poll.poll(_LOOK_MILLISECONDS):
                message = self._message(pipe)
                if message is None:
                    poll.unregister(pipe)
                    os.waitpid(self._pids.pop(pipe), 0)
                    os.close(pipe)
                else:
                    results |= message
            self._done.collect()
        return [results[place] for place in range(self._count)]

    def _message(self, pipe: int) -> dict[int, Result] | None:
        try:
            message = pickle.loads(_read(pipe, int.from_bytes(_read(pipe, _LENGTH_BYTES), "little")))
        except EOFError:
            os.close(pipe)
            raise _killed(self._pids.pop(pipe)) from None
        if isinstance(message, BaseException):
            raise message
        return message  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, pid in self._pids.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(pipe)


def _numbers(count: int) -> int:
    """The end to read of a pipe that holds the numbers up to `count`, two bytes each, and then ends."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(2, "little") for number in range(count)))
    os.close(writing)
    return reading


def _send(pipe: int, message: object) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    left = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    while left:
        left = left[os.write(pipe, left) :]


def _read(pipe: int, count: int) -> bytearray:
    """So many bytes. Raises EOFError where the other end was closed before."""
    data = bytearray()
    while len(data) < count:
        part = os.read(pipe, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _killed(pid: int) -> ChildProcessError:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ChildProcessError(f"a process that reads the files {how}; where memory ran out, free some")


def _fork(place: int, loop: Callable[[int, int], None]) -> tuple[int, int]:
    """(the end to read of the worker's pipe, its process)"""
    here, there = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # numpy's BLAS has threads, which it takes care of itself; this program has none here (see threads.pinned).
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(there)
        return here, pid
    return _be_a_worker(place, parent, loop, there)


def _be_a_worker(place: int, parent: int, loop: Callable[[int, int], None], pipe: int) -> NoReturn:
    """The whole life of a worker: it leaves without what its parent does at its end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            loop(place, pipe)
        code = 0
    except ConnectionError:
        pass  # the parent is gone
    except BaseException as error:
        with suppress(Exception):
            _send(pipe, _sendable(error))
    finally:
        os._exit(code)


def _sendable(error: BaseException) -> BaseException:
    """The error, or where it cannot travel its traceback as one that can."""
    import traceback

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())
    error.add_note(traceback.format_exc())
    return error
