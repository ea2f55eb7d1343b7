"""How long a hub's parent takes by 1, 2, 4, 8 connections, from a server that holds each answer back for 30 ms.

    python -m bench.connections [--megabytes 256] [--delay 0.03] [--mbps 200]

The server is on this machine and sends each answer at `--mbps` megabits a second, as one connection of a far hub does.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shardmill.pipeline.container.files import CHUNK_BYTES
from shardmill.pipeline.container.read_ahead import ReadAhead

_SENT_BYTES = 1 << 18


class _Far(ThreadingHTTPServer):
    def __init__(self, size: int, delay: float, mbps: float) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.size, self.delay, self.pause = size, delay, 8 * _SENT_BYTES / (1e6 * mbps)
        self.asked = 0


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        far: Any = self.server
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        assert found, self.headers
        begin, end = int(found[1]), int(found[2]) + 1
        far.asked += 1
        time.sleep(far.delay)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{far.size}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        with suppress(ConnectionError):  # the reader may have enough
            for place in range(begin, end, _SENT_BYTES):
                self.wfile.write(bytes(min(_SENT_BYTES, end - place)))
                time.sleep(far.pause)

    def log_message(self, *words: object) -> None:
        pass


def seconds(far: _Far, connections: int) -> float:
    """How long a pass over the file takes."""
    file, buffer = (
        ReadAhead(f"http://127.0.0.1:{far.server_port}/x", far.size, connections),
        bytearray(CHUNK_BYTES),
    )
    began = time.monotonic()
    for offset in range(0, far.size, CHUNK_BYTES):
        file.read_into(memoryview(buffer)[: far.size - offset], offset)
    took = time.monotonic() - began
    file.close()
    return took


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--megabytes", type=int, default=256)
    arguments.add_argument("--delay", type=float, default=0.03, help="seconds before each answer")
    arguments.add_argument("--mbps", type=float, default=200.0, help="megabits a second of one answer")
    given = arguments.parse_args()
    with _Far(given.megabytes << 20, given.delay, given.mbps) as far:
        threading.Thread(target=far.serve_forever, daemon=True).start()
        print(
            f"{given.megabytes} MiB, {1000 * given.delay:.0f} ms an answer, {given.mbps:.0f} Mbit/s a connection"
        )
        print("| connections | seconds | MB/s | requests |\n|---:|---:|---:|---:|")
        for connections in (1, 2, 4, 8, 16):
            far.asked = 0
            took = seconds(far, connections)
            print(f"| {connections} | {took:.2f} | {far.size / took / 1e6:.0f} | {far.asked} |")
        far.shutdown()


if __name__ == "__main__":
    main()
