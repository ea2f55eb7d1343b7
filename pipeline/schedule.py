"""Scheduling: one task a shard, over pinned threads or a dask.distributed cluster. dask schedules, it never names.

A graph of 121 tasks costs nothing; one of 150,000 tensors would cost minutes. On a cluster every worker sees the
parent and the output folder under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from pipeline.errors import BuildError
from pipeline.job import Watch
from pipeline.make import ShardTask, make_shard
from pipeline.manifest.records import Receipt

_CONNECT_SECONDS = 5


def in_threads(tasks: Mapping[str, ShardTask], workers: int, watch: Watch) -> dict[str, Receipt]:
    """File -> receipt, made by `workers` threads of this process, begun in the order of `tasks`."""
    from dask.threaded import get

    # dask breaks ties between independent tasks by key, so numbered keys keep the order.
    keys = {file: f"{place:06d}" for place, file in enumerate(tasks)}
    graph = {keys[file]: (make_shard, task, watch) for file, task in tasks.items()}
    pool = ThreadPoolExecutor(workers, initializer=_pin, initargs=(count(), workers))
    try:
        receipts = get(graph, list(keys.values()), pool=pool)
        pool.shutdown()
    except BaseException as error:
        # A signal must not wait for a worker that is in an fsync; what it leaves is swept by the next build.
        watch.stop.set()
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    return dict(zip(keys, receipts, strict=True))


def _pin(places: count[int], workers: int) -> None:
    """Gives each worker a core of its own: some schedulers pack unpinned threads onto one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[next(places) % len(cores)]})


def on_cluster(tasks: Mapping[str, ShardTask], address: str, watch: Watch) -> dict[str, Receipt]:
    """File -> receipt, made by the workers of the scheduler at `address`. Progress comes shard by shard.

    A task whose worker dies is given to another, which begins the shard anew.
    """
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError:
        raise BuildError("--scheduler needs dask.distributed; install shardmill[cluster]") from None
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"no dask scheduler answers at {address} ({error}); start one or leave --scheduler out"
        ) from None
    with client:
        futures = {
            client.submit(_make_remotely, task, pure=False, priority=len(tasks) - place): file
            for place, (file, task) in enumerate(tasks.items())
        }
        receipts = {}
        try:
            for future in as_completed(futures, loop=client.loop):
                file = futures[future]
                receipts[file] = future.result()
                watch.done(tasks[file].input_bytes)
        except KilledWorker:
            raise BuildError(
                f"{file}: every worker that made it died; see the workers' logs, then build again"
            ) from None
        finally:
            client.cancel(list(futures))
    return receipts


def _make_remotely(task: ShardTask) -> Receipt:
    return make_shard(task, Watch())
