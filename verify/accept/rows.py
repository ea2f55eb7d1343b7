"""One line of rows.jsonl: the raw answer to one request, or how it failed.

Read strictly, so that nothing counts but what `record` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, get_args

from shardmill.verify.accept.client import Failure
from shardmill.verify.accept.items import Kind

COUNT_MAX = 1 << 40  # of drafts that one request may gain
KINDS, FAILURES = get_args(Kind), get_args(Failure)


class RowError(ValueError):
    """A JSON value is no row as `record` writes them. The message names the key, what was expected and found."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's outcome: the raw answer, or how it failed after so many attempts.

    `counters`: what the server's counters of speculative decoding gained by it, where it has a draft.
    """

    id: str
    kind: str
    request: str
    identity: str
    answer: Mapping[str, Any] | None
    failure: str | None
    detail: str
    attempts: int
    seconds: float
    counters: Mapping[str, float] | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


def parse_row(value: Any) -> Row:
    """A row from JSON. Raises RowError."""
    if not isinstance(value, dict):
        raise RowError(f"expected an object, got {_short(value)}")
    known = {field.name for field in fields(Row)}
    missing, unknown = sorted(known - {"counters"} - value.keys()), sorted(value.keys() - known)
    if missing or unknown:
        raise RowError(f"{'lacks' if missing else 'has the unknown key'} {(missing or unknown)[0]!r}")
    for key in ("id", "request", "identity", "detail"):
        _expect(key, value, "a text", isinstance(value[key], str))
    _expect("kind", value, "a kind of request", value["kind"] in KINDS)
    _expect("failure", value, "null or a kind of failure", value["failure"] in (None, *FAILURES))
    _expect("attempts", value, "a count", type(value["attempts"]) is int and value["attempts"] >= 0)
    _expect("seconds", value, "a number from 0 on", _number(value["seconds"]))
    _expect("counters", value, "null or numbers from 0 on", _counters(value.get("counters")))
    _expect("answer", value, "null or an object", isinstance(value["answer"], dict | None))
    row = Row(**value)
    if row.ok and row.kind != "vision_limit" and row.answer is None:
        raise RowError("no failure, and no answer either")
    return row


def _expect(key: str, value: Mapping[str, Any], expected: str, holds: bool) -> None:
    if not holds:
        raise RowError(f"{key!r}: expected {expected}, got {_short(value.get(key))}")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0


def _counters(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_number(count) and count < COUNT_MAX for count in value.values())
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
