"""How many workers this machine can use: the cores that are ours, and the memory that each needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import cycle, islice
from math import ceil
from pathlib import Path

WORKERS_MAX = 64
WORKER_BYTES = 160 << 20  # what one worker takes at most beside the plan: buffers, kernels, pages of its own
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_workers() -> int:
    """What `--workers auto` is: a worker a core, and no more than the memory holds."""
    return max(1, min(usable_cores(), available_bytes() // WORKER_BYTES, WORKERS_MAX))


def usable_cores() -> int:
    """The cores that this process may run on, and of these no more than its container's quota (cgroup v2) pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, ceil(int(quota) / int(period)))
    return max(1, cores)


def memory_bytes() -> int:
    """What this process may fill: the machine's memory, or its container's (cgroup v2)."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read(group / "memory.max") for group in _groups()]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def available_bytes() -> int:
    """What may be filled now: free memory and the page cache, within the container's limit."""
    free = memory_bytes()
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) << 10)
    for group in _groups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            free = min(free, max(int(limit) - int(used) + _cached_bytes(group), 0))
    return free


def _cached_bytes(group: Path) -> int:
    """Of the page cache, which the system gives up when asked for memory."""
    lines = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(count) for name, count in lines if name in ("active_file", "inactive_file"))


def _groups() -> list[Path]:
    """The control groups that this process is in, the innermost first: each may set a limit."""
    own = _read(_MEMBERSHIP).rpartition("0::")[2].splitlines()[:1]
    path = _CGROUP / (own[0].lstrip("/") if own else "")
    inner = [path, *path.parents] if path.is_relative_to(_CGROUP) else [_CGROUP]
    return [each for each in inner if each.is_relative_to(_CGROUP)]


def cores_for(workers: int) -> Iterable[int | None]:
    """A core for each worker, and most likely others than those of another build; none where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        return [None] * workers
    first = os.getpid() * workers % len(cores)
    return islice(cycle(cores), first, first + workers)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
