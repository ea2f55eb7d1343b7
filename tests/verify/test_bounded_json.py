"""JSON from strangers is strict, and bounded."""

from __future__ import annotations

import pytest

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError, loads


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b'"\\ud800"',
        b'["\\udfff"]',
        b'{"\\uD83D":1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 41,
        b"1." + b"0" * 90,
        b"{} x",
        b"'a'",
    ],
)
def test_what_is_not_plain_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadJsonError):
        loads(data)


@pytest.mark.parametrize(
    ("data", "value"), [(b'"\\ud83d\\ude00"', "\U0001f600"), (b' {"a":[1,2.5,null]} ', {"a": [1, 2.5, None]})]
)
def test_plain_json_is_read(data: bytes, value: object) -> None:
    assert loads(data) == value


def test_too_many_values_and_bytes_are_refused_before_they_are_built() -> None:
    with pytest.raises(BadJsonError, match="values where at most"):
        loads(b"[" + b"0," * bounded_json.VALUES_MAX + b"0]")
    with pytest.raises(BadJsonError, match="bytes where at most"):
        loads(b" " * 11, bytes_max=10)


def test_constants_of_python_are_read_where_they_are_asked_for() -> None:
    """Published configs hold Infinity and NaN; elsewhere they stay refused."""
    data = b'{"time_step_limit": [0.0, Infinity], "x": NaN}'
    value = bounded_json.loads(data, constants=True)
    assert value["time_step_limit"] == [0.0, float("inf")]
    assert bounded_json.loads(data, constants=True)["x"] is value["x"]
    with pytest.raises(BadJsonError, match="Infinity is not JSON"):
        bounded_json.loads(data)
