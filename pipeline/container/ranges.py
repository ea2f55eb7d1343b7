"""A remote file, read by ranges over HTTP: one request while reading goes on, taken up again where it broke."""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException, HTTPResponse
from time import sleep
from typing import Any

from shardmill.pipeline.errors import CheckpointError

WINDOW_BYTES = (
    64 << 20
)  # one request asks for so much, which a connection that is kept alive serves in one go
_SKIPPED_BYTES_MAX = 1 << 20  # a gap that is read and thrown away rather than asked around
_TRIES = 5


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows a hub to where it keeps its files, but hands the token to no other host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if (
            found is not None
            and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc
        ):
            found.remove_header("Authorization")
        return found


_opener = urllib.request.build_opener(_Redirect)


class RemoteFile:
    """A remote file of `size` bytes, read at offsets. Reading on where the last read ended costs no new request."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        self._answer: HTTPResponse | None = None
        self._at = self._end = 0  # the open answer's next byte, and where it ends

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes at `offset`. Raises CheckpointError after several tries."""
        done, failures = 0, 0
        while done < len(target):
            try:
                done += self._some(target[done:], offset + done)
                failures = 0
            except (OSError, HTTPException) as error:
                self.close()
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                failures += 1
                if failures == _TRIES or _is_final(error):
                    raise CheckpointError(
                        f"{self.url}: byte {offset + done} cannot be fetched: {error}; build again to go on"
                    ) from None
                sleep(0.2 * 2**failures)

    def _some(self, target: memoryview, offset: int) -> int:
        """Puts at least one byte into `target` and says how many."""
        answer = self._answer_at(offset)
        count = answer.readinto(target[: self._end - offset])
        if not count:
            raise HTTPException(f"the answer ends at byte {offset}, before byte {self._end}")
        self._at += count
        return count

    def _answer_at(self, offset: int) -> HTTPResponse:
        """An answer whose next byte is the one at `offset`."""
        if self._answer is not None and self._at < self._end:
            gap = offset - self._at
            if 0 <= gap <= min(_SKIPPED_BYTES_MAX, self._end - self._at - 1):
                if gap:
                    self._at += len(self._answer.read(gap))
                if self._at == offset:
                    return self._answer
        self.close()
        self._at, self._end = offset, min(offset + WINDOW_BYTES, self.size)
        request = urllib.request.Request(self.url, headers=_headers(self.url))
        request.add_header("Range", f"bytes={offset}-{self._end - 1}")
        answer: HTTPResponse = _opener.open(request, timeout=60)
        self._answer = answer
        if answer.status != 206 and not (answer.status == 200 and offset == 0):
            raise HTTPException(f"the hub answers {answer.status} to a range")
        return answer


def hub_address() -> str:
    """The hub that `HF_ENDPOINT` names, else the one that everybody means."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _headers(url: str) -> dict[str, str]:
    """What the hub's own library sends. The token in it goes to the hub alone: a parent's folder may hold a file that
    makes it look like a sparse mirror, and name any host.
    """
    try:
        from huggingface_hub.utils import build_hf_headers
    except ImportError:
        return {}
    kept: Iterable[tuple[str, Any]] = build_hf_headers().items()
    at_hub = urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(hub_address())[:2]  # scheme and host
    return {name: str(value) for name, value in kept if at_hub or name.lower() != "authorization"}


def _is_final(error: Exception) -> bool:
    """Whether another try is in vain: the hub understood and refused."""
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429
