"""A publication that is killed at any call leaves the old commit or the whole new one, and goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.delta.children import write_child
from tests.pipeline.parents import bf16, published
from tests.pipeline.publish.hub import Hub
from tests.pipeline.publish.publisher import Publisher
from tests.pipeline.publish.test_publish import PLACE, hub, pytestmark, run, shown

__all__ = ["hub", "pytestmark"]
CHANGES = ("create", "batch", "upload", "verify", "duplicate", "commit")


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

    words = ["publish", str(new), PLACE, "--workers", "1"]
    start_again()
    assert publisher.run(hub, words) == "ended 0"
    calls = list(hub.calls)
    points = [(number, "before") for number in range(len(calls))]
    points += [(number, "after") for number, call in enumerate(calls) if call in CHANGES]
    seen = set()
    for point in points:
        start_again()
        assert publisher.run(hub, words, point) == "killed", (point, calls)
        assert shown(hub) in (before, after)
        seen.add(shown(hub) == after)
        assert run(new, PLACE).exit_code == 0
        assert shown(hub) == after
        assert sorted(hub.sent.values()) == [1, 1]
        assert len(hub.repositories["me/child"].messages) == 2
    assert seen == {False, True}
    assert len(points) > 20
