"""Scheduling: one task a shard, over pinned threads or a dask.distributed cluster. Neither ever names anything.

A graph of 121 tasks costs nothing; one of 150,000 tensors would cost minutes. On a cluster every worker sees the
parent and the output folder under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from itertools import cycle, islice
from queue import SimpleQueue

from pipeline.errors import BuildError
from pipeline.job import Watch, Worker
from pipeline.make import ShardTask, fill, make_shard, settle
from pipeline.manifest.records import Receipt

_CONNECT_SECONDS = 5
_THREADS_A_WORKER = 4  # one that fills a shard, and others whose shards wait for the disk


def in_threads(tasks: Mapping[str, ShardTask], workers: int, watch: Watch) -> dict[str, Receipt]:
    """File -> receipt, made by `workers` threads at a time, begun in the order of `tasks`.

    While a shard's last bytes go to the disk, its worker fills another: so there are more threads than workers.
    """
    free: SimpleQueue[Worker] = SimpleQueue()
    for core in _cores(workers):
        free.put(Worker(core))

    def make(task: ShardTask) -> Receipt:
        worker = free.get()
        try:
            _pin(worker)
            draft = fill(task, watch, worker)
        finally:
            free.put(worker)
        return settle(draft, task)

    pool = ThreadPoolExecutor(_THREADS_A_WORKER * workers)
    try:
        making = {file: pool.submit(make, task) for file, task in tasks.items()}
        wait(making.values(), return_when=FIRST_EXCEPTION)
        receipts = {file: future.result() for file, future in making.items() if future.done()}
        pool.shutdown()
    except BaseException as error:
        # A signal must not wait for a worker that is in an fsync; what it leaves is swept by the next build.
        watch.stop.set()
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    return receipts


def _cores(workers: int) -> Iterable[int]:
    """A core for each worker; other ones for another build on the same machine, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(cores)
    return islice(cycle(cores), first, first + workers)


def _pin(worker: Worker) -> None:
    """Takes the calling thread to its worker's core: some schedulers pack unpinned threads onto one."""
    if worker.core is not None:
        os.sched_setaffinity(0, {worker.core})


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
        except CancelledError:
            raise BuildError(
                f"the dask scheduler at {address} went away; start it again, then build again: "
                f"it goes on where it stopped"
            ) from None
        except KilledWorker:
            raise BuildError(
                f"{file}: every worker that made it died; see the workers' logs, then build again"
            ) from None
        finally:
            client.cancel(list(futures))
    return receipts


def _make_remotely(task: ShardTask) -> Receipt:
    return make_shard(task, Watch(), Worker())
