"""Scheduling: one task a shard, over processes of this machine, a thread of this process, or a dask.distributed
cluster. None of them ever names anything.

A graph of 121 tasks costs nothing; one of 150,000 tensors would cost minutes. On a cluster every worker sees the
parent and the output folder under the same paths.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shardmill.pipeline.container.filesystem import losses, note_losses
from shardmill.pipeline.errors import BuildError, MissingExtraError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.run.cores import cores_for, memory_bytes
from shardmill.pipeline.run.processes import Fill, Finish, Unit, in_processes
from shardmill.pipeline.run.shard import (
    Input,
    ShardTask,
    StagedShard,
    fill,
    finish_shard,
    input_bytes,
    make_shard,
)
from shardmill.pipeline.run.shared import compiled, shared_out
from shardmill.pipeline.stages.job import Prepared, Settings, StoppedError, Watch, Worker

Tasks = Mapping[str, ShardTask]
# What is done with a shard that is on the disk, by the worker that made it, before that worker begins another.
Then = Callable[[ShardTask, Receipt, Watch], None]

_CONNECT_SECONDS = 5
_THREADS_A_WORKER = 4  # one that fills a shard, and others whose shards wait for the disk


@dataclass(frozen=True, slots=True)
class Made:
    """The receipts of the shards that were made, by file, and how many workers of this machine made them."""

    receipts: dict[str, Receipt]
    workers: int


def make_shards(
    todo: Sequence[ShardPlan],
    prepared: Prepared,
    out: Path,
    settings: Settings,
    watch: Watch,
    then: Then | None = None,
) -> Made:
    """Makes each shard in `todo`; the largest are begun first. With `then`, a worker has one shard at a time."""
    if not todo:
        return Made({}, 0)
    tasks = tasks_of(todo, prepared, out, settings)
    if settings.scheduler:
        return Made(on_cluster(tasks, settings.scheduler, watch), 0)
    if settings.workers > 1 and _can_fork():
        return on_processes(tasks, settings.workers, watch, then)
    return Made(in_threads(tasks, settings.workers, watch, then), min(settings.workers, len(tasks)))


def tasks_of(
    todo: Sequence[ShardPlan], prepared: Prepared, out: Path, settings: Settings
) -> dict[str, ShardTask]:
    """File -> its task, the largest first."""
    parent = prepared.parent
    bytes_moved = sum(input_bytes(parent, shard) + shard.header.file_bytes for shard in todo)
    once = settings.scheduler is None and bytes_moved > memory_bytes()
    return {
        shard.file: task_of(shard, prepared, out, settings, once)
        for shard in sorted(todo, key=lambda shard: (-shard.header.file_bytes, shard.file))
    }


def task_of(
    shard: ShardPlan, prepared: Prepared, out: Path, settings: Settings, once: bool = False
) -> ShardTask:
    """All that making the shard needs. `once`: keep none of its bytes in the page cache."""
    parent = prepared.parent
    headers = {header.shard: header for header in parent.headers}
    inputs = tuple(
        Input(parent.path(file), parent.stats[file], headers[file].data_begin, headers[file].digest)
        for file in shard.inputs
    )
    return ShardTask(shard, prepared.dag.needs, inputs, out, settings, once)


def _can_fork() -> bool:
    """Whether no other thread of this program could hold a lock that its child would wait for without end."""
    return hasattr(os, "fork") and threading.active_count() == 1


def on_processes(tasks: Tasks, most: int, watch: Watch, then: Then | None) -> Made:
    """Made by forked processes, each on a core of its own: `most`, or fewer where there is less to do."""
    units, work = shared_out(tasks, most)
    workers = min(most, len(units))
    kernels, cores = compiled(tasks.values()), list(cores_for(workers))

    def make_fill(place: int) -> Fill:
        worker = Worker(cores[place], kernels=kernels)
        _pin(worker)

        def fill_unit(unit: Unit, results: Mapping[str, Any], own_watch: Watch) -> Finish:
            before = {name: result for name, (result, _) in results.items()}
            finish = work[unit.name](before, own_watch, worker)
            if then and unit.name in tasks:
                receipt = finish()
                then(tasks[unit.name], receipt, own_watch)
                return lambda: (receipt, losses())
            return lambda: (finish(), losses())

        return fill_unit

    results = in_processes(units, workers, make_fill, watch)
    for _, found in results.values():
        note_losses(found)
    return Made({file: results[file][0] for file in tasks}, workers)


def in_threads(tasks: Tasks, workers: int, watch: Watch, then: Then | None) -> dict[str, Receipt]:
    """File -> receipt, begun in the order of `tasks` and filled by `workers` at a time.

    Without a `then`, a worker fills the next shard while the last one's bytes go to the disk: on more threads.
    The first failure stops all others, and no further shard is begun.
    """
    todo: SimpleQueue[tuple[str, ShardTask]] = SimpleQueue()
    for item in tasks.items():
        todo.put(item)
    free: SimpleQueue[Worker] = SimpleQueue()
    for core in cores_for(workers):
        free.put(Worker(core))
    receipts: dict[str, Receipt] = {}

    def make() -> None:
        while filled := _fill_next(todo, free, watch):
            file, staged = filled
            with _stopping(watch):
                receipts[file] = finish_shard(staged, tasks[file])
                if then:
                    then(tasks[file], receipts[file], watch)

    most = min(workers if then else _THREADS_A_WORKER * workers, len(tasks))
    pool = ThreadPoolExecutor(most)
    try:
        threads = [pool.submit(make) for _ in range(most)]
        wait(threads)
    except BaseException:
        # A signal must not wait for a thread that is in an fsync; what it leaves is swept by the next build.
        watch.stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    if failures := [failure for thread in threads if (failure := thread.exception())]:
        raise min(failures, key=lambda failure: isinstance(failure, StoppedError))
    if len(receipts) < len(tasks):
        raise StoppedError
    return receipts


def _fill_next(
    todo: SimpleQueue[tuple[str, ShardTask]], free: SimpleQueue[Worker], watch: Watch
) -> tuple[str, StagedShard] | None:
    """The next shard, filled by the next worker that is free. None where none is left, or the build is to stop."""
    worker = free.get()
    try:
        if watch.stop.is_set():
            return None
        file, task = todo.get_nowait()
        _pin(worker)
        with _stopping(watch):
            return file, fill(task, watch, worker)
    except Empty:
        return None
    finally:
        free.put(worker)


@contextmanager
def _stopping(watch: Watch) -> Iterator[None]:
    """Stops the build where what is done in it fails."""
    try:
        yield
    except BaseException:
        watch.stop.set()
        raise


def _pin(worker: Worker) -> None:
    """Takes the calling thread to its worker's core: some schedulers pack unpinned threads onto one."""
    if worker.core is not None:
        with suppress(OSError):  # the core was taken from this process since
            os.sched_setaffinity(0, {worker.core})


def on_cluster(tasks: Tasks, address: str, watch: Watch) -> dict[str, Receipt]:
    """File -> receipt, made by the workers of the scheduler at `address`. Progress comes shard by shard.

    A task whose worker dies is given to another, which begins the shard anew.
    """
    try:
        from distributed import Client, KilledWorker, as_completed
    except ImportError:
        raise MissingExtraError("--scheduler needs dask.distributed; pip install distributed") from None
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
        except CancelledError as error:
            reason = getattr(error, "reason", None) or "cancelled"
            raise BuildError(
                f"the dask scheduler at {address} went away or gave the work up ({reason}); "
                f"start it again, then build again: it goes on where it stopped"
            ) from None
        except KilledWorker:
            raise BuildError(
                f"{file}: every worker that made it died; see the workers' logs, then build again"
            ) from None
        finally:
            client.cancel(list(futures))
    return receipts


_local = threading.local()


def _make_remotely(task: ShardTask) -> Receipt:
    worker: Worker = _local.__dict__.setdefault("worker", Worker())
    return make_shard(task, Watch(), worker)
