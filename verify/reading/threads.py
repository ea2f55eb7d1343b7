"""Work spread over a few threads, each pinned to a CPU of its own: unpinned ones are often packed on one.

numpy, hashlib and xxhash release the interpreter for all but tiny pieces, so threads are enough.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

THREADS_MAX = 8  # at sha256's 1.8 GB/s each, more than most disks give

Item = TypeVar("Item")
Result = TypeVar("Result")
Room = TypeVar("Room")


def pinned(
    work: Callable[[Item, Room], Result],
    items: Sequence[Item],
    room: Callable[[], Room],
    threads_max: int = THREADS_MAX,
) -> list[Result]:
    """`work` of each item, in the order of the items; `room` makes what a thread reuses, such as buffers.

    The first exception of a thread stops the others and is raised here.
    """
    if min(len(items), threads_max) < 2:  # a thread would only cost
        own = room()
        return [work(item, own) for item in items]
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
