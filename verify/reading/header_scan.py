"""The JSON of a safetensors header, read piece by piece so that no header makes us build more than we keep.

A header is one object: name -> {"dtype", "shape", "data_offsets"}, and `__metadata__` -> strings. Each entry becomes
one `RawTensor`; nothing else is built. At least as strict as serde in the library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.rules.findings import Finding, UnreadableError

METADATA = "__metadata__"
METADATA_MAX = 20_000  # entries of one file
METADATA_CHARS_MAX = 4_096  # of a value that is kept; nothing here reads more
ENTRY_CHARS_MAX = 4_096
DIMS_MAX = 64
U64 = 1 << 64

_STRING = r'"[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"'
_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_SPACE = r"[ \t\n\r]*+"
_KEY = re.compile(rf"{_SPACE}({_STRING}){_SPACE}:{_SPACE}")
_NEXT = re.compile(rf"{_SPACE}([,}}])")
_NULL = re.compile(r"null(?=[ \t\n\r,}])")
_BODY = re.compile(r"\{[^{}]*+\}")
_PLAIN_BODY = (  # the spelling of every writer in the field
    rf'\{{"dtype":"([A-Z0-9_]{{1,20}})","shape":\[((?:{_NUMBER}(?:,{_NUMBER})*+)?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
_PLAIN = re.compile(_PLAIN_BODY)
_PLAIN_MEMBER = re.compile(rf',"([^"\\\x00-\x1f\ud800-\udfff]++)":{_PLAIN_BODY}')
_PAIR = re.compile(rf"{_SPACE}({_STRING}){_SPACE}:{_SPACE}({_STRING}){_SPACE}([,}}])")


class RawTensor(NamedTuple):
    """An entry as it is written; `begin` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    extra: str  # fields that safetensors does not define


@dataclass(slots=True)
class Scan:
    """A place in a header's text. Every method moves it on, or raises UnreadableError."""

    file: str
    text: str
    at: int = 0

    def key(self) -> str | None:
        """The next member's name, leaving the place at its value; None after the last."""
        if self.at == 0:
            return self._first_key()
        after = _NEXT.match(self.text, self.at)
        if after is None:
            raise self.fault("header-json", "',' or '}' after an entry")
        self.at = after.end()
        if after[1] == "}":
            return self._close()
        return self._key()

    def _first_key(self) -> str | None:
        if not self.text.startswith("{"):
            raise self.fault("header-json", "'{' as the first byte")
        self.at = 1
        after = _NEXT.match(self.text, 1)
        if after is not None and after[1] == "}":
            self.at = after.end()
            return self._close()
        return self._key()

    def _key(self) -> str:
        match = _KEY.match(self.text, self.at)
        if match is None:
            raise self.fault("header-json", "a name")
        self.at = match.end()
        return self._string(match[1])

    def _close(self) -> str | None:
        if self.text[self.at :].strip(" \t\n\r"):
            raise self.fault("header-json", "only spaces after the closing brace")
        return None

    def _string(self, quoted: str) -> str:
        try:
            return bounded_json.text(quoted)
        except BadJsonError as error:
            raise self.fault("header-json", "a JSON string", str(error)) from None

    def metadata(self) -> dict[str, str]:
        """The strings of __metadata__; null counts as none, as for the library."""
        if null := _NULL.match(self.text, self.at):
            self.at = null.end()
            return {}
        if not self.text.startswith("{", self.at):
            raise self.fault("header-metadata", "an object")
        self.at += 1
        metadata: dict[str, str] = {}
        after = _NEXT.match(self.text, self.at)
        if after is not None and after[1] == "}":
            self.at = after.end()
            return metadata
        while len(metadata) <= METADATA_MAX:
            pair = _PAIR.match(self.text, self.at)
            if pair is None:
                raise self.fault("header-metadata", "a string to a string")
            key, value = self._string(pair[1]), self._string(pair[2])
            if key in metadata:
                raise self.fault("header-duplicate", f"one metadata entry {key!r}", "two")
            metadata[key[:METADATA_CHARS_MAX]], self.at = value[:METADATA_CHARS_MAX], pair.end()
            if pair[3] == "}":
                return metadata
        raise self.fault("header-limit", f"at most {METADATA_MAX:,} metadata entries", "more")

    def plain_member(self) -> re.Match[str] | None:
        """The next member where it is a tensor in the plain spelling, which is `key` and `entry` at once."""
        match = _PLAIN_MEMBER.match(self.text, self.at)
        return match if match is not None and match[1] != METADATA else None

    def plain_entry(self, match: re.Match[str]) -> RawTensor:
        return self._moved(_plain(*match.groups()), match.end())

    def entry(self, name: str) -> RawTensor:
        match = _PLAIN.match(self.text, self.at)
        if match is not None:
            raw = _plain(name, *match.groups())
        else:
            match = _BODY.match(self.text, self.at)
            if match is None or match.end() - self.at > ENTRY_CHARS_MAX:
                raise self.fault("header-entry", "an object of dtype, shape and data_offsets", tensor=name)
            raw = self._odd_entry(name, match[0])
        return self._moved(raw, match.end())

    def _moved(self, raw: RawTensor, end: int) -> RawTensor:
        """An entry within bounds, the place behind it."""
        if max(raw.begin, raw.end, *raw.shape) >= U64 or len(raw.shape) > DIMS_MAX:
            raise self.fault("header-entry", f"at most {DIMS_MAX} sizes, each below 2^64", tensor=raw.name)
        self.at = end
        return raw

    def _odd_entry(self, name: str, body: str) -> RawTensor:
        """An entry in an unusual spelling: spaces, another order of fields, escapes."""
        try:
            value = _entry_decoder.decode(body)
            dtype, shape, (begin, end) = value.pop("dtype"), value.pop("shape"), value.pop("data_offsets")
            if type(dtype) is not str or type(shape) is not list:
                raise ValueError(body)
            if any(type(size) is not int for size in (*shape, begin, end)):
                raise ValueError(body)
        except BadJsonError as error:
            raise self.fault("header-duplicate", "each field once", str(error), name) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self.fault(
                "header-entry", "dtype, shape and data_offsets of whole numbers", body, name
            ) from None
        return RawTensor(name, dtype, tuple(shape), begin, end, ", ".join(map(str, value)))

    def fault(self, slug: str, expected: str, got: str = "", tensor: str = "") -> UnreadableError:
        here = self.text[self.at : self.at + 60]
        got = got or (f"{here!r} at character {self.at:,}" if here else "the end of the header")
        return UnreadableError(Finding(slug, self.file, tensor, expected, got))


def _plain(name: str, dtype: str, dims: str, begin: str, end: str) -> RawTensor:
    return RawTensor(name, dtype, sizes_of(dims), int(begin), int(end), "")


def sizes_of(dims: str) -> tuple[int, ...]:
    """`8,16` as numbers."""
    return tuple(map(int, dims.split(","))) if dims else ()


def _fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise BadJsonError(", ".join(key for key, _ in pairs))
    return value


def _size(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 20:
        raise ValueError(digits)
    return int(digits)


def _refuse(text: str) -> object:
    raise ValueError(text)


_entry_decoder = json.JSONDecoder(
    object_pairs_hook=_fields, parse_int=_size, parse_float=_refuse, parse_constant=_refuse
)
