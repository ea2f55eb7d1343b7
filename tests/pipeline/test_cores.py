"""How many workers `auto` is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmill.pipeline.run import cores


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group `job` in a hierarchy without limits, and 32 cores to run on."""
    (tmp_path / "cgroup" / "job").mkdir(parents=True)
    (tmp_path / "self").write_text("0::/job\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 67108864 kB\n")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(cores, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 24}[name])
    return tmp_path / "cgroup" / "job"


def test_a_worker_for_each_core_that_is_ours(group: Path) -> None:
    assert cores.usable_workers() == 32


@pytest.mark.parametrize(
    ("quota", "workers"), [("max 100000", 32), ("400000 100000", 4), ("150000 100000", 2)]
)
def test_a_containers_quota_is_kept(group: Path, quota: str, workers: int) -> None:
    """Whichever group of those that this process is in sets it."""
    (group / "cpu.max").write_text(quota)
    assert cores.usable_workers() == workers
    (group / "cpu.max").rename(group.parent / "cpu.max")
    assert cores.usable_workers() == workers


def test_no_more_workers_than_the_memory_holds(group: Path) -> None:
    (group / "memory.max").write_text(str(5 * cores.WORKER_BYTES))
    (group / "memory.current").write_text(str(4 * cores.WORKER_BYTES))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 * cores.WORKER_BYTES}\n")
    assert cores.usable_workers() == 3
    (group / "memory.current").write_text(str(9 * cores.WORKER_BYTES))
    assert cores.usable_workers() == 1
