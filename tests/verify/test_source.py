"""A folder is read within its bounds: links, special files, depth, changes under us."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.reading import source
from shardmill.verify.reading.source import Folder, read
from shardmill.verify.rules.findings import UnreadableError
from tests.verify.zoo.clean import nvfp4_parent, plain


def test_a_hugging_face_cache_snapshot_is_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    nvfp4_parent().write(repository / "blobs")
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, blob in enumerate(sorted((repository / "blobs").iterdir())):
        blob.rename(blob.with_name(f"{number:064x}"))
        (snapshot / blob.name).symlink_to(f"../../blobs/{number:064x}")
    assert integrity(Folder(snapshot)).findings == []


def test_a_link_that_leaves_the_folder_is_not_followed_even_beside_blobs(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "c" / "generation_config.json").symlink_to("../secret.json")
    folder = Folder(tmp_path / "c")
    assert "generation_config.json" not in folder.files()
    assert [finding.slug for finding in folder.findings()] == ["link-leaves-folder"]


def test_a_link_within_the_folder_is_a_file(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    (tmp_path / "c" / "copy.json").symlink_to("config.json")
    assert "copy.json" in Folder(tmp_path / "c").files()


def test_dotfiles_and_state_folders_are_not_looked_at(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    (tmp_path / "c" / ".shardmill").mkdir()
    (tmp_path / "c" / ".shardmill" / "x.safetensors").write_bytes(b"")
    (tmp_path / "c" / ".gitattributes").write_bytes(b"")
    assert sorted(Folder(tmp_path / "c").files()) == ["config.json", "model.safetensors"]


def test_one_file_is_a_checkpoint(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    assert list(Folder(tmp_path / "c" / "model.safetensors").files()) == ["model.safetensors"]


def test_a_folder_without_end_is_listed_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "ENTRIES_MAX", 10)
    for number in range(20):
        (tmp_path / f"{number:02}").write_bytes(b"")
    assert len(Folder(tmp_path).files()) == 10


def test_a_folder_is_not_walked_deeper_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DEPTH_MAX", 2)
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"")
    (deep.parent / "y").write_bytes(b"")
    assert list(Folder(tmp_path).files()) == ["a/b/y"]


def test_a_file_that_shrinks_while_it_is_read_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    folder = Folder(tmp_path)
    assert folder.files() == {"x": 4}
    (tmp_path / "x").write_bytes(b"12")
    with pytest.raises(UnreadableError) as error:
        read(folder, "x", 0, 4)
    assert (error.value.finding.slug, error.value.finding.got) == ("truncated-file", "2 bytes")


def test_a_file_that_vanishes_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError) as error:
        read(Folder(tmp_path), "gone", 0, 1)
    assert error.value.finding.slug == "special-file"
