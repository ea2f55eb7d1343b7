"""Builds on a dask.distributed cluster: the same bytes as threads give, whatever happens to a worker."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Settings, Watch

distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # dask.distributed's own warnings are not ours to mend
RECIPE = Path(__file__).parents[3] / "pipeline.toml"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardmill.pipeline.toy.sizes import SIZES
    from shardmill.pipeline.toy.write import toy_headers, write_parent

    folder = tmp_path_factory.mktemp("cluster") / "parent"
    write_parent(folder, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    return folder


@pytest.fixture(scope="module")
def reference(parent: Path) -> dict[str, str]:
    out = parent.parent / "threads"
    run.build(prepare(load(RECIPE), parent), out, Settings(kernel="numpy"), Watch())
    return tree(out)


@pytest.fixture
def cluster() -> Iterator[object]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as running:
        yield running


def tree(out: Path) -> dict[str, str]:
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob("*")
        if path.is_file() and ".shardmill" not in path.parts
    }


def staged(out: Path) -> list[str]:
    return [path.name for path in (out / ".shardmill" / "staging").iterdir()]


def test_a_cluster_makes_the_bytes_that_threads_make_and_reports_every_byte(
    parent: Path, reference: dict[str, str], cluster: object, tmp_path: Path
) -> None:
    """Two worker processes over a shared folder give the reference bytes; progress reaches the announced total."""
    announced, done = [], []
    settings = Settings(kernel="numpy", scheduler=cluster.scheduler_address)  # type: ignore[attr-defined]
    prepared = prepare(load(RECIPE), parent)
    summary = run.build(prepared, tmp_path / "out", settings, Watch(done.append), announced.append)
    assert tree(tmp_path / "out") == reference
    assert len(summary.made) == 5
    assert sum(done) == announced[0] == summary.bytes_read


def test_a_worker_killed_in_the_middle_of_a_shard_changes_nothing(
    parent: Path, reference: dict[str, str], cluster: object, tmp_path: Path
) -> None:
    """kill -9 of the worker that is making a shard: another makes it anew, with the same bytes and no orphan."""
    out = tmp_path / "out"
    victim = next(iter(cluster.workers.values()))  # type: ignore[attr-defined]
    killed = threading.Event()

    def kill_when_busy() -> None:
        while not (out / ".shardmill" / "staging").exists() or not staged(out):
            time.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    settings = Settings(kernel="numpy", scheduler=cluster.scheduler_address)  # type: ignore[attr-defined]
    run.build(prepare(load(RECIPE), parent), out, settings, Watch())
    killer.join()
    assert killed.is_set()
    assert tree(out) == reference
    assert staged(out) == []


def test_a_scheduler_that_goes_away_in_the_middle_is_one_clear_sentence(
    parent: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """kill -9 of the scheduler: nothing is published, and the next build gives the reference bytes."""
    address, out = f"tcp://127.0.0.1:{free_port()}", tmp_path / "out"
    scheduler = program("scheduler", "--host", address, "--no-dashboard")
    worker = program("worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard")
    over = threading.Event()

    def kill_when_busy() -> None:
        while not over.is_set() and not ((out / ".shardmill" / "staging").exists() and staged(out)):
            time.sleep(0.001)
        scheduler.kill()

    killer = threading.Thread(target=kill_when_busy)
    try:
        with distributed.Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)
        killer.start()
        with pytest.raises(BuildError, match=f"the dask scheduler at {address} went away"):
            run.build(prepare(load(RECIPE), parent), out, Settings(scheduler=address), Watch())
    finally:
        over.set()
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    killer.join()
    assert tree(out) == {}
    run.build(prepare(load(RECIPE), parent), out, Settings(kernel="numpy"), Watch())
    assert tree(out) == reference


def program(name: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"distributed.cli.dask_{name}", *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_scheduler_that_does_not_answer_is_one_clear_sentence(parent: Path, tmp_path: Path) -> None:
    """An address where nobody listens stops the build before any shard, and nothing is published."""
    settings = Settings(scheduler="tcp://127.0.0.1:9")
    with pytest.raises(BuildError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9"):
        run.build(prepare(load(RECIPE), parent), tmp_path / "out", settings, Watch())
    assert tree(tmp_path / "out") == {}
