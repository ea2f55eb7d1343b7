"""A build into a hub that is killed at any call leaves the old commit or the whole new one, and goes on from there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.parents import build, published, write_recipe
from tests.pipeline.publish.hub import Hub
from tests.pipeline.publish.publisher import Publisher
from tests.pipeline.publish.test_kills import CHANGES
from tests.pipeline.publish.test_publish import PLACE, hub, pytestmark, shown
from tests.pipeline.stream.test_stream import add_parent, cache, run

EVERY_CALL = os.environ.get("SHARDMILL_KILLS") == "all"  # else those alone that change what the hub holds
__all__ = ["cache", "hub", "pytestmark"]


@pytest.fixture
def publisher(hub: Hub, cache: Path) -> Iterator[Publisher]:
    started = Publisher(hub)
    yield started
    started.close()


def test_the_head_is_the_old_commit_or_the_whole_new_one_at_every_kill(
    hub: Hub, publisher: Publisher, parent: Path, tmp_path: Path, cache: Path
) -> None:
    place = add_parent(hub, parent)
    build(parent, tmp_path / "near")
    after = published(tmp_path / "near")
    before = {"config.json": b"{}", "old.safetensors": b"o"}
    recipe = write_recipe(tmp_path / "recipes")
    words = [
        "build",
        "-c",
        str(recipe),
        "--parent",
        place,
        "--out",
        PLACE,
        "--workers",
        "1",
        "--kernel",
        "numpy",
    ]

    def start_again() -> None:
        hub.add("me/child", before)
        hub.calls.clear()
        hub.sent.clear()
        shutil.rmtree(cache, ignore_errors=True)

    start_again()
    assert publisher.run(hub, words) == "ended 0"
    calls = list(hub.calls)
    points = [(number, "before") for number, call in enumerate(calls) if EVERY_CALL or call in CHANGES]
    points += [(number, "after") for number, call in enumerate(calls) if call in CHANGES]
    seen = set()
    for point in points:
        start_again()
        assert publisher.run(hub, words, point) == "killed", (point, calls)
        assert shown(hub) in (before, after)
        seen.add(shown(hub) == after)
        result = run(tmp_path, place)
        assert result.exit_code == 0, result.output
        assert shown(hub) == after
        assert sorted(hub.sent.values()) == [1, 1]
        assert len(hub.repositories["me/child"].messages) == 2
    assert seen == {False, True}
    assert len(points) >= (50 if EVERY_CALL else 16)


def test_two_workers_that_send_what_they_made_show_the_same(
    hub: Hub, publisher: Publisher, parent: Path, tmp_path: Path, cache: Path
) -> None:
    """Each in a process of its own, as a command has them."""
    place = add_parent(hub, parent, xet=False)
    build(parent, tmp_path / "near")
    words = ["build", "-c", str(write_recipe(tmp_path / "recipes")), "--parent", place, "--out", PLACE]
    ended = publisher.run(hub, [*words, "--create", "--workers", "2", "--kernel", "numpy"])
    assert ended == "ended 0"
    assert shown(hub) == published(tmp_path / "near")
    assert sorted(hub.sent.values()) == [1] * 4
    assert not list((cache / "shardmill" / "out").rglob("*.safetensors"))
