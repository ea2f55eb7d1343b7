"""Work spread over processes, each forked from this one and pinned to a CPU: they share no interpreter lock.

What is to be done is in memory when they are forked, so only results travel. Items are handed out by a pipe that
holds their numbers from the start: whoever is free reads the next.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn, TypeVar

from shardmill.verify.reading.progress import Progress

WORKERS_MAX = 64
BATCHES_MAX = 1024  # of two bytes each: no pipe is too small for their numbers
_LOOK_SECONDS = 0.05
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
    """`work` of each item, in the order of the items; the first exception of a worker is raised here.

    Raises ChildProcessError where a worker was killed.
    """
    count = min(len(items), BATCHES_MAX)
    batches = [range(first, len(items), count) for first in range(count)]
    done = done or Progress(0, lambda done, total: None)
    done.share(workers)
    numbers = _numbers(count)
    crew: dict[Connection, int] = {}
    results: dict[int, Result] = {}
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def loop(place: int, pipe: Connection) -> None:
        if len(cpus) >= workers:
            os.sched_setaffinity(0, {cpus[place]})
        done.take(place)
        own = room()
        while number := os.read(numbers, 2):
            batch = batches[int.from_bytes(number, "little")]
            pipe.send({place: work(items[place], own) for place in batch})
        pipe.send(None)

    try:
        for place in range(workers):
            here, pid = _fork(place, loop)
            crew[here] = pid
        _gather(crew, results, done)
    finally:
        os.close(numbers)
        for pipe, pid in crew.items():  # those that are not done: something failed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pipe.close()
    return [results[place] for place in range(len(items))]


def _numbers(count: int) -> int:
    """The end to read of a pipe that holds the numbers up to `count`, two bytes each, and then ends."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(2, "little") for number in range(count)))
    os.close(writing)
    return reading


def _gather(crew: dict[Connection, int], results: dict[int, Result], done: Progress) -> None:
    """Takes results until every worker has said that it is done, and takes those from the crew."""
    while crew:
        for pipe in wait(list(crew), _LOOK_SECONDS):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                raise _killed(crew.pop(pipe)) from None
            if isinstance(message, BaseException):
                raise message
            if message is None:
                os.waitpid(crew.pop(pipe), 0)
                pipe.close()
            else:
                results |= message
        done.collect()


def _killed(pid: int) -> ChildProcessError:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ChildProcessError(f"a process that reads the files {how}; where memory ran out, free some")


def _fork(place: int, loop: Callable[[int, Connection], None]) -> tuple[Connection, int]:
    here, there = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # numpy's BLAS has threads, which it takes care of itself; this program has none here (see threads.pinned).
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        there.close()
        return here, pid
    return _be_a_worker(place, parent, loop, there)


def _be_a_worker(
    place: int, parent: int, loop: Callable[[int, Connection], None], pipe: Connection
) -> NoReturn:
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
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    except BaseException as error:
        with suppress(Exception):
            pipe.send(_sendable(error))
    finally:
        os._exit(code)


def _sendable(error: BaseException) -> BaseException:
    """The error, or where it cannot travel its traceback as one that can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())
    error.add_note(traceback.format_exc())
    return error
