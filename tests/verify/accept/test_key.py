"""The API key goes to the scheme, host and port that the user named, and to nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from shardmill.verify.accept.client import Client, UnreachableError
from shardmill.verify.accept.commands import accept

KEY = "sk-not-for-others"


@dataclass
class Seen:
    """A server's address, and the requests that reached it."""

    url: str = ""
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def server(code: int = 200, location: str = "", reason: str | None = None) -> Iterator[Seen]:
    """A server that answers everything with one status; `{url}` in the location is its own address."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            seen.keys.append(self.headers.get("authorization"))
            self.send_response(code, reason)
            if location:
                self.send_header("location", location.format(url=seen.url))
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            self.do_GET()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def client(url: str) -> Client:
    return Client(url, timeout=5.0, key=KEY, wait=lambda attempt: 0.0)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_redirect_is_a_failure_that_names_its_target_and_is_not_followed(code, host):
    """Another port of the same host is another server as much as another name."""
    with server() as other:
        place = other.url.replace("127.0.0.1", host) + "/v1/models"
        with server(code, place) as named:
            with pytest.raises(UnreachableError, match=rf"{code}: redirects to http://{host}.*not followed"):
                client(named.url).get("/v1/models")
            reply = client(named.url).ask("/v1/completions", {"prompt": [1]})
    assert (reply.failure, reply.attempts) == ("http 3xx", 1)
    assert place in reply.detail
    assert named.keys == [f"Bearer {KEY}"] * 2
    assert other.keys == []


def test_not_even_a_redirect_to_the_server_itself_is_followed():
    with server(302, "{url}/elsewhere") as named:
        assert client(named.url).get_or_none("/metrics") is None
    assert len(named.keys) == 1


def test_a_proxy_for_plain_http_never_sees_the_key(monkeypatch):
    with server() as proxy, server() as named:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert client(named.url).get("/version") == "{}"
    assert (proxy.keys, named.keys) == ([], [f"Bearer {KEY}"])


def test_without_a_key_none_is_sent():
    with server() as named:
        Client(named.url).get("/version")
    assert named.keys == [None]


def test_a_client_does_not_show_its_key():
    assert KEY not in repr(client("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    "words", [["freeze", "-o", "x.json"], ["record", "-o", "x", "--protocol", "neutral", "--tokens", "none"]]
)
def test_a_server_that_redirects_is_a_question_that_could_not_be_asked(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("{}")
    with server() as other, server(307, other.url) as named:
        result = CliRunner().invoke(accept, [words[0], named.url, *words[1:]], env={"OPENAI_API_KEY": KEY})
    assert result.exit_code == 2
    assert other.keys == []
    assert KEY not in result.output


def test_a_servers_words_reach_the_terminal_without_escapes(tmp_path):
    with server(302, "http://x/\x1b[2J") as named:
        result = CliRunner().invoke(accept, ["freeze", named.url, "-o", str(tmp_path / "t.json")])
    assert result.exit_code == 2
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "http://u:p@h", "http://h:99999", "http://h\n", "http://h?x=1", "h:8000"]
)
def test_an_address_that_is_none_is_refused_with_exit_code_2(url, tmp_path):
    result = CliRunner().invoke(accept, ["freeze", url, "-o", str(tmp_path / "t.json")])
    assert result.exit_code == 2
    assert "give the server's address" in result.output


def test_a_key_that_is_no_header_is_refused(tmp_path):
    words = ["freeze", "http://127.0.0.1:9", "-o", str(tmp_path / "t.json"), "--key", "a\nb: c"]
    result = CliRunner().invoke(accept, words)
    assert (result.exit_code, "an API key is printable ASCII" in result.output) == (2, True)
