"""An OpenAI-compatible server asked over HTTP: bounded retries, and every way to fail kept apart from scores.

Nobody but the named scheme, host and port is asked: no redirect is followed, so none carries the API key or the texts.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from shardmill.verify.accept.deadline import Deadline
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError

Failure = Literal[
    "timeout",
    "connection",
    "http 3xx",
    "http 4xx",
    "http 429",
    "http 5xx",
    "not json",
    "empty",
    "truncated",
    "skipped",
]
RETRIED: tuple[Failure, ...] = ("timeout", "connection", "http 429", "http 5xx", "not json")
ANSWER_BYTES_MAX = 512 << 20
ANSWER_VALUES_MAX = 8_000_000
METRICS_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a JSON body, or how it failed. `seconds` is of the last attempt alone."""

    body: dict[str, Any] | None
    failure: Failure | None
    detail: str
    attempts: int
    seconds: float


class UnreachableError(Exception):
    """A server does not answer what it must. The message names the address and what was asked.

    status: its HTTP status, None where none came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Client:
    """`url` without a trailing slash or /v1. `timeout`: seconds of one whole request. `wait` gives the seconds before
    a further attempt."""

    url: str
    timeout: float = 600.0
    attempts_max: int = 3
    key: str | None = field(default=None, repr=False)
    wait: Callable[[int], float] = lambda attempt: min(2.0**attempt, 30.0)

    def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """POST a body; at most `attempts_max` attempts, of which only failures that may pass are repeated."""
        data = json.dumps(body).encode()
        for attempt in range(1, self.attempts_max + 1):
            begin = time.monotonic()
            answer, failure, detail = self._once(path, data)
            seconds = time.monotonic() - begin
            if failure is None or failure not in RETRIED or attempt == self.attempts_max:
                return Reply(answer, failure, detail, attempt, seconds)
            time.sleep(self.wait(attempt))
        raise AssertionError("attempts_max is at least 1")

    def get(self, path: str) -> str:
        """A text that must be there. Raises UnreachableError."""
        seconds = min(self.timeout, 30)
        with Deadline(seconds) as deadline:
            try:
                with self._opener(deadline).open(self._request(path, None), timeout=seconds) as answer:
                    data = answer.read(METRICS_BYTES_MAX)
                    if not answer.length and not deadline.expired:
                        return str(data.decode("utf-8", "replace"))
                    why = f"the answer ended after {len(data):,} bytes, before its end"
            except urllib.error.HTTPError as error:
                raise UnreachableError(f"{self.url}{path}: {_refusal(error)}", error.code) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = _reason(error)
        raise UnreachableError(
            f"{self.url}{path}: {f'no answer within {seconds:g} s' if deadline.expired else why}"
        )

    def get_or_none(self, path: str) -> str | None:
        try:
            return self.get(path)
        except UnreachableError:
            return None

    def get_if_there(self, path: str) -> str:
        """A page that a server need not have: "" where it says so (a status of 3xx or 4xx). Raises UnreachableError."""
        try:
            return self.get(path)
        except UnreachableError as error:
            if error.status is None or error.status >= 500:
                raise
            return ""

    def _opener(self, deadline: Deadline) -> urllib.request.OpenerDirector:
        """Follows no redirect; with a key, no proxy sees a plain request (through TLS none sees any)."""
        proxies = urllib.request.getproxies()
        if self.key:
            proxies = {scheme: proxy for scheme, proxy in proxies.items() if scheme != "http"}
        handlers = (urllib.request.ProxyHandler(proxies), _NoRedirect(), *deadline.handlers())
        return urllib.request.build_opener(*handlers)

    def _request(self, path: str, data: bytes | None) -> urllib.request.Request:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return urllib.request.Request(f"{self.url}{path}", data=data, headers=headers)

    def _once(self, path: str, data: bytes) -> tuple[dict[str, Any] | None, Failure | None, str]:
        with Deadline(self.timeout) as deadline:
            text, failure, detail = self._text(path, data, deadline)
        if deadline.expired:
            return None, "timeout", f"no whole answer within {self.timeout:g} s"
        if failure is not None:
            return None, failure, detail
        try:
            value = bounded_json.loads(text, ANSWER_BYTES_MAX, ANSWER_VALUES_MAX)
        except BadJsonError as error:
            return None, "not json", f"{error}: {text[:200].decode('utf-8', 'replace')}"
        return (value, None, "") if isinstance(value, dict) else (None, "not json", "no JSON object")

    def _text(self, path: str, data: bytes, deadline: Deadline) -> tuple[bytes, Failure | None, str]:
        """The bytes that came, or how the exchange failed."""
        try:
            with self._opener(deadline).open(self._request(path, data), timeout=self.timeout) as answer:
                text = answer.read(ANSWER_BYTES_MAX)
                if answer.length:  # what the server promised and did not send
                    return b"", "connection", f"the answer ended {answer.length:,} bytes before its end"
                return text, None, ""
        except urllib.error.HTTPError as error:
            return b"", _status_failure(error.code), _refusal(error)
        except TimeoutError:
            return b"", "timeout", f"no answer within {self.timeout:g} s"
        except (OSError, http.client.HTTPException, ValueError) as error:
            timed_out = isinstance(getattr(error, "reason", None), TimeoutError)
            return b"", "timeout" if timed_out else "connection", _reason(error)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: the status, and where it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _status_failure(code: int) -> Failure:
    if code == 429:
        return "http 429"
    if code < 400:
        return "http 3xx"
    return "http 5xx" if code >= 500 else "http 4xx"


def _refusal(error: urllib.error.HTTPError) -> str:
    """A status in words: of a redirect where it leads, else the first of the body."""
    with error:
        if error.code < 400:
            place = error.headers.get("location")
            return f"{error.code}: redirects to {place}; redirects are not followed, give that address"
        try:
            return f"{error.code}: {error.read(500).decode('utf-8', 'replace')}"
        except (OSError, http.client.HTTPException) as broken:
            return f"{error.code}: {_reason(broken)}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


class MetricsError(ValueError):
    """A metrics page cannot be read. The message names the line."""


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*+)(?:\s*+\{(.*)\})?\s++(\S++)(?:\s++-?\d++)?\s*+$")
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(page: str) -> list[Sample]:
    """The samples of a metrics page; comments and empty lines are left out. Raises MetricsError on any other line."""
    found = []
    for number, line in enumerate(page.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        value = _value(match[3]) if match else None
        if match is None or value is None:
            raise MetricsError(f"line {number}: expected `name{{labels}} number`, got {line[:80]!r}")
        found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found


def _value(word: str) -> float | None:
    """A sample's number; NaN and the infinities are legal on a page. None where it is none."""
    try:
        return None if "_" in word else float(word)
    except ValueError:
        return None


def counter(sample: Sample) -> float:
    """A counter's value. Raises MetricsError where it is no finite number from 0 on."""
    if not (isfinite(sample.value) and sample.value >= 0):
        raise MetricsError(f"{sample.name}: a counter must be a number from 0 on, got {sample.value}")
    return sample.value
