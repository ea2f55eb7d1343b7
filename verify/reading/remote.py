"""Checkpoints behind an address: headers and sampled ranges by HTTP range requests, never a whole repository.

A server that fails for a moment (429, 5xx, a broken connection) is asked again, a few times; one that ignores ranges or
whose file changes under us is a finding. Credentials never follow a redirect to another host, and no redirect leads to
another host within this network. All requests of a place share one limit of time, and one of time lost by waiting.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

from shardmill.verify.reading.limits import LIMITS
from shardmill.verify.rules.findings import Finding, UnreadableError

TRIES = 5
BACKOFF_SECONDS = 0.5  # doubled at each try
WAIT_SECONDS_MAX = 30.0
TIMEOUT_SECONDS = 30.0
REDIRECTS_MAX = 5
REQUEST_SECONDS = 20.0  # of one answer, and a second more for each BYTES_A_SECOND that came
BYTES_A_SECOND = 16 << 10
PIECE_BYTES = 1 << 20
LOST_SHARE = 20  # of the whole limit, one part in so many may be lost by failures and waiting
AGAIN = frozenset((408, 429, 500, 502, 503, 504))

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})$")


def is_private(host: str) -> bool:
    """Whether a host's name leads to this machine or this network. A name without an address leads nowhere."""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    addresses = (ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found)
    return any(not address.is_global or address.is_multicast for address in addresses)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects within http(s), never from https down to http, without credentials to another host."""

    max_redirections = REDIRECTS_MAX

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise urllib.error.HTTPError(newurl, code, f"a redirect to {new.scheme}", headers, fp)
        if new.hostname != old.hostname and not LIMITS.private and is_private(new.hostname or ""):
            said = "a redirect to a private host; --allow-private follows it"
            raise urllib.error.HTTPError(newurl, code, said, headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and old.netloc != new.netloc:
            request.remove_header("Authorization")
        return request


_opener = urllib.request.build_opener(_Redirects)


class Address:
    """One base address; counts what was transferred."""

    def __init__(self, base: str, headers: Mapping[str, str] | None = None) -> None:
        self.base = base if base.endswith("/") else f"{base}/"
        self._headers = dict(headers or {})
        self._lock = threading.Lock()
        self._kept: dict[str, bytes] = {}
        self.transferred = 0
        self._begun, self._lost = time.monotonic(), 0.0

    def _left(self) -> float:
        return LIMITS.seconds - (time.monotonic() - self._begun)

    def url(self, file: str) -> str:
        return self.base + urllib.parse.quote(file)

    def size(self, file: str) -> int | None:
        """Bytes of a file, or None if there is no such file. Raises UnreadableError."""
        try:
            return self.fetch(file, 0, 1)[1]
        except UnreadableError as error:
            if error.finding.got in ("HTTP 404", "HTTP 410"):
                return None
            if error.finding.got == "HTTP 416":  # there is no byte 0
                return 0
            raise

    def keep(self, file: str, size: int) -> bytes:
        """A whole small file, kept so that it is transferred once."""
        self._kept[file] = self.fetch(file, 0, size)[0]
        return self._kept[file]

    def fetch(self, file: str, begin: int, end: int) -> tuple[bytes, int]:
        """(bytes [begin, end) of a file or as far as it goes, its size). Raises UnreadableError."""
        if file in self._kept:
            return self._kept[file][begin:end], len(self._kept[file])
        got = b""
        wait = BACKOFF_SECONDS
        last: Finding | None = None
        for attempt in range(TRIES):
            if attempt:
                patience = LIMITS.seconds / LOST_SHARE - self._lost
                if patience <= 0:
                    break
                pause = min(wait, WAIT_SECONDS_MAX, patience, max(self._left(), 0))
                time.sleep(pause)
                self._lost += pause
                wait *= 2
            if self._left() <= 0:
                said = f"nothing more within {LIMITS.seconds:g} seconds; --timeout allows more"
                raise UnreadableError(Finding("remote-fails", file, "", "an answer", said))
            begun = time.monotonic()
            try:
                piece, size = self._ask(file, begin + len(got), end)
            except urllib.error.HTTPError as error:
                self._lost += time.monotonic() - begun
                said = (
                    error.reason
                    if isinstance(error.reason, str) and error.reason.startswith("a redirect")
                    else ""
                )
                last = Finding("remote-fails", file, "", "an answer", said or f"HTTP {error.code}")
                if said or error.code not in AGAIN:
                    break
                wait = max(wait, _retry_after(error.headers.get("Retry-After")))
                continue
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._lost += time.monotonic() - begun
                last = Finding(
                    "remote-fails", file, "", "an answer", f"{type(error).__name__}: {error}"[:120]
                )
                continue
            got += piece
            if len(got) >= min(end, size) - begin:
                return got, size
            last = Finding(
                "remote-fails", file, "", f"{end - begin:,} bytes", f"{len(got):,} bytes, then a cut"
            )
        assert last is not None
        raise UnreadableError(last)

    def _ask(self, file: str, begin: int, end: int) -> tuple[bytes, int]:
        request = urllib.request.Request(self.url(file), headers=self._headers)
        request.add_header("Range", f"bytes={begin}-{end - 1}")
        request.add_header("Accept-Encoding", "identity")
        with _opener.open(request, timeout=max(min(TIMEOUT_SECONDS, self._left()), 0.1)) as response:
            if response.status != 206:
                got = f"HTTP {response.status} with the whole file"
                raise UnreadableError(
                    Finding("remote-no-ranges", file, "", "206 and the range asked for", got)
                )
            match = _CONTENT_RANGE.match(response.headers.get("Content-Range") or "")
            if match is None or int(match[1]) != begin or int(match[2]) >= end:
                said = str(response.headers.get("Content-Range"))
                expected = f"bytes {begin}-{end - 1}"
                raise UnreadableError(Finding("remote-no-ranges", file, "", expected, said[:80]))
            data = self._body(response, int(match[2]) - begin + 1)
        with self._lock:
            self.transferred += len(data)
        return data, int(match[3])

    def _body(self, response: http.client.HTTPResponse, count: int) -> bytes:
        """Up to `count` bytes, as they come. Raises TimeoutError for a server that gives them too slowly."""
        begun, pieces, got = time.monotonic(), [], 0
        while got < count:
            try:
                piece = response.read1(min(count - got, PIECE_BYTES))
            except http.client.IncompleteRead as error:
                piece = error.partial
            if not piece:
                break
            pieces.append(piece)
            got += len(piece)
            if time.monotonic() - begun > REQUEST_SECONDS + got / BYTES_A_SECOND or self._left() <= 0:
                raise TimeoutError(f"{got:,} bytes of {count:,} in {time.monotonic() - begun:.0f} seconds")
        return b"".join(pieces)


def _retry_after(value: str | None) -> float:
    return float(value) if value is not None and value.isdigit() else 0.0


class RemoteReader:
    """One file behind an address, of a size that must not change."""

    def __init__(self, address: Address, file: str, size: int) -> None:
        self._address, self._file, self._size = address, file, size

    def read_into(self, begin: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        data, size = self._address.fetch(self._file, begin, begin + len(buffer))
        if size != self._size:
            got = f"{size:,} bytes now"
            raise UnreadableError(Finding("remote-changed", self._file, "", f"{self._size:,} bytes", got))
        if len(data) < len(buffer):
            expected, there = f"{begin + len(buffer):,} bytes", f"{begin + len(data):,} bytes"
            raise UnreadableError(Finding("truncated-file", self._file, "", expected, there))
        buffer[:] = data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
