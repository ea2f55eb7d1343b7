"""Work spread over workers, each pinned to a CPU of its own: unpinned ones are often packed on one.

What is read from this machine's disk is spread over processes. Threads serve where bytes come over a network and
waiting is all there is to do, and where this program has threads already, which a fork must not meet.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardmill.verify.reading.processes import WORKERS_MAX, Crew, usable_cores
from shardmill.verify.reading.progress import Progress

THREADS_MAX = 8  # requests to a server at a time

Item = TypeVar("Item")
Result = TypeVar("Result")
Room = TypeVar("Room")


def pinned(
    work: Callable[[Item, Room], Result],
    items: Sequence[Item],
    room: Callable[[], Room],
    workers_max: int = WORKERS_MAX,
    done: Progress | None = None,
    remote: bool = False,
) -> list[Result]:
    """`work` of each item, in the order of the items; `room` makes what a worker reuses, such as buffers.

    A worker may be another process: `work` must give back all that it finds out; `done` is what it may add to. The
    first exception of a worker stops the others and is raised here.
    """
    with begun(work, items, room, workers_max, done, remote) as results:
        return results()


@contextmanager
def begun(
    work: Callable[[Item, Room], Result],
    items: Sequence[Item],
    room: Callable[[], Room],
    workers_max: int = WORKERS_MAX,
    done: Progress | None = None,
    remote: bool = False,
) -> Iterator[Callable[[], list[Result]]]:
    """As `pinned`, whose results come when they are asked for: processes are at work meanwhile."""
    workers = min(len(items), workers_max, usable_cores())
    if min(len(items), workers_max) < 2 or (workers < 2 and not remote):  # another worker would only cost
        yield lambda: _alone(work, items, room)
    elif not remote and hasattr(os, "fork") and threading.active_count() == 1:
        with Crew(work, items, room, workers, done) as crew:
            yield crew.results
    else:
        yield lambda: _threaded(work, items, room, min(workers_max, THREADS_MAX))


def _alone(
    work: Callable[[Item, Room], Result], items: Sequence[Item], room: Callable[[], Room]
) -> list[Result]:
    own = room()
    return [work(item, own) for item in items]


def _threaded(
    work: Callable[[Item, Room], Result], items: Sequence[Item], room: Callable[[], Room], threads_max: int
) -> list[Result]:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(items)):
        waiting.put(place)
    results: dict[int, Result] = {}
    crashed: list[BaseException] = []

    def loop(cpu: int | None) -> None:
        try:
            _pin(cpu)
            own = room()
            while not crashed:
                place = waiting.get_nowait()
                results[place] = work(items[place], own)
        except queue.Empty:
            return
        except BaseException as error:
            crashed.append(error)

    cpus = _cpus()[:threads_max]
    threads = [threading.Thread(target=loop, args=(cpu,), daemon=True) for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crashed:
        raise crashed[0]
    return [results[place] for place in range(len(items))]


def _cpus() -> Sequence[int | None]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [None] * (os.cpu_count() or 1)


def _pin(cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})  # 0 is the calling thread
