"""An OpenAI-compatible server asked over HTTP: bounded retries, and every way to fail kept apart from scores."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Failure = Literal[
    "timeout", "connection", "http 4xx", "http 429", "http 5xx", "not json", "empty", "truncated", "skipped"
]
RETRIED: tuple[Failure, ...] = ("timeout", "connection", "http 429", "http 5xx", "not json")
ANSWER_BYTES_MAX = 512 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a JSON body, or how it failed. `seconds` is of the last attempt alone."""

    body: dict[str, Any] | None
    failure: Failure | None
    detail: str
    attempts: int
    seconds: float


class UnreachableError(Exception):
    """A server does not answer what it must. The message names the address and what was asked."""


@dataclass(frozen=True, slots=True)
class Client:
    """`url` without a trailing slash or /v1. `wait` gives the seconds before a further attempt."""

    url: str
    timeout: float = 600.0
    attempts_max: int = 3
    key: str | None = None
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
        try:
            with urllib.request.urlopen(self._request(path, None), timeout=min(self.timeout, 30)) as answer:
                return str(answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self.url}{path}: {_reason(error)}") from None

    def get_or_none(self, path: str) -> str | None:
        try:
            return self.get(path)
        except UnreachableError:
            return None

    def _request(self, path: str, data: bytes | None) -> urllib.request.Request:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return urllib.request.Request(f"{self.url}{path}", data=data, headers=headers)

    def _once(self, path: str, data: bytes) -> tuple[dict[str, Any] | None, Failure | None, str]:
        try:
            with urllib.request.urlopen(self._request(path, data), timeout=self.timeout) as answer:
                text = answer.read(ANSWER_BYTES_MAX)
                if answer.length:  # what the server promised and did not send
                    return None, "connection", f"the answer was cut {answer.length:,} bytes before its end"
        except urllib.error.HTTPError as error:
            return (
                None,
                _status_failure(error.code),
                f"{error.code}: {error.read(500).decode('utf-8', 'replace')}",
            )
        except TimeoutError:
            return None, "timeout", f"no answer within {self.timeout:g} s"
        except (OSError, http.client.HTTPException) as error:
            timed_out = isinstance(getattr(error, "reason", None), TimeoutError)
            return None, "timeout" if timed_out else "connection", _reason(error)
        try:
            value = json.loads(text)
        except ValueError:
            return None, "not json", text[:200].decode("utf-8", "replace")
        return (value, None, "") if isinstance(value, dict) else (None, "not json", "no JSON object")


def _status_failure(code: int) -> Failure:
    if code == 429:
        return "http 429"
    return "http 5xx" if code >= 500 else "http 4xx"


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(page: str) -> list[Sample]:
    """The samples of a metrics page; lines of another form are left out."""
    found = []
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match:
            found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found
