"""A folder that is published to holds the checkpoint whole, without the build's memory, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.files import Sink
from shardmill.pipeline.errors import ShardmillError
from tests.pipeline.parents import INDEX, MANIFEST, build, listing, published
from tests.schemas import held


@pytest.fixture
def child(parent: Path, tmp_path: Path) -> Path:
    build(parent, tmp_path / "out")
    return tmp_path / "out"


def run(*words: Any) -> Result:
    return CliRunner().invoke(shardmill, ["publish", *map(str, words)])


def told(*words: Any) -> Any:
    result = run(*words, "--json")
    assert result.exception is None, (result.output, result.exception)
    return held(result.stdout)


def test_the_folder_holds_every_published_file_and_nothing_else(child: Path, tmp_path: Path) -> None:
    """A dry run tells the same and makes nothing."""
    target = tmp_path / "a shelf" / "naïve ☃"
    wished = told(child, target, "--dry-run")
    assert not target.parent.exists()
    done = told(child, target.as_uri())
    assert wished == done
    assert published(target) == published(child)
    assert not (target / ".shardmill").exists()
    assert done["sent"]["bytes"] == sum(len(data) for data in published(child).values())
    before = listing(target)
    assert told(child, target)["unchanged"]
    assert "nothing to do" in run(child, target).output
    assert listing(target) == before


def _wrong_byte(child: Path) -> None:
    path = min(child.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path], Any]] = {
    "a byte is wrong": _wrong_byte,
    "a shard is missing": lambda child: min(child.glob("*.safetensors")).unlink(),
    "no index": lambda child: (child / INDEX).unlink(),
    "an interrupted commit": lambda child: (child / ".shardmill" / "commit.json").write_text("{}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_not_whole_makes_no_folder(child: Path, tmp_path: Path, fault: str) -> None:
    FAULTS[fault](child)
    before = sorted(tmp_path.iterdir())
    result = run(child, tmp_path / "shelf")
    assert (result.exit_code, isinstance(result.exception, ShardmillError)) == (1, True)
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_disk_gives_back_otherwise_makes_no_folder(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Sink.write
    monkeypatch.setattr(Sink, "write", lambda sink, data, place: write(sink, bytes(len(data)), place))
    result = run(child, tmp_path / "shelf")
    assert "expected the sha256" in str(result.exception)
    assert not (tmp_path / "shelf").exists()


def _other_file(target: Path) -> None:
    (target / "mine.txt").write_text("x")


def _older(target: Path) -> None:
    (target / "config.json").write_text("{}")


def _folder_in_between(target: Path) -> None:
    (target / MANIFEST).unlink()
    (target / MANIFEST).mkdir()
    (target / MANIFEST / "x").write_text("x")


@pytest.mark.parametrize("change", [_other_file, _older, _folder_in_between])
def test_a_folder_that_holds_something_else_is_left_alone(
    child: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A folder is never replaced: nothing in it could be had back."""
    target = Path(shutil.copytree(child, tmp_path / "shelf"))
    change(target)
    before = listing(target)
    for words in ([], ["--dry-run"]):
        result = run(child, target, *words)
        assert "exists already" in str(result.exception)
    assert listing(target) == before


def test_a_folder_within_the_checkpoint_is_refused(child: Path) -> None:
    assert "is within" in str(run(child, child / "copy").exception)
    assert "is within" in str(run(child, child).exception)
    assert published(child).keys() >= {INDEX, MANIFEST}


@pytest.mark.parametrize(
    "words",
    [
        ["me/child"],
        ["shelf"],
        ["file://shelf"],
        ["/x", "--create"],
        ["/x", "--private"],
        ["/x", "--message", "m"],
    ],
)
def test_what_may_be_a_mistake_is_a_usage_error(child: Path, words: list[str]) -> None:
    """A repository's name without hf:// is no folder."""
    assert run(child, *words).exit_code == 2


def test_the_answer_names_the_folder(child: Path, tmp_path: Path) -> None:
    facts = json.loads(run(child, tmp_path / "shelf", "--json").stdout)
    assert facts["place"] == (tmp_path / "shelf").as_uri()
    assert (facts["commit"], facts["message"], facts["unchanged"]) == (None, None, False)
