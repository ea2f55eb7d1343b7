"""A parent on a hub: the same child as from a folder, and nothing of the parent's data on this disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.hub import HUB_FILE, hub_bytes, place_of, refuse_other_digest, sparse_mirror
from shardmill.pipeline.container.ranges import RemoteFile, WrongAnswerError
from shardmill.pipeline.errors import CheckpointError, PlanError, ShardmillError
from tests.pipeline.parents import INDEX, MANIFEST, build, published, why, write_recipe
from tests.pipeline.profiles.models import FILES, native_parent, recipe
from tests.verify.web import SHA, Server, serving

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
PLACE = "hf://org/repo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub that has one repository: a parent of two files."""
    folder = native_parent(tmp_path / "repository")
    shutil.rmtree(folder / "assets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


KEEP = recipe(
    "fp8",
    """
[[family]]
name = "linears"
match = "model.layers.*.{self_attn,mlp}.*.{weight,weight_scale_inv}"
action = "dequantize"
source_block = [128, 128]
expect = 6
""",
)


def test_a_child_of_a_repository_is_the_child_of_its_folder(hub: Server, tmp_path: Path) -> None:
    build(sparse_mirror(PLACE), tmp_path / "far", KEEP)
    build(hub.folder, tmp_path / "near", KEEP)
    assert bytes_of(tmp_path / "far") == bytes_of(tmp_path / "near")
    card = (tmp_path / "far" / "README.md").read_text()
    assert f"Made by shardmill from org/repo, revision {SHA}" in card
    assert "base_model: org/repo" in card


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What is published, but for the two files that say where the parent came from."""
    say = ("README.md", "shardmill.manifest.json")
    return {name: data for name, data in published(folder).items() if name not in say}


def test_the_next_step_names_the_place_not_the_cache(hub: Server, tmp_path: Path) -> None:
    """The folder of the mirror is nobody's business."""
    place = place_of(sparse_mirror(PLACE))
    assert place == f"hf://org/repo@{SHA}"
    assert place_of(hub.folder) == str(hub.folder)


def test_the_parents_data_never_lie_on_this_disk(hub: Server, tmp_path: Path) -> None:
    folder = sparse_mirror(f"{PLACE}@{SHA}")
    build(folder, tmp_path / "out", KEEP)
    for file in FILES:
        stat = (folder / file).stat()
        assert stat.st_size == (hub.folder / file).stat().st_size
        assert stat.st_blocks * 512 <= 8192 < stat.st_size


@pytest.mark.parametrize("how", ["hardlink", "reflink"])
def test_a_shard_that_is_passed_on_is_fetched_not_linked_to_its_hole(
    hub: Server, tmp_path: Path, how: str
) -> None:
    keep = KEEP.replace(
        '"dequantize"\nsource_block = [128, 128]\nexpect = 6', '"keep"\nreason = "FP8 already"'
    )
    build(sparse_mirror(PLACE), tmp_path / "out", keep, passthrough=how)
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (hub.folder / file).read_bytes()


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Server, tmp_path: Path) -> None:
    folder = sparse_mirror(PLACE)
    hub.fail += ["cut", 503, "cut"]
    build(folder, tmp_path / "out", KEEP)
    assert hub.fail == []
    build(hub.folder, tmp_path / "near", KEEP)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "near")


def test_a_file_that_is_gone_from_the_hub_stops_the_build_with_its_address(
    hub: Server, tmp_path: Path
) -> None:
    folder = sparse_mirror(PLACE)
    (hub.folder / FILES[0]).rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=rf"{FILES[0]}: byte \d+ cannot be fetched: HTTP Error 404"):
        build(folder, tmp_path / "out", KEEP)
    assert not (tmp_path / "out" / INDEX).exists()


def test_a_second_build_asks_the_hub_for_no_byte(hub: Server, tmp_path: Path) -> None:
    build(sparse_mirror(PLACE), tmp_path / "out", KEEP)
    hub.asked.clear()
    build(sparse_mirror(PLACE), tmp_path / "out", KEEP)
    assert why(sparse_mirror(PLACE), tmp_path / "out", KEEP) == {}
    assert [path for path, _ in hub.asked if "resolve" in path] == []


def test_the_token_is_handed_to_no_other_host(hub: Server, tmp_path: Path) -> None:
    with serving(hub.folder) as elsewhere:
        hub.redirect_to = elsewhere.address
        data = bytearray(4)
        with RemoteFile(f"{hub.address}/moved/{FILES[0]}", (hub.folder / FILES[0]).stat().st_size) as source:
            source.read_into(memoryview(data), 8)
        assert data == (hub.folder / FILES[0]).read_bytes()[8:12]
        assert hub.tokens[-1] == "Bearer hf_secret"
        assert elsewhere.tokens == [None]


def test_a_folder_that_poses_as_a_mirror_is_refused(hub: Server) -> None:
    """Whoever publishes a parent may put our own dotfile into it, with an address of their choice: nobody is asked."""
    with serving(hub.folder) as elsewhere:
        note = {"repository": "a/b", "base": elsewhere.address, "holes": list(FILES), "sha256": {}}
        (hub.folder / HUB_FILE).write_text(json.dumps(note))
        with pytest.raises(CheckpointError, match=r"only the cache .* holds mirrors of a hub"):
            hub_bytes(hub.folder / FILES[0])
        assert elsewhere.asked == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"repository": 1}'])
def test_a_damaged_note_is_made_again(damage: str, hub: Server, tmp_path: Path) -> None:
    """A full disk or a power failure may leave an empty note; the next command makes the mirror anew."""
    (sparse_mirror(PLACE) / HUB_FILE).write_text(damage)
    build(sparse_mirror(PLACE), tmp_path / "out", KEEP)
    assert (tmp_path / "out" / INDEX).exists()


def test_reading_on_asks_for_nothing_new_and_a_jump_back_asks_again(hub: Server) -> None:
    whole = (hub.folder / FILES[0]).read_bytes()
    with RemoteFile(f"{hub.address}/{FILES[0]}", len(whole)) as source:
        for offset in (100, 150, 260, 90):
            data = bytearray(50)
            source.read_into(memoryview(data), offset)
            assert data == whole[offset : offset + 50]
    assert [asked for _, asked in hub.asked] == [f"bytes=100-{len(whole) - 1}", f"bytes=90-{len(whole) - 1}"]


def test_the_commands_take_a_repository_for_a_parent(hub: Server, tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(KEEP)
    arguments = [
        "build",
        "-c",
        str(tmp_path / "pipeline.toml"),
        "--parent",
        PLACE,
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(shardmill, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize(
    "pinned", [f'repository = "org/other"\nrevision = "{SHA}"', f'revision = "{"f" * 40}"']
)
def test_a_repository_that_the_recipe_does_not_pin_is_refused(
    hub: Server, tmp_path: Path, pinned: str
) -> None:
    with pytest.raises(PlanError, match=r"the recipe pins the .* but the hub has"):
        build(
            sparse_mirror(PLACE), tmp_path / "out", KEEP.replace("[output]", f"[parent]\n{pinned}\n[output]")
        )


@pytest.mark.parametrize(
    ("place", "said"),
    [("hf://org", "write hf://org/repo"), ("hf://org/other", "no such repository at http://127.0.0.1")],
)
def test_a_place_that_is_no_repository_is_refused_in_a_sentence(hub: Server, place: str, said: str) -> None:
    with pytest.raises(ShardmillError, match=said):
        sparse_mirror(place)


def test_what_a_child_does_not_get_is_not_fetched(hub: Server) -> None:
    """Other copies of the weights are holes of their true size; the tokenizer is there whole."""
    (hub.folder / "pytorch_model.bin").write_bytes(bytes(1 << 20))
    folder = sparse_mirror(PLACE)
    assert (folder / "pytorch_model.bin").stat().st_size == 1 << 20
    assert not [path for path, _ in hub.asked if "pytorch_model" in path]
    assert (folder / "tokenizer.json").read_bytes() == (hub.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Range": "bytes 0-3/100"}, "has the range"),
        ({"Content-Range": "bytes 8-11/99"}, "has the range"),
        ({"Content-Range": None}, "has the range"),
        ({"Content-Length": "3"}, "has 3 bytes"),
        ({"Content-Encoding": "gzip"}, "is encoded"),
        ({"ETag": '"new"'}, "changed while it was read"),
    ],
)
def test_an_answer_of_other_bytes_is_refused(headers: dict[str, str | None], words: str) -> None:
    """Range, size, encoding and ETag of each answer are compared with what was asked for."""
    right = {"Content-Range": "bytes 8-11/100", "Content-Length": "4", "ETag": '"old"'} | headers
    message = Message()
    for name, value in right.items():
        if value is not None:
            message[name] = value
    file = RemoteFile("http://nowhere/x", 100, until=12)
    file._at, file._end, file.etag = 8, 12, '"old"'
    with pytest.raises(WrongAnswerError, match=words):
        file._refuse_other_bytes(cast(HTTPResponse, SimpleNamespace(status=206, headers=message)), 8)


def test_a_file_whose_sha256_the_hub_states_otherwise_is_refused() -> None:
    """The hub's own digest proves what is fetched whole."""
    refuse_other_digest("a", "0" * 64, {})
    with pytest.raises(CheckpointError, match="a: its bytes have the sha256 0000"):
        refuse_other_digest("a", "0" * 64, {"a": "1" * 64})


def test_plan_tells_how_much_a_publication_would_send(hub: Server, tmp_path: Path) -> None:
    keep = KEEP.replace('"dequantize"\nsource_block = [128, 128]\nexpect = 6', '"keep"\nreason = "x"')
    for text, sends in ((KEEP, True), (keep, False)):
        path = write_recipe(tmp_path, text)
        result = CliRunner().invoke(shardmill, ["plan", "-c", str(path), "--parent", PLACE, "--json"])
        facts = json.loads(result.stdout)
        rewritten = facts["upload"]["bytes"]
        assert (rewritten > 0, facts["upload"]["of"] >= rewritten) == (sends, True)
        told = CliRunner().invoke(shardmill, ["plan", "-c", str(path), "--parent", PLACE])
        assert "to upload: " in told.output
