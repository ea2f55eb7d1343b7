"""An HTTP answer of bounded bytes and time, whatever part of it the server makes long.

http.client bounds a header's lines, and not interim answers (100), trailers, nor how slowly a line comes. Here every
byte of an answer is counted as it is read, and the clock is looked at, by the one reader that all of them pass.
"""

from __future__ import annotations

import http.client
import io
import threading
import time
import urllib.request
from typing import Any

BESIDE_THE_BODY = 256 << 10  # bytes of status, headers, chunk sizes and trailers
CHUNKED_SHARE = 4  # chunk sizes may take a quarter of the body more


class _Bounds(threading.local):
    """Of the exchange that this thread makes; redirects are part of it."""

    bytes_max = BESIDE_THE_BODY
    until = float("inf")


_BOUNDS = _Bounds()


def allow(body_bytes: int, until: float) -> None:
    """Bounds of this thread's next exchange: bytes of the body that is asked for, and `time.monotonic()` at its end."""
    _BOUNDS.bytes_max = body_bytes + body_bytes // CHUNKED_SHARE + BESIDE_THE_BODY
    _BOUNDS.until = until


class _Counted(io.RawIOBase):
    """A socket's bytes until there are too many of them, or it is too late."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._left, self._until = raw, _BOUNDS.bytes_max, _BOUNDS.until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        got = int(self._raw.readinto(buffer) or 0)
        self._left -= got
        if self._left < 0:
            raise ValueError("more bytes than such an answer has")
        if time.monotonic() > self._until:
            raise TimeoutError("the answer comes too slowly")
        return got

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp: Any = io.BufferedReader(_Counted(self.fp.detach()))


class _Plain(http.client.HTTPConnection):
    response_class = _Answer


class _Secure(http.client.HTTPSConnection):
    response_class = _Answer


class OpensPlain(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Plain, req)


class OpensSecure(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Secure, req)
