"""What an output folder can hold: names that a manifest can write, and shared extents where a trial finds them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardmill.pipeline.container.files import can_reflink
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.run import place
from shardmill.pipeline.run.place import NAME_BYTES_MAX, refuse_full_disk, refuse_names
from tests.pipeline.parents import prepare


@pytest.mark.parametrize(
    "name", ["model.safetensors", "assets/é.json", "x" * NAME_BYTES_MAX, "a/" * 99 + "b"]
)
def test_a_name_that_every_file_system_holds_is_taken(name: str) -> None:
    refuse_names([name])


@pytest.mark.parametrize("name", ["a\udcff.json", "folder\udcff/a.json"])
def test_a_name_that_is_no_utf8_is_refused_in_letters_that_print(name: str) -> None:
    with pytest.raises(BuildError, match=r"udcff.*is no UTF-8") as refused:
        refuse_names(["config.json", name])
    str(refused.value).encode()


@pytest.mark.parametrize("name", ["x" * (NAME_BYTES_MAX + 1), "deep/" + "é" * (NAME_BYTES_MAX // 2 + 1)])
def test_a_name_too_long_for_its_receipt_is_refused_before_any_work(name: str) -> None:
    """Bytes count, not letters, and of the last part alone."""
    with pytest.raises(BuildError, match=f"the limit is {NAME_BYTES_MAX}"):
        refuse_names([name])


@pytest.mark.parametrize("answer", [None, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EIO])
def test_extents_are_shared_where_a_trial_says_so(
    answer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any refusal of the trial means no; the trial leaves nothing behind."""

    def ioctl(fd: int, request: int, source: int) -> int:
        if answer is not None:
            raise OSError(answer, "refused")
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert can_reflink(tmp_path) == (answer is None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shares", [True, False])
def test_what_is_passed_on_as_a_reflink_needs_no_room_where_extents_are_shared(
    shares: bool, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(parent)
    whole = [shard for shard in prepared.plan.shards if not shard.rewritten]
    monkeypatch.setattr(place, "can_reflink", lambda folder: shares)
    monkeypatch.setattr(place.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    if shares:
        refuse_full_disk(whole, prepared.parent, parent.parent, "reflink")
        return
    with pytest.raises(BuildError, match="the disk has 0 free"):
        refuse_full_disk(whole, prepared.parent, parent.parent, "reflink")
