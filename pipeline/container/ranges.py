"""A remote file, read by ranges over HTTP: one request while reading goes on, taken up again where it broke."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException, HTTPResponse
from time import sleep
from typing import Any

from shardmill.pipeline.errors import CheckpointError

WINDOW_BYTES = (
    64 << 20
)  # one request asks for so much, which a connection that is kept alive serves in one go
_SKIPPED_BYTES_MAX = 1 << 20  # a gap that is read and thrown away rather than asked around
_TRIES = 5
_WAIT_SECONDS_MAX = 300.0
_WAITS = (("ratelimit", r'"\w+"\s*;\s*r=\d+\s*;\s*t=(\d+)'), ("retry-after", r"\s*(\d+)\s*$"))


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows a hub to where it keeps its files, but hands the token to no other host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and _host(newurl) != _host(req.full_url):
            found.remove_header("Authorization")  # neither to another host nor over another scheme
        return found


def _host(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


_opener = urllib.request.build_opener(_Redirect)


class WrongAnswerError(HTTPException):
    """The hub gives other bytes than were asked for; asking again does not help."""


class RemoteFile:
    """A remote file of `size` bytes, read at offsets. Reading on where the last read ended costs no new request.

    Every answer must be the range that was asked for, of a file of that size, not encoded, and of one ETag.
    """

    def __init__(self, url: str, size: int, until: int | None = None) -> None:
        """`until`: nothing at or beyond this offset will be read."""
        self.url, self.size = url, size
        self._until = size if until is None else until
        self._answer: HTTPResponse | None = None
        self._at = self._end = 0  # the open answer's next byte, and where it ends
        self.etag: str | None = None  # that of the answers so far

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
                said = dict(error.headers) if isinstance(error, urllib.error.HTTPError) else {}
                sleep(seconds_asked_for(said, 0.2 * 2**failures))

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
        self._at, self._end = offset, min(offset + WINDOW_BYTES, self._until)
        request = urllib.request.Request(self.url, headers=_headers(self.url))
        request.add_header("Range", f"bytes={offset}-{self._end - 1}")
        answer: HTTPResponse = _opener.open(request, timeout=60)
        self._answer = answer
        self._refuse_other_bytes(answer, offset)
        return answer

    def _refuse_other_bytes(self, answer: HTTPResponse, offset: int) -> None:
        """Raises where the answer says that its bytes are not those at `offset` of the file."""
        whole = answer.status == 200 and offset == 0 and self._end == self.size
        if answer.status != 206 and not whole:
            raise HTTPException(f"the hub answers {answer.status} to a range")
        expected = f"bytes {offset}-{self._end - 1}/{self.size}"
        said = answer.headers.get("Content-Range")
        if answer.status == 206 and said not in (expected, f"{expected.rpartition('/')[0]}/*"):
            raise WrongAnswerError(f"the hub's answer has the range {said!r}, expected {expected!r}")
        length = answer.headers.get("Content-Length")
        if length is not None and length != str(self._end - offset):
            raise WrongAnswerError(f"the hub's answer has {length} bytes, expected {self._end - offset}")
        if encoding := answer.headers.get("Content-Encoding"):
            raise WrongAnswerError(f"the hub's answer is encoded ({encoding}), expected plain bytes")
        etag = answer.headers.get("ETag")
        if self.etag not in (None, etag):
            raise WrongAnswerError(
                f"the file has the ETag {etag} and had {self.etag}: it changed while it was read"
            )
        self.etag = etag


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


def seconds_asked_for(headers: Mapping[str, str], otherwise: float) -> float:
    """How long a server wants its next request put off: by `RateLimit` (its `t=`), or by `Retry-After`; never longer
    than some minutes, since nobody knows then what is waited for.
    """
    said = {name.lower(): value for name, value in headers.items()}
    for name, pattern in _WAITS:
        if found := re.match(pattern, said.get(name, "")):
            return min(float(found[1]), _WAIT_SECONDS_MAX)
    return otherwise


def _is_final(error: Exception) -> bool:
    """Whether another try is in vain: the hub understood and refused."""
    if isinstance(error, WrongAnswerError):
        return True
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429
