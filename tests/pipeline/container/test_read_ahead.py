"""A remote file by several connections: the same bytes, as many answers at a time, and no more than is asked for."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shardmill.pipeline.container import read_ahead
from shardmill.pipeline.container.read_ahead import ReadAhead
from shardmill.pipeline.errors import CheckpointError

WINDOW = 1000
DATA = random.Random(7).randbytes(64 * WINDOW + 77)


class Far(ThreadingHTTPServer):
    """Serves DATA by ranges. It holds each answer back until `together` are asked for, or nobody asks for more."""

    def __init__(self, together: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.together, self.lock = together, threading.Condition()
        self.asked: list[tuple[int, int]] = []
        self.waiting = self.most = 0
        self.etag = "one"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        far: Any = self.server
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found
        begin, last = int(found[1]), int(found[2])
        with far.lock:
            far.asked.append((begin, last + 1))
            far.waiting += 1
            far.most = max(far.most, far.waiting)
            far.lock.notify_all()
            far.lock.wait_for(lambda: far.waiting >= far.together, timeout=0.2)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{last}/{len(DATA)}")
        self.send_header("Content-Length", str(last + 1 - begin))
        self.send_header("ETag", far.etag)
        self.end_headers()
        with far.lock:
            far.waiting -= 1  # before the bytes go: who has them asks for more at once
        with suppress(ConnectionError):  # who asked may have enough of it
            self.wfile.write(DATA[begin : last + 1])

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def serving(together: int = 1) -> Iterator[Far]:
    with Far(together) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", WINDOW)


def read(file: ReadAhead, begin: int, end: int, step: int) -> bytes:
    found = bytearray()
    for offset in range(begin, end, step):
        part = bytearray(min(step, end - offset))
        file.read_into(memoryview(part), offset)
        found += part
    return bytes(found)


def test_several_ranges_are_asked_for_at_a_time() -> None:
    """A file that is read from end to end has as many requests on the way as there are connections, and no more."""
    with serving(together=4) as far:
        file = ReadAhead(far.address, len(DATA), connections=4)
        assert read(file, 0, len(DATA), 300) == DATA
        file.close()
        assert far.most == 4


@pytest.mark.parametrize("connections", [1, 3])
def test_two_places_read_in_turn(connections: int) -> None:
    """Codes and their scales, in turn: each goes on where it was, and no window is asked for twice."""
    with serving() as far:
        file = ReadAhead(far.address, len(DATA), connections)
        one, other = bytearray(), bytearray()
        for place in range(0, 20 * WINDOW, 250):
            one += read(file, place, place + 250, 250)
            other += read(file, 40 * WINDOW + place // 10, 40 * WINDOW + place // 10 + 25, 25)
        file.close()
        assert (bytes(one), bytes(other)) == (DATA[: 20 * WINDOW], DATA[40 * WINDOW : 42 * WINDOW])
        ahead = [each for each in far.asked if each[0] % WINDOW == 0 and each[1] - each[0] == WINDOW]
        assert connections == 1 or len(ahead) == len(set(ahead)) > 15


def test_a_look_at_a_few_bytes_asks_for_nothing_ahead() -> None:
    """Reads that do not follow one another start no connection beside their own."""
    with serving() as far:
        file = ReadAhead(far.address, len(DATA), connections=8)
        for place in (5000, 100, 40_000, 7):
            assert read(file, place, place + 50, 50) == DATA[place : place + 50]
        file.close()
        assert far.most <= 2  # an answer that is closed may still be on its way
        assert len(far.asked) <= 4


def test_a_file_that_changes_between_two_windows_is_refused() -> None:
    with serving() as far:
        file = ReadAhead(far.address, len(DATA), connections=2)
        read(file, 0, 2 * WINDOW, 500)
        far.etag = "two"
        with pytest.raises(CheckpointError, match="it changed while it was read"):
            read(file, 2 * WINDOW, len(DATA), 500)
        file.close()
