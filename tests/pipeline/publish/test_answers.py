"""What a hub refuses is one sentence that says what to do, and what it asks to wait for is waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.container import ranges
from shardmill.pipeline.container.ranges import seconds_asked_for
from shardmill.pipeline.errors import CheckpointError, ShardmillError
from shardmill.pipeline.publish import answers
from tests.pipeline.delta.children import write_child
from tests.pipeline.parents import INDEX, bf16, published
from tests.pipeline.publish.hub import Hub
from tests.pipeline.publish.test_publish import PLACE, child, hub, pytestmark, run, shown, told

__all__ = ["child", "hub", "pytestmark"]
CALLS = ("create", "branch", "info", "tree", "preupload", "batch", "upload", "commit", "paths-info")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept between the tries of this program's own."""
    found: list[float] = []
    monkeypatch.setattr(answers, "sleep", found.append)
    monkeypatch.setattr(ranges, "sleep", found.append)
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_hub_that_is_asked_too_often_is_asked_again(
    hub: Hub, child: Path, call: str, waits: list[float]
) -> None:
    """Whichever call it is: a 429 was not carried out."""
    hub.add("me/child", {"config.json": b"{}"})
    if call == "create":
        del hub.repositories["me/child"]
    branch = "next" if call == "branch" else "main"
    hub.fail += [(call, 429)] * 3
    hub.wait_seconds = 7
    assert run(child, f"{PLACE}@{branch}", "--create").exit_code == 0
    assert hub.fail == []
    assert shown(hub, branch=branch) == published(child)
    assert set(waits) <= {7.0}


@pytest.mark.parametrize("call", ["create", "branch", "preupload", "batch", "upload", "commit"])
def test_a_token_without_the_right_to_write_is_told_so_and_changes_nothing(
    hub: Hub, child: Path, call: str
) -> None:
    hub.add("me/child", {"config.json": b"{}"})
    if call == "create":
        del hub.repositories["me/child"]
    before = hub.repositories.get("me/child") and shown(hub)
    hub.fail += [(call, 403)] * 99
    refused = run(child, f"{PLACE}@{'next' if call == 'branch' else 'main'}", "--create")
    assert isinstance(refused.exception, ShardmillError)
    said = str(refused.exception)
    assert "asked to fail with 403" in said
    assert "log in with a token that may write there" in said
    assert "developer.mozilla" not in said
    assert "\n" not in said
    if before:
        assert shown(hub) == before
        assert list(hub.repositories["me/child"].branches) == ["main"]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "12"}, 12.0),
        ({"retry-after": "12"}, 12.0),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "1"}, 55.0),
        ({"Retry-After": "99999999"}, 300.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.5),
        ({"Retry-After": "-3"}, 0.5),
        ({"RateLimit": "soon"}, 0.5),
        ({}, 0.5),
    ],
)
def test_a_wait_is_what_the_server_asks_for_within_reason(headers: dict[str, str], seconds: float) -> None:
    assert seconds_asked_for(headers, 0.5) == seconds


def test_names_with_spaces_and_letters_of_any_kind_arrive(hub: Hub, tmp_path: Path) -> None:
    new = write_child(
        tmp_path / "new",
        {
            "a b.safetensors": {"w": bf16("w", 8, 8)},
            "naïve ☃.safetensors": {"v": bf16("v", 8, 8)},
            "sub dir/100%#?.safetensors": {"u": bf16("u", 8, 8)},
        },
        {"config.json": b"{}", "we ird/ü&=+.json": b"[]", "x'\"`$(y).txt": b"1"},
    )
    told(new, PLACE, "--create")
    assert shown(hub) == published(new)
    assert told(new, PLACE)["unchanged"]
    extra = new / "we ird" / "ü ☃?.txt"
    extra.write_bytes(b"more")
    assert list(told(new, PLACE)["sent"]["files"]) == ["we ird/ü ☃?.txt"]
    extra.unlink()
    assert list(told(new, PLACE)["deleted"]["files"]) == ["we ird/ü ☃?.txt"]
    assert shown(hub) == published(new)


def test_what_others_put_there_is_named_before_it_is_deleted(hub: Hub, child: Path) -> None:
    """Another's README is replaced, their files go, the repository's own dotfiles stay; the old commit holds them."""
    theirs = {"README.md": b"theirs", "model.safetensors": b"s", "sub/x.txt": b"1", ".gitattributes": b"g"}
    hub.add("me/child", theirs)
    said = run(child, PLACE, "--dry-run").output
    for name in ("model.safetensors", "sub/x.txt"):
        assert f"would be deleted: {name}" in said
    assert "would be sent: README.md" in said
    assert ".gitattributes" not in said
    assert shown(hub) == {name: data for name, data in theirs.items() if not name.startswith(".")}
    first = hub.repositories["me/child"].branches["main"]
    told(child, PLACE)
    assert shown(hub) == published(child)
    assert hub.repositories["me/child"].head(first)["README.md"] == b"theirs"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"


def _pointer_for_shard(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(POINTER)


def _pointer_for_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(POINTER)


def _truncated(folder: Path) -> None:
    data = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data[:-1])


@pytest.mark.parametrize("fault", [_pointer_for_shard, _pointer_for_tokenizer, _truncated])
def test_a_checkpoint_without_manifest_is_looked_at_before_the_hub_is_asked(
    hub: Hub, tmp_path: Path, fault: Callable[[Path], Any]
) -> None:
    """Pointers of Git LFS and truncated shards are what a clone or a download leaves."""
    folder = write_child(
        tmp_path / "new", {"a.safetensors": {"w": bf16("w", 8, 8)}}, {"tokenizer.json": b"{}"}
    )
    (folder / "shardmill.manifest.json").unlink()
    assert run(folder, PLACE, "--create", "--dry-run").exit_code == 0
    calls = len(hub.calls)
    fault(folder)
    refused = run(folder, PLACE, "--create")
    assert isinstance(refused.exception, CheckpointError)
    assert len(hub.calls) == calls
    assert (folder / INDEX).is_file()
