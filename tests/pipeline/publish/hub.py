"""A hub on loopback that speaks the calls of huggingface_hub's commits: create, list, preupload, LFS, copy, commit.
It gives ranges of files.

Everything is in memory. It refuses what a hub refuses: a commit that names bytes nobody sent, a parent commit that is
not the head, bytes with another sha256. Faults are asked for by call; `kill_at` kills the client at a call, before
the call is carried out or after. Xet's own storage protocol is not spoken (its client is closed to a stand-in): files
travel as LFS objects, basic or in parts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = 3  # entries of a listing's page, so that every listing has several


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file of a commit. A large one is known by its sha256; without `xet` it can't go to another repository."""

    data: bytes  # or a mapped file
    large: bool
    xet: bool = True

    @classmethod
    def known(cls, data: bytes, digest: str) -> Entry:
        """A large file whose sha256 needs no computing."""
        entry = cls(data, True)
        entry.__dict__["sha256"] = digest
        return entry

    @cached_property
    def sha256(self) -> str:
        return sha256(self.data)

    def listed(self, path: str) -> dict[str, Any]:
        pointer = b"version https://git-lfs.github.com/spec/v1\n" + self.sha256.encode()
        stored = pointer if self.large else self.data
        oid = hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()
        row: dict[str, Any] = {"type": "file", "path": path, "oid": oid, "size": len(self.data)}
        if self.large:
            row["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}
            row |= {"xetHash": "x" + self.sha256} if self.xet else {}
        return row


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS storage: sha256 -> bytes

    def commit(self, branch: str, files: dict[str, Entry], message: str) -> str:
        self.messages.append(message)
        commit = hashlib.sha1(f"{branch}{len(self.messages)}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        self.objects |= {entry.sha256: entry.data for entry in files.values() if entry.large}
        return commit

    def at(self, revision: str) -> dict[str, Entry] | None:
        return self.commits.get(self.branches.get(revision, revision))

    def head(self, branch: str = "main") -> dict[str, bytes]:
        return {path: entry.data for path, entry in (self.at(branch) or {}).items()}


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # sha256 -> how often it arrived whole
    sent_bytes: int = 0  # of whole objects, and of files that commits carried
    fail: list[tuple[str, int | str]] = field(default_factory=list)  # (call, a status, "cut" or "lost")
    wait_seconds: int = 0  # that a failure asks for
    part_bytes: int = 0  # where not 0, objects are sent in parts of so many bytes
    serves: dict[str, bytes] = field(
        default_factory=dict
    )  # sha256 -> other bytes, given in place of the true ones
    regions_differ: bool = False
    kill_at: tuple[int, str] | None = None  # number of the call, "before" or "after"
    victim: int = 0
    address: str = ""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def add(self, name: str, files: dict[str, bytes], xet: bool = True, private: bool = False) -> Repository:
        repository = self.repositories[name] = Repository(private)
        entries = {path: Entry(data, path.endswith(".safetensors"), xet) for path, data in files.items()}
        repository.commit("main", entries, "first")
        return repository


Answer = tuple[int, Any, dict[str, str]]
_NOT_FOUND: Answer = (404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})


def _create(hub: Hub, path: str, body: Any) -> Answer:
    name = f"{body['organization']}/{body['name']}"
    if name in hub.repositories:
        url = f"{hub.address}/{name}"
        return (409, {"error": "You already created this model repo", "url": url}, {})
    private = body.get("visibility") == "private" or bool(body.get("private"))
    hub.repositories[name] = Repository(private)
    hub.repositories[name].commit("main", {".gitattributes": Entry(b"*.safetensors\n", False)}, "initial")
    return (200, {"url": f"{hub.address}/{name}", "name": name}, {})


def _info(repository: Repository, name: str, rest: str) -> Answer:
    revision = rest.removeprefix("/revision/") or "main"
    commit = repository.branches.get(revision, revision)
    if commit not in repository.commits:
        return (404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
    siblings = [_sibling(path, entry) for path, entry in repository.commits[commit].items()]
    facts = {"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
    return (200, facts, {})


def _sibling(path: str, entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"rfilename": path, "size": len(entry.data)}
    large = {"sha256": entry.sha256, "size": len(entry.data), "pointerSize": 134}
    return row | ({"lfs": large} if entry.large else {})


def _tree(hub: Hub, repository: Repository, name: str, revision: str, cursor: int) -> Answer:
    files = repository.at(revision)
    if files is None:
        return (404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
    rows = [entry.listed(path) for path, entry in sorted(files.items())]
    headers = {}
    if cursor + PAGE < len(rows):
        url = f"{hub.address}/api/models/{name}/tree/{revision}?recursive=true&cursor={cursor + PAGE}"
        headers["Link"] = f'<{url}>; rel="next"'
    return (200, rows[cursor : cursor + PAGE], headers)


def _preupload(repository: Repository, revision: str, body: Any) -> Answer:
    files = repository.at(revision) or {}
    rows = []
    for each in body["files"]:
        path = each["path"]
        large = path.endswith(".safetensors")
        held = files.get(path)
        oid = (held.sha256 if large else held.listed(path)["oid"]) if held else None
        rows.append(
            {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
        )
    return (200, {"files": rows}, {})


def _batch(hub: Hub, repository: Repository, name: str, body: Any) -> Answer:
    rows = []
    for each in body["objects"]:
        oid, size = each["oid"], each["size"]
        row: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in repository.objects:
            upload: dict[str, Any] = {"href": f"{hub.address}/upload/{name}/{oid}?signed=secret"}
            if hub.part_bytes and size > hub.part_bytes:
                count = -(-size // hub.part_bytes)
                urls = {f"{n}": f"{hub.address}/part/{name}/{oid}/{n}" for n in range(1, count + 1)}
                upload = {
                    "href": f"{hub.address}/complete/{name}/{oid}",
                    "header": {"chunk_size": str(hub.part_bytes), **urls},
                }
            row["actions"] = {"upload": upload, "verify": {"href": f"{hub.address}/verify/{name}/{oid}"}}
        rows.append(row)
    return (200, {"transfer": "basic", "objects": rows}, {})


def _store(hub: Hub, repository: Repository, oid: str, data: bytes) -> Answer:
    if sha256(data) != oid:
        return (400, {"error": f"the bytes are not those of {oid}"}, {})
    hub.sent[oid] = hub.sent.get(oid, 0) + 1
    hub.sent_bytes += len(data)
    repository.objects[oid] = data
    return (200, {}, {})


def _duplicate(hub: Hub, source: Repository, body: Any) -> Answer:
    target = hub.repositories[body["target"]["name"]]
    failed = []
    for each in body["files"]:
        if hub.regions_differ or each["xetHash"] != "x" + each["sha256"]:
            failed.append({"sha256": each["sha256"], "error": "the repositories are in two storage regions"})
        else:
            target.objects[each["sha256"]] = source.objects[each["sha256"]]
    return (200, {"failed": failed}, {})


def _commit(hub: Hub, repository: Repository, name: str, branch: str, body: list[Any]) -> Answer:
    header = body[0]["value"]
    head = repository.branches.get(branch)
    if header.get("parentCommit") not in (None, head):
        return (412, {"error": "A commit has happened since. Please refresh and try again."}, {})
    files = dict(repository.at(branch) or {})
    for each in body[1:]:
        value, path = each["value"], each["value"]["path"]
        if each["key"] == "deletedFile":
            del files[path]
        elif each["key"] == "file":
            data = base64.b64decode(value["content"])
            hub.sent_bytes += len(data)
            files[path] = Entry(data, False)
        elif value["oid"] not in repository.objects:
            return (400, {"error": f"{path}: no bytes for {value['oid']}"}, {})
        else:
            files[path] = Entry.known(repository.objects[value["oid"]], value["oid"])
    commit = repository.commit(branch, files, header["summary"])
    return (200, {"commitUrl": f"{hub.address}/{name}/commit/{commit}", "commitOid": commit}, {})


def _paths(repository: Repository, revision: str, paths: list[str]) -> Answer:
    files = repository.at(revision) or {}
    return (200, [files[path].listed(path) for path in paths if path in files], {})


def answer(hub: Hub, method: str, url: str, raw: bytes) -> Answer:
    """What the hub says to a call; its state moves with it."""
    parts = urllib.parse.urlsplit(url)
    path, query = parts.path, urllib.parse.parse_qs(parts.query)
    if path == "/api/repos/create":
        return _create(hub, path, json.loads(raw))
    if path == "/api/validate-yaml":
        return (200, {"errors": [], "warnings": []}, {})
    if match := re.fullmatch(r"/(upload|part|complete|verify)/([^/]+/[^/]+)/(\w+)(?:/(\d+))?", path):
        return _storage(hub, match, raw)
    if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        found = (hub.repositories[match[1]].at(match[2]) or {}).get(urllib.parse.unquote(match[3]))
        return (206, hub.serves.get(found.sha256, found.data), {}) if found else _NOT_FOUND
    if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
        repository = hub.repositories.get(match[1])
        return _batch(hub, repository, match[1], json.loads(raw)) if repository else _NOT_FOUND
    match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
    repository = hub.repositories.get(match[1]) if match else None
    if match is None or repository is None:
        return _NOT_FOUND
    name, rest = match[1], match[2] or ""
    kind, _, last = rest.removeprefix("/").partition("/")
    last = urllib.parse.unquote(last)
    if kind == "tree":
        return _tree(hub, repository, name, last, int(query.get("cursor", ["0"])[0]))
    if kind == "preupload":
        return _preupload(repository, last, json.loads(raw))
    if kind == "commit":
        return _commit(hub, repository, name, last, [json.loads(line) for line in raw.splitlines()])
    if kind == "paths-info":
        return _paths(repository, last, urllib.parse.parse_qs(raw.decode())["paths"])
    if kind == "branch":
        repository.branches.setdefault(last, repository.branches["main"])
        return (200, {}, {})
    if rest == "/lfs-files/duplicate":
        return _duplicate(hub, repository, json.loads(raw))
    return _info(repository, name, rest)


def _storage(hub: Hub, match: re.Match[str], raw: bytes) -> Answer:
    kind, name, oid, number = match.groups()
    repository = hub.repositories[name]
    if kind == "upload":
        return _store(hub, repository, oid, raw)
    if kind == "part":
        hub.parts.setdefault(oid, {})[int(number)] = raw
        return (200, {}, {"etag": sha256(raw)[:8]})
    if kind == "complete":
        pieces = hub.parts.pop(oid)
        return _store(hub, repository, oid, b"".join(pieces[n] for n in sorted(pieces)))
    return (200, {}, {}) if oid in repository.objects else (404, {"error": "not uploaded"}, {})


def call_name(method: str, url: str) -> str:
    """`upload`, `batch`, `commit`, ...: what a call is called in `Hub.calls` and `Hub.fail`."""
    path = urllib.parse.urlsplit(url).path
    for word in ("create", "validate-yaml", "batch", "tree", "preupload", "commit", "paths-info", "branch"):
        if f"/{word}" in path:
            return word
    if "/lfs-files/duplicate" in path:
        return "duplicate"
    if "/resolve/" in path:
        return "resolve"
    first = path.split("/")[1]
    return first if first in ("upload", "part", "complete", "verify") else "info"


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = (
            -1
        )  # an answer in one packet: in two, the second waits 40 ms for the first to be acknowledged
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            return None

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_PUT(self) -> None:
            self._serve()

        def _serve(self) -> None:
            with hub.lock:
                name = call_name(self.command, self.path)
                number = len(hub.calls)
                hub.calls.append(name)
                fault = next((each for each in hub.fail if each[0] == name), None)
                if fault is not None:
                    hub.fail.remove(fault)
                how = fault[1] if fault else None
                if how == "cut" or hub.kill_at == (number, "before"):
                    return self._break()
            raw = self._body()
            if isinstance(how, int):
                return self._send(
                    how, {"error": f"asked to fail with {how}"}, {"Retry-After": str(hub.wait_seconds)}
                )
            with hub.lock:
                status, body, headers = answer(hub, self.command, self.path, raw)
                if how == "lost" or hub.kill_at == (number, "after"):
                    return self._break()
            return self._send(status, body, headers)

        def _break(self) -> None:
            if hub.victim and hub.kill_at is not None:
                os.kill(hub.victim, signal.SIGKILL)
            self.close_connection = True
            self.connection.close()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def _send(self, status: int, body: Any, headers: dict[str, str]) -> None:
            if not isinstance(body, dict | list):  # a file, of which a range is asked for
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                headers = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
                data = body[first : last + 1]
            else:
                data = json.dumps(body).encode()
            self.send_response(status)
            for key, value in {**headers, "Content-Type": "application/json"}.items():
                self.send_header(key, value)
            if status >= 400 and isinstance(body, dict) and "error" in body:
                self.send_header("X-Error-Message", body["error"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that was killed, or whose connection was interrupted, is what is tested."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    http = _Quiet(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
