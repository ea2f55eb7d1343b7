"""A real HTTP server of a folder, with ranges, redirects and misbehaviour on demand; and a small hub on top of it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Server:
    """`fail` holds answers to give before the true ones: a status code, "cut", "whole" or "shrunk"."""

    folder: Path
    fail: list[int | str] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range)
    tokens: list[str | None] = field(default_factory=list)
    redirect_to: str = ""
    address: str = ""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return None

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            server.asked.append((path, self.headers.get("Range")))
            server.tokens.append(self.headers.get("Authorization"))
            if path.startswith("/api/models/org/repo"):
                return self._send(200, json.dumps(_model_info(server.folder)).encode(), {}, with_body)
            if path.startswith("/moved/"):
                target = f"{server.redirect_to or server.address}/{path.removeprefix('/moved/')}"
                return self._send(302, b"", {"Location": target}, with_body)
            file = server.folder / path.removeprefix("/").removeprefix(f"org/repo/resolve/{SHA}/")
            if not file.is_file():
                return self._send(404, b"", {}, with_body)
            return self._file(file, with_body)

        def _file(self, file: Path, with_body: bool) -> None:
            fault = server.fail.pop(0) if server.fail else None
            size = file.stat().st_size - (fault == "shrunk")
            if isinstance(fault, int):
                return self._send(fault, b"", {"Retry-After": "0"}, with_body)
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if match is None or fault == "whole":
                return self._send(200, file.read_bytes(), {}, with_body)
            begin, end = int(match[1]), min(int(match[2]) + 1, size)
            if begin >= size:
                return self._send(416, b"", {"Content-Range": f"bytes */{size}"}, with_body)
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
            with file.open("rb") as opened:
                opened.seek(begin)
                piece = opened.read(end - begin)
            if fault == "cut":
                self.close_connection = True
                return self._send(206, piece[: len(piece) // 2], headers, with_body, len(piece))
            return self._send(206, piece, headers, with_body)

        def _send(
            self, code: int, body: bytes, headers: dict[str, str], with_body: bool, length: int | None = None
        ) -> None:
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Handler


def _model_info(folder: Path) -> dict[str, Any]:
    siblings = []
    for path in sorted(folder.iterdir()):
        row: dict[str, Any] = {"rfilename": path.name, "size": path.stat().st_size, "blobId": "0" * 40}
        if path.suffix == ".safetensors":
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            row["lfs"] = {"sha256": sha256, "size": path.stat().st_size, "pointerSize": 134}
        siblings.append(row)
    return {"id": "org/repo", "modelId": "org/repo", "sha": SHA, "siblings": siblings, "tags": []}


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    http.daemon_threads = True
    server.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
