"""The judge's work on several processes gives what one gives."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.reading import stream as streams
from shardmill.verify.reading import threads
from shardmill.verify.reading.file_pass import FileJob, Task
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.processes import forked
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Folder
from shardmill.verify.reading.stream import shared, stream


def test_results_come_in_the_order_of_the_items() -> None:
    found = forked(lambda item, own: (item * item, os.getpid()), range(5000), lambda: None, 3)
    assert [square for square, _ in found] == [item * item for item in range(5000)]
    assert os.getpid() not in {pid for _, pid in found}


def test_what_workers_have_done_is_added_up() -> None:
    heard: list[int] = []
    done = Progress(30, lambda so_far, total: heard.append(so_far))
    forked(lambda item, own: done.add(3), range(10), lambda: None, 2, done)
    assert heard[-1] == 30


def test_the_first_exception_of_a_worker_is_raised() -> None:
    def work(item: int, own: None) -> None:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        forked(work, range(10), lambda: None, 2)


def test_a_worker_that_is_killed_is_one_sentence() -> None:
    def work(item: int, own: None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildProcessError, match="was killed by SIGKILL; where memory ran out, free some"):
        forked(work, range(10), lambda: None, 2)


def _job(folder: Path, size: int, cut_to: int | None = None) -> tuple[Folder, FileJob]:
    data = np.random.Generator(np.random.PCG64(7)).integers(0, 256, size, np.uint8).tobytes()
    (folder / "a.safetensors").write_bytes(data[:cut_to])
    ends = range(0, size + 1, size // 10)
    tensors = [
        Tensor(f"t{n}", "U8", (b - a,), "a.safetensors", a, b) for n, (a, b) in enumerate(pairwise(ends))
    ]
    tasks = tuple(Task(tensor, digest=True) for tensor in tensors)
    return Folder(folder), FileJob("a.safetensors", size, True, tasks)


@pytest.mark.parametrize("cut_to", [None, 3 << 20])
def test_a_file_that_workers_share_is_judged_as_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_to: int | None
) -> None:
    """Its sha256 by one and its tensors by others; a file that breaks off is told once."""
    source, job = _job(tmp_path, 8 << 20, cut_to)
    monkeypatch.setattr(streams, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(streams, "usable_cores", lambda: 1)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    alone = stream(source, [job])["a.safetensors"]
    monkeypatch.setattr(streams, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    assert len(shared([job], 4)) > 3
    together = stream(source, [job])["a.safetensors"]
    assert (together.sha256, together.findings) == (alone.sha256, alone.findings)
    assert together.digests == alone.digests
    assert len(together.findings) == (cut_to is not None)
