"""What lies in a folder under the name of a file and is none: a pipe, a device, a folder, a link in a circle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import BuildError, ShardmillError
from tests.pipeline.parents import INDEX, MANIFEST, SHARDS, build, published, write_parent

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "circle": lambda path: path.symlink_to(path.name),
}
NEEDED = ("config.json", INDEX, SHARDS[0])
LEFT = ("README.md", "tokenizer_config.json", "modeling_x.py", "modules.json")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    """A pipe would be waited for without end, a device read without end."""
    KINDS[kind](tmp_path / "it")
    with pytest.raises(OSError, match=r"read: .*it"):
        read_regular(tmp_path / "it")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NEEDED)
def test_a_parents_file_that_is_none_is_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent")
    (parent / name).unlink()
    KINDS[kind](parent / name)
    with pytest.raises(ShardmillError, match=name):
        build(parent, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_side_files_that_are_none_are_left(kind: str, tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent")
    for name in LEFT:
        (parent / name).unlink(missing_ok=True)
        KINDS[kind](parent / name)
    build(parent, tmp_path / "out")
    assert not published(tmp_path / "out").keys() & {*LEFT[1:]}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [MANIFEST, ".shardmill/commit.json"])
def test_an_outputs_record_that_is_no_file_is_named(name: str, kind: str, tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent")
    build(parent, tmp_path / "out")
    (tmp_path / "out" / name).unlink(missing_ok=True)
    KINDS[kind](tmp_path / "out" / name)
    with pytest.raises(OSError, match=f"read: .*{name}"):
        build(parent, tmp_path / "out")


def test_an_output_folder_that_is_a_circle_of_links_is_named(tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent")
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*out"):
        build(parent, tmp_path / "out")


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    """An output folder may come from a tarball."""
    parent = write_parent(tmp_path / "parent")
    build(parent, tmp_path / "out")
    (tmp_path / "out" / ".shardmill" / "lock").unlink()
    (tmp_path / "out" / ".shardmill" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(BuildError, match="lock: cannot be opened"):
        build(parent, tmp_path / "out")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "journal",
    [
        '{"staged": {"a": [1e400, 2]}, "removed": [], "entry": "model.safetensors"}',
        json.dumps({"staged": {"a" * 5000: None}, "removed": ["b" * 5000], "entry": "model.safetensors"}),
        "[" * 100_000,
    ],
    ids=["numbers without end", "long names", "deep"],
)
def test_a_journal_of_another_form_is_dropped(journal: str, tmp_path: Path) -> None:
    """The next build gives what one from nothing gives."""
    parent = write_parent(tmp_path / "parent")
    build(parent, tmp_path / "out")
    before = published(tmp_path / "out")
    (tmp_path / "out" / ".shardmill" / "commit.json").write_text(journal)
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == before
    assert not (tmp_path / "out" / ".shardmill" / "commit.json").exists()
