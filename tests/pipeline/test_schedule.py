"""Shards on threads: who fills when, and who waits for the disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline import schedule
from pipeline.errors import BuildError
from pipeline.job import StoppedError
from tests.pipeline.parents import SCALES, SHARDS, build, published


def test_the_next_shard_is_filled_while_the_last_one_goes_to_the_disk(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """With one worker, and a disk that is done with the first shard only when all others are filled."""
    filled, settled, all_filled = [], [], threading.Event()
    fill, settle = schedule.fill, schedule.settle

    def note(task: Any, *rest: Any) -> Any:
        draft = fill(task, *rest)
        filled.append(task.plan.file)
        if len(filled) == len(SHARDS) + 1:
            all_filled.set()
        return draft

    def slow(draft: Any, task: Any) -> Any:
        if task.plan.file == filled[0]:
            assert all_filled.wait(10)
        settled.append(task.plan.file)
        return settle(draft, task)

    monkeypatch.setattr(schedule, "fill", note)
    monkeypatch.setattr(schedule, "settle", slow)
    build(parent, tmp_path / "out", workers=1)
    assert settled.index(filled[0]) > 0
    assert published(tmp_path / "out") == reference


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_shards_are_filled_at_a_time_than_there_are_workers(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """And each on the core and in the buffers of a worker that no other thread holds."""
    at_work: list[int] = []
    most = [0]
    fill = schedule.fill

    def counted(task: Any, watch: Any, worker: Any) -> Any:
        assert id(worker) not in at_work
        at_work.append(id(worker))
        most[0] = max(most[0], len(at_work))
        try:
            return fill(task, watch, worker)
        finally:
            at_work.remove(id(worker))

    monkeypatch.setattr(schedule, "fill", counted)
    build(parent, tmp_path / "out", workers=workers)
    assert 1 <= most[0] <= workers


def test_a_shard_that_fails_is_told_and_no_other_is_begun(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    fill = schedule.fill

    def fails_first(task: Any, watch: Any, worker: Any) -> Any:
        begun.append(task.plan.file)
        if len(begun) == 1:
            raise BuildError("the first shard can't be made")
        draft = fill(task, watch, worker)
        raise AssertionError(f"{draft.staged} was filled after a failure")

    def stops(watch: Any, count: int) -> None:
        assert watch.stop.wait(10)
        raise StoppedError("stopped")

    monkeypatch.setattr(schedule, "fill", fails_first)
    monkeypatch.setattr("pipeline.job.Watch.done", stops)
    with pytest.raises(BuildError, match="the first shard can't be made"):
        build(parent, tmp_path / "out", workers=1)
    assert published(tmp_path / "out") == {}


@pytest.mark.parametrize(("memory", "forgotten"), [(1 << 40, 0), (1, 2 * len({*SHARDS, SCALES}))])
def test_a_build_larger_than_the_memory_leaves_nothing_in_the_page_cache(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, forgotten: int
) -> None:
    """Each shard that was read and each that was written is let go; a smaller build lets nothing go."""
    let_go = []
    monkeypatch.setattr("pipeline.run.memory_bytes", lambda: memory)
    monkeypatch.setattr("pipeline.shardio.os.posix_fadvise", lambda fd, *rest: let_go.append(rest))
    build(parent, tmp_path / "out")
    assert let_go == [(0, 0, os.POSIX_FADV_DONTNEED)] * forgotten
