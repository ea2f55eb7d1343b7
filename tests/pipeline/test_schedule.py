"""Shards on threads: who fills when, and who waits for the disk."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.run import schedule
from tests.pipeline.parents import SCALES, SHARDS, Tensor, build, micro_tensors, published, write_parent


@pytest.fixture(autouse=True)
def threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look into workers, so the workers share this process; test_processes is about the others."""
    monkeypatch.setattr(schedule, "_can_fork", lambda: False)


def test_the_next_shard_is_filled_while_the_last_one_goes_to_the_disk(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """With one worker, and a disk that is done with the first shard only when all others are filled."""
    filled, settled, all_filled = [], [], threading.Event()
    fill, finish_shard = schedule.fill, schedule.finish_shard

    def note(task: Any, *rest: Any) -> Any:
        staged = fill(task, *rest)
        filled.append(task.plan.file)
        if len(filled) == len(SHARDS) + 1:
            all_filled.set()
        return staged

    def slow(staged: Any, task: Any) -> Any:
        if task.plan.file == filled[0]:
            assert all_filled.wait(10)
        settled.append(task.plan.file)
        return finish_shard(staged, task)

    monkeypatch.setattr(schedule, "fill", note)
    monkeypatch.setattr(schedule, "finish_shard", slow)
    build(parent, tmp_path / "out", workers=1)
    assert settled.index(filled[0]) > 0
    assert published(tmp_path / "out") == reference


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_shards_are_filled_at_a_time_than_there_are_workers(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Each with a worker, and so on a core, that no other thread holds; the caller stays where it may run."""
    cores = os.sched_getaffinity(0)
    at_work: list[int] = []
    most = [0]
    fill = schedule.fill

    def counted(task: Any, watch: Any, worker: Any) -> Any:
        assert id(worker) not in at_work
        if workers <= len(cores):
            assert os.sched_getaffinity(0) == {worker.core}
        at_work.append(id(worker))
        most[0] = max(most[0], len(at_work))
        try:
            return fill(task, watch, worker)
        finally:
            at_work.remove(id(worker))

    monkeypatch.setattr(schedule, "fill", counted)
    build(parent, tmp_path / "out", workers=workers)
    assert most[0] <= workers
    assert os.sched_getaffinity(0) == cores


def test_where_there_are_more_workers_than_cores_the_system_places_them(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(
        "shardmill.pipeline.run.schedule.os.sched_setaffinity", lambda thread, cores: pinned.append(cores)
    )
    build(parent, tmp_path / "out", workers=len(os.sched_getaffinity(0)) + 1)
    assert pinned == []


def test_a_core_that_was_taken_away_meanwhile_stops_no_build(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    def gone(*rest: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("shardmill.pipeline.run.schedule.os.sched_setaffinity", gone)
    build(parent, tmp_path / "out", workers=1)
    assert published(tmp_path / "out") == reference


def test_shards_are_begun_in_the_order_in_which_they_are_given(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest first, whichever thread comes back from the disk when."""
    begun = []
    fill, finish_shard = schedule.fill, schedule.finish_shard
    monkeypatch.setattr(schedule, "fill", lambda task, *rest: (begun.append(task), fill(task, *rest))[1])
    monkeypatch.setattr(
        schedule, "finish_shard", lambda *staged: (time.sleep(0.02), finish_shard(*staged))[1]
    )
    build(parent, tmp_path / "out", workers=1)
    sizes = [task.plan.header.file_bytes for task in begun]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", ["fill", "finish_shard"])
def test_after_a_failure_no_other_shard_is_begun(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, step: str
) -> None:
    """The failure is told, not that the others were stopped for it; those at work may end."""
    begun: list[str] = []
    fill, finish_shard = schedule.fill, schedule.finish_shard
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise BuildError("the first shard can't be made")

    def first_fails(task: Any, *rest: Any) -> Any:
        begun.append(task.plan.file)
        if begun[0] == task.plan.file and step == "fill":
            fail()
        staged = fill(task, *rest)
        assert begun[0] == task.plan.file or failed.wait(10)
        time.sleep(0.05)  # for the failure to be noted
        return staged

    def first_is_lost(staged: Any, task: Any) -> Any:
        if begun[0] == task.plan.file and step == "finish_shard":
            fail()
        return finish_shard(staged, task)

    monkeypatch.setattr(schedule, "fill", first_fails)
    monkeypatch.setattr(schedule, "finish_shard", first_is_lost)
    with pytest.raises(BuildError, match="the first shard can't be made"):
        build(parent, tmp_path / "out", workers=workers)
    assert len(begun) <= workers + (step == "finish_shard")
    assert published(tmp_path / "out") == {}


def test_a_disk_that_fails_at_the_last_moment_is_named_with_the_file(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync is where a full quota and a dying disk are told."""

    def full(fd: int) -> None:
        if any(shard in str(Path(f"/proc/self/fd/{fd}").readlink()) for shard in SHARDS):
            raise OSError(28, "No space left on device")
        fsync(fd)

    fsync = os.fsync
    monkeypatch.setattr("shardmill.pipeline.container.files.os.fsync", full)
    with pytest.raises(
        BuildError, match=r"safetensors.*: cannot be written: .*No space left on device; make room"
    ):
        build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == {}


@pytest.mark.parametrize(("memory", "forgotten"), [(1 << 40, 0), (1, 2 * len({*SHARDS, SCALES}))])
def test_a_build_larger_than_the_memory_leaves_nothing_in_the_page_cache(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, forgotten: int
) -> None:
    """Each shard that was read and each that was written is let go; a smaller build lets nothing go."""
    let_go = []
    monkeypatch.setattr("shardmill.pipeline.run.schedule.memory_bytes", lambda: memory)
    monkeypatch.setattr(
        "shardmill.pipeline.container.files.os.posix_fadvise", lambda fd, *rest: let_go.append(rest)
    )
    build(parent, tmp_path / "out")
    assert let_go == [(0, 0, os.POSIX_FADV_DONTNEED)] * forgotten


def test_advice_that_the_system_refuses_stops_no_build(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    def refuse(*rest: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("shardmill.pipeline.run.schedule.memory_bytes", lambda: 1)
    monkeypatch.setattr("shardmill.pipeline.container.files.os.posix_fadvise", refuse)
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_open_files_do_not_grow_with_the_number_of_shards(tmp_path: Path) -> None:
    """300 shards, while this process may open 40 files more than it has."""
    files: dict[str, dict[str, Tensor]] = {
        f"model-{n:05d}-of-00300.safetensors": {f"model.layers.{n + 100}.norm.weight": ("U8", (4,), bytes(4))}
        for n in range(300)
    }
    parent = write_parent(tmp_path / "parent", {**micro_tensors(), **files})
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, hard))
    try:
        summary = build(parent, tmp_path / "out", workers=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(summary.made) == len(SHARDS) + 1 + 300
