"""A remote file read by several connections at a time: what is read in a row is asked for ahead, in windows.

One connection seldom fills a line, and each answer begins with a wait. A read that follows no other is asked for as it
is, so that a look at a few tensors fetches no more than these.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from shardmill.pipeline.container.ranges import RemoteFile
from shardmill.pipeline.errors import CheckpointError

CONNECTIONS = 8
WINDOW_BYTES = 4 << 20  # what one request asks for ahead
_STREAMS_MAX = 8  # places in a file that are read on from, as codes and their scales are in turn


class ReadAhead:
    """A remote file of `size` bytes, read at offsets. Each answer is checked as RemoteFile checks it."""

    def __init__(self, url: str, size: int, connections: int = CONNECTIONS) -> None:
        self.url, self.size, self.connections = url, size, connections
        self._alone = RemoteFile(url, size)
        self._pool: ThreadPoolExecutor | None = None
        self._windows: dict[int, Future[tuple[bytearray, str | None]]] = {}  # the one used last is the last
        self._read: dict[int, int] = {}  # where a stream goes on -> bytes that it has had

    def close(self) -> None:
        self._alone.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._windows = None, {}

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes at `offset`. Raises CheckpointError after several tries."""
        had = self._read.pop(offset, 0)
        self._read[offset + len(target)] = had + len(target)
        if len(self._read) > _STREAMS_MAX:
            del self._read[next(iter(self._read))]
        if self.connections < 2 or had < WINDOW_BYTES:
            self._alone.read_into(target, offset)
            return
        if had - len(target) < WINDOW_BYTES:
            self._alone.close()  # the stream leaves it
        done = 0
        while done < len(target):
            begin = (offset + done) // WINDOW_BYTES * WINDOW_BYTES
            self._ask(begin, had // WINDOW_BYTES)
            data = self._answer(begin)
            part = memoryview(data)[offset + done - begin :][: len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            if offset + done == begin + len(data):
                del self._windows[begin]  # read to its end

    def _ask(self, begin: int, ahead: int) -> None:
        """Asks for the window at `begin` and up to `ahead` that follow: more, the longer the stream has been read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.connections)
        last = min(begin + min(1 + ahead, self.connections) * WINDOW_BYTES, self.size)
        for place in range(begin, last, WINDOW_BYTES):
            if place not in self._windows:
                self._windows[place] = self._pool.submit(self._fetch, place)
        self._windows[begin] = self._windows.pop(begin)
        for place in list(self._windows)[: max(0, len(self._windows) - 2 * self.connections)]:
            del self._windows[place]  # the one used longest ago

    def _fetch(self, begin: int) -> tuple[bytearray, str | None]:
        end = min(begin + WINDOW_BYTES, self.size)
        data = bytearray(end - begin)
        with RemoteFile(self.url, self.size, end) as file:
            file.read_into(memoryview(data), begin)
            return data, file.etag

    def _answer(self, begin: int) -> bytearray:
        data, etag = self._windows[begin].result()
        if self._alone.etag not in (None, etag):
            raise CheckpointError(
                f"{self.url}: the file has the ETag {etag} and had {self._alone.etag}: it changed while it was read; "
                f"build again to go on"
            )
        return data
