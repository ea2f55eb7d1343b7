"""A server that never ends what it says, by whichever part of an answer, costs a bounded time and a bounded memory."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from shardmill.verify.reading import remote
from shardmill.verify.reading.remote import Address
from shardmill.verify.rules.findings import UnreadableError

Answer = Callable[[socket.socket, int], object]
CHUNK = b"x" * 65_536


def _endlessly(send: Callable[[bytes], object], piece: bytes, pause: float = 0.0) -> None:
    while True:
        send(piece)
        if pause:
            time.sleep(pause)


def _redirect_page(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 302 Found\r\nLocation: /m/other\r\n\r\n")
    _endlessly(c.sendall, CHUNK)


def _error_page(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n")
    _endlessly(c.sendall, b"10000\r\n" + CHUNK + b"\r\n")


def _interim(c: socket.socket, _: int) -> None:
    _endlessly(c.sendall, b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def _headers(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 206 Partial\r\n")
    _endlessly(c.sendall, b"X-More: y\r\n")


def _one_header(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 206 Partial\r\nX-More: ")
    _endlessly(c.sendall, CHUNK)


def _trailers(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-99/99\r\nTransfer-Encoding: chunked\r\n\r\n")
    c.sendall(b"1\r\nx\r\n0\r\n")
    _endlessly(c.sendall, b"T: " + b"t" * 1000 + b"\r\n")


def _chunk_size(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-99/99\r\nTransfer-Encoding: chunked\r\n\r\n")
    _endlessly(c.sendall, b"f" * 1000)


def _slow_status(c: socket.socket, _: int) -> None:
    _endlessly(c.sendall, b"H", 0.02)


def _slow_header(c: socket.socket, _: int) -> None:
    c.sendall(b"HTTP/1.1 206 Partial\r\nX: ")
    _endlessly(c.sendall, b"a", 0.02)


def _slow_interim(c: socket.socket, _: int) -> None:
    _endlessly(c.sendall, b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)


@contextmanager
def _serving(answer: Answer) -> Iterator[str]:
    server = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket, number: int) -> None:
        with client:
            try:
                while client.recv(65_536):
                    answer(client, number)
                    number += 1
            except OSError:
                return

    def accept() -> None:
        number = 0
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(client, number), daemon=True).start()
            number += 1

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/m"
    finally:
        server.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(remote.LIMITS, "seconds", 1.0)


@pytest.mark.parametrize(
    "answer",
    [_redirect_page, _error_page, _interim, _headers, _one_header, _trailers, _chunk_size],
    ids=lambda answer: answer.__name__.strip("_"),
)
def test_an_answer_without_end_takes_a_few_mebibytes(answer: Answer) -> None:
    with _serving(answer) as place:
        tracemalloc.start()
        try:
            with pytest.raises(UnreadableError) as error:
                Address(place).fetch("config.json", 0, 100)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert error.value.finding.slug == "remote-fails"
    assert most < 8 << 20


@pytest.mark.parametrize("answer", [_slow_status, _slow_header, _slow_interim])
def test_an_answer_that_comes_a_byte_at_a_time_ends_with_the_time_that_was_given(answer: Answer) -> None:
    with _serving(answer) as place:
        result = CliRunner().invoke(verify, ["lint", place, "--timeout", "1"])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_file_of_two_etags_is_a_file_that_changed() -> None:
    def answer(c: socket.socket, number: int) -> None:
        tag = f'ETag: "{number}"'.encode()
        c.sendall(
            b"HTTP/1.1 206 Partial\r\n" + tag + b"\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\n"
            b"Connection: close\r\n\r\nx"
        )

    with _serving(answer) as place:
        address = Address(place)
        address.fetch("config.json", 0, 1)
        with pytest.raises(UnreadableError) as error:
            address.fetch("config.json", 0, 1)
    assert error.value.finding.slug == "remote-changed"
