"""One exchange over HTTP within a time: a server that sends a byte now and then does not keep the client.

A socket's timeout is of each read. Here the whole exchange has one: when it is over, the socket is shut down, and
what was being read ends.
"""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from types import TracebackType
from typing import Any, Self


class Deadline:
    """The seconds of one exchange. Used as a context; `handlers` are those of the opener that makes the exchange."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._expire)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def handlers(self) -> tuple[urllib.request.BaseHandler, ...]:
        deadline = self

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                deadline.watch(self.sock)

        class Secure(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                deadline.watch(self.sock)

        class OpensPlain(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Plain, req)

        class OpensSecure(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Secure, req)

        return OpensPlain(), OpensSecure()

    def watch(self, sock: socket.socket) -> None:
        """Shut this socket down at the deadline, or now where that is over."""
        with self._lock:
            self._sockets.append(sock)
            if self.expired:
                _shut(sock)

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            for sock in self._sockets:
                _shut(sock)


def _shut(sock: socket.socket) -> None:
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS: the reading thread sees the end
    except OSError:  # it is closed already
        return
