"""JSON from strangers: strict, and bounded in memory and time whatever the bytes say.

The standard parser builds up to ~100 bytes of objects for each value, so the values are counted before it runs.
Refused beside broken JSON: duplicate keys, NaN and Infinity, lone surrogates, a byte-order mark, deep nesting.
"""

from __future__ import annotations

import json
import re
from typing import Any

BYTES_MAX = 64 << 20  # the largest honest file, the manifest of 150,000 tensors, has 17 MB
VALUES_MAX = 500_000  # the manifest of 150,000 tensors has 320,000
DIGITS_MAX = 40  # a longer number is no size, count or scale

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJsonError(Exception):
    """The bytes are not JSON that we accept; the text says why."""


def loads(
    data: bytes, bytes_max: int = BYTES_MAX, values_max: int = VALUES_MAX, *, constants: bool = False
) -> Any:
    """The value in `data`. Raises BadJsonError, nothing else.

    `constants`: Infinity and NaN are read, as Python writes them into the configs of published models.
    """
    if len(data) > bytes_max:
        raise BadJsonError(f"{len(data):,} bytes where at most {bytes_max:,} are read")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > values_max:
        raise BadJsonError(f"{values:,} values where at most {values_max:,} are read")
    try:
        text = data.decode("utf-8")
        value = (_lenient if constants else _decoder).decode(text)
        if _SURROGATE_ESCAPE.search(text):  # a pair of them is one character; UTF-8 refuses a lone one
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise BadJsonError("a lone surrogate in a string") from None
    except UnicodeDecodeError as error:
        raise BadJsonError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise BadJsonError("nested too deeply") from None
    except ValueError as error:  # JSONDecodeError is one
        raise BadJsonError(str(error)) from None


def text(quoted: str) -> str:
    """The string that a JSON string literal spells, without lone surrogates. Raises BadJsonError."""
    if "\\" not in quoted:
        value = quoted[1:-1]
    else:
        try:
            value = json.loads(quoted)
        except ValueError as error:
            raise BadJsonError(str(error)) from None
    if not value.isascii() and _SURROGATE.search(value):
        raise BadJsonError("a lone surrogate in a string")
    return str(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} twice in one object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    if len(digits) > 2 * DIGITS_MAX:
        raise ValueError(f"a number of {len(digits)} digits")
    return float(digits)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant
)
_CONSTANTS = {
    name: float(name) for name in ("NaN", "Infinity", "-Infinity")
}  # one NaN, so that it equals itself
_lenient = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_CONSTANTS.__getitem__
)
