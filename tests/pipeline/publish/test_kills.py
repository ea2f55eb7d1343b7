"""A publication that is killed at any call leaves the old commit or the whole new one, and goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.pipeline.conftest import ROOT
from tests.pipeline.delta.children import write_child
from tests.pipeline.parents import bf16, published
from tests.pipeline.publish.hub import Hub
from tests.pipeline.publish.test_publish import PLACE, hub, pytestmark, run, shown

__all__ = ["hub", "pytestmark"]
CHANGES = ("create", "batch", "upload", "verify", "duplicate", "commit")


class Publisher:
    """Starts publications in a process of their own, for the hub to kill."""

    def __init__(self, hub: Hub) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.publish.kill_server"],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.to: IO[str] = self.process.stdin
        self.back: IO[str] = self.process.stdout
        assert self.back.readline() == "ready\n"

    def publish(self, hub: Hub, folder: Path, kill_at: tuple[int, str] | None) -> str:
        return self.run(hub, ["publish", str(folder), PLACE, "--workers", "1"], kill_at)

    def run(self, hub: Hub, words: list[str], kill_at: tuple[int, str] | None) -> str:
        """How the command ended: "killed", or "ended" and its exit code."""
        self.to.write(json.dumps(words) + "\n")
        self.to.flush()
        hub.victim, hub.kill_at = int(self.back.readline()), kill_at
        self.to.write("go\n")
        self.to.flush()
        ended = self.back.readline().strip()
        hub.victim, hub.kill_at = 0, None
        return ended

    def close(self) -> None:
        self.to.close()
        self.process.wait()
        self.back.close()


@pytest.fixture
def publisher(hub: Hub) -> Iterator[Publisher]:
    started = Publisher(hub)
    yield started
    started.close()


def test_the_head_is_the_old_commit_or_the_whole_new_one_at_every_kill(
    hub: Hub, publisher: Publisher, tmp_path: Path
) -> None:
    kept, moved = {"k": bf16("k", 8, 8)}, {"m": bf16("m", 8, 8)}
    old = write_child(
        tmp_path / "old",
        {"k.safetensors": kept, "m.safetensors": moved, "w.safetensors": {"w": bf16("1", 8, 8)}},
        {},
    )
    new = write_child(
        tmp_path / "new",
        {
            "k.safetensors": kept,
            "n.safetensors": moved,
            "v.safetensors": {"v": bf16("3", 8, 8)},
            "w.safetensors": {"w": bf16("2", 8, 8)},
        },
        {"config.json": b"{}"},
    )
    before, after = published(old), published(new)

    def start_again() -> None:
        hub.add("me/child", before)
        hub.calls.clear()
        hub.sent.clear()

    start_again()
    assert publisher.publish(hub, new, None) == "ended 0"
    calls = list(hub.calls)
    points = [(number, "before") for number in range(len(calls))]
    points += [(number, "after") for number, call in enumerate(calls) if call in CHANGES]
    seen = set()
    for point in points:
        start_again()
        assert publisher.publish(hub, new, point) == "killed", (point, calls)
        assert shown(hub) in (before, after)
        seen.add(shown(hub) == after)
        assert run(new, PLACE).exit_code == 0
        assert shown(hub) == after
        assert sorted(hub.sent.values()) == [1, 1]
        assert len(hub.repositories["me/child"].messages) == 2
    assert seen == {False, True}
    assert len(points) > 20
