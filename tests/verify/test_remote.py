"""A checkpoint behind an address is judged from headers and ranges, and servers may misbehave."""

from __future__ import annotations

import email.message
import io
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import LintOptions, lint
from shardmill.verify.reading import remote
from shardmill.verify.reading.places import PlaceError, hub_repository, web_folder
from shardmill.verify.reading.remote import Address, _Redirects
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report, UnreadableError
from tests.verify import web
from tests.verify.web import SHA, Server, serving
from tests.verify.zoo.clean import LM, mixed_child, nvfp4_parent
from tests.verify.zoo.model import patch

FILE = "model-00001-of-00002.safetensors"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.0)
    mixed_child().write(tmp_path / "c")
    with serving(tmp_path / "c") as server:
        yield server


def _rows(report: Report) -> list[tuple[str, str, str]]:
    return [(f.slug, f.tensor, f.got) for f in report.worst_first()]


def test_a_web_folder_gives_the_answers_that_the_folder_gives(server: Server) -> None:
    patched = mixed_child()
    patch(patched[f"{LM}layers.1.mlp.experts.0.up_proj.weight_scale_2"], 0, b"\0\0\0\x3d")
    patched.write(server.folder)
    of_a_folder = [
        row for row in _rows(lint(Folder(server.folder))) if row[0] != "size-outlier"
    ]  # needs codes
    assert _rows(lint(web_folder(server.address))) == of_a_folder


def test_every_read_of_lint_is_a_range_and_no_file_is_read_whole(server: Server) -> None:
    source = web_folder(server.address)
    lint(source, LintOptions(sample_bytes=4096))
    assert all(asked for path, asked in server.asked)
    total = sum(path.stat().st_size for path in server.folder.iterdir() if path.suffix == ".safetensors")
    assert 0 < source.transferred < total / 3


def test_the_index_is_transferred_once(server: Server) -> None:
    lint(web_folder(server.address))
    whole = [asked for path, asked in server.asked if path.endswith("index.json") and asked != "bytes=0-0"]
    assert len(whole) == 1


def test_a_redirect_is_followed(server: Server) -> None:
    assert integrity(web_folder(f"{server.address}/moved")).findings == []
    assert any(path.startswith("/moved/") for path, _ in server.asked)


def test_a_redirect_to_another_host_of_this_network_is_refused(server: Server) -> None:
    with serving(server.folder) as other:
        server.redirect_to = other.address.replace("127.0.0.1", "localhost")
        with pytest.raises(UnreadableError) as error:
            Address(f"{server.address}/moved").fetch("config.json", 0, 1)
        assert "--allow-private" in error.value.finding.got
        assert other.tokens == []


def test_all_requests_share_one_limit_of_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.LIMITS, "seconds", 0.0)
    with pytest.raises(UnreadableError) as error:
        Address(server.address).fetch("config.json", 0, 1)
    assert "--timeout" in error.value.finding.got


def test_credentials_do_not_follow_a_redirect_to_another_host(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.LIMITS, "private", True)
    with serving(server.folder) as other:
        server.redirect_to = other.address.replace("127.0.0.1", "localhost")
        address = Address(f"{server.address}/moved", {"Authorization": "Bearer secret"})
        assert address.fetch("config.json", 0, 1)[0] == b"{"
        assert server.tokens == ["Bearer secret"]
        assert other.tokens == [None]


@pytest.mark.parametrize(
    ("old", "new", "followed"),
    [
        ("https://a/x", "https://b/y", True),
        ("http://a/x", "https://a/x", True),
        ("http://a/x", "http://b/y", True),
        ("https://a/x", "http://a/x", False),
        ("http://a/x", "ftp://a/x", False),
        ("http://a/x", "file:///etc/passwd", False),
    ],
)
def test_redirects_stay_within_http_and_never_leave_https(old: str, new: str, followed: bool) -> None:
    request = urllib.request.Request(old)
    headers = email.message.Message()
    if followed:
        moved = _Redirects().redirect_request(request, io.BytesIO(), 302, "Found", headers, new)
        assert moved is not None
        assert moved.full_url == new
    else:
        with pytest.raises(urllib.error.HTTPError) as error:
            _Redirects().redirect_request(request, io.BytesIO(), 302, "Found", headers, new)
        error.value.close()


@pytest.mark.parametrize("fault", [429, 500, 503, "cut"])
def test_a_server_that_fails_for_a_moment_is_asked_again(server: Server, fault: int | str) -> None:
    address = Address(server.address)
    want = (server.folder / FILE).read_bytes()
    server.fail = [fault, fault]
    assert address.fetch(FILE, 0, 5000) == (want[:5000], len(want))


@pytest.mark.parametrize("fault", [500, "cut"])
def test_a_server_that_keeps_failing_is_a_finding(server: Server, fault: int | str) -> None:
    server.fail = [fault] * 50
    with pytest.raises(UnreadableError) as error:
        Address(server.address).fetch(FILE, 0, 5000)
    assert error.value.finding.slug == "remote-fails"
    assert len(server.asked) == remote.TRIES


def test_a_refusal_is_not_asked_again(server: Server) -> None:
    server.fail = [403] * 9
    with pytest.raises(UnreadableError):
        Address(server.address).fetch(FILE, 0, 10)
    assert len(server.asked) == 1


def test_a_server_without_ranges_is_a_finding_and_the_file_is_not_swallowed(server: Server) -> None:
    server.fail = ["whole"]
    with pytest.raises(UnreadableError) as error:
        Address(server.address).fetch(FILE, 0, 10)
    assert error.value.finding.slug == "remote-no-ranges"


def test_a_file_that_changes_under_us_is_a_finding(server: Server) -> None:
    source = web_folder(server.address)
    server.fail = ["shrunk"]
    with pytest.raises(UnreadableError) as error, source.open(FILE) as reader:
        reader.read_into(0, memoryview(bytearray(8)))
    assert error.value.finding.slug == "remote-changed"


def test_an_address_with_nothing_has_no_weights(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert [f.slug for f in lint(web_folder(server.address)).findings] == ["no-weights"]


def test_a_dead_address_is_a_sentence_and_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.0)
    result = CliRunner().invoke(verify, ["lint", "http://127.0.0.1:9/x"])
    assert result.exit_code == 2
    assert "127.0.0.1:9" in result.output
    assert "Traceback" not in result.output


def test_one_file_at_an_address_is_a_checkpoint(server: Server) -> None:
    report = integrity(web_folder(f"{server.address}/{FILE}"))
    assert list(web_folder(f"{server.address}/{FILE}").files()) == [FILE]
    assert "no-index" in {f.slug for f in report.findings}


class TestHub:
    """`hf://org/repo@revision` through huggingface_hub, against an endpoint of our own."""

    @pytest.fixture(autouse=True)
    def _hub(self) -> None:
        pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")

    def test_a_branch_is_resolved_and_recorded(self, server: Server) -> None:
        report = integrity(hub_repository("hf://org/repo@main", server.address))
        assert _rows(report) == [("revision-resolved", "", f"main: {SHA} now")]
        assert report.exit_code == 0
        assert any(path == f"/org/repo/resolve/{SHA}/{FILE}" for path, _ in server.asked)

    def test_a_commit_is_taken_as_it_is(self, server: Server) -> None:
        assert integrity(hub_repository(f"hf://org/repo@{SHA}", server.address)).findings == []

    def test_the_hubs_sha256_are_compared_with_the_manifest_without_the_bytes(self, server: Server) -> None:
        data = bytearray((server.folder / FILE).read_bytes())
        data[-1] ^= 1
        (server.folder / FILE).write_bytes(data)
        source = hub_repository(f"hf://org/repo@{SHA}", server.address)
        report = integrity(source)
        assert [(f.slug, f.file) for f in report.findings] == [("file-digest", FILE)]
        assert "digests of files, as the place states them" in report.checked
        assert source.transferred < len(data)

    def test_a_small_file_without_a_stated_sha256_is_read(self, server: Server) -> None:
        (server.folder / "tokenizer.json").write_bytes(b"[]")
        report = integrity(hub_repository(f"hf://org/repo@{SHA}", server.address))
        assert [(f.slug, f.file) for f in report.findings] == [("file-digest", "tokenizer.json")]

    def test_an_unknown_repository_is_a_sentence(self, server: Server) -> None:
        with pytest.raises(PlaceError, match=r"the hub at http://127\.0\.0\.1:\d+ answered"):
            hub_repository("hf://org/none@main", server.address)

    def test_a_hub_that_states_no_sizes_is_a_sentence(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files of unknown size are not judged as if they were empty."""
        row = {"rfilename": FILE}
        told = {"id": "org/repo", "modelId": "org/repo", "sha": SHA, "siblings": [row], "tags": []}
        monkeypatch.setattr(web, "_model_info", lambda folder: told)
        with pytest.raises(PlaceError, match=f"states no size for {FILE}"):
            hub_repository(f"hf://org/repo@{SHA}", server.address)

    def test_a_malformed_place_is_a_sentence(self) -> None:
        with pytest.raises(PlaceError, match="write hf://org/repo@revision"):
            hub_repository("hf://repo")


def test_a_parent_may_be_remote(tmp_path: Path) -> None:
    nvfp4_parent().write(tmp_path / "p")
    mixed_child().write(tmp_path / "c")
    with serving(tmp_path / "p") as server:
        report = integrity(Folder(tmp_path / "c"), web_folder(server.address))
    assert (report.findings, "parent" in report.checked) == ([], True)
