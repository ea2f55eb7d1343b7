"""Hostile headers: each replaces the one file of a plain checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.verify.zoo.case import Case
from tests.verify.zoo.model import raw_file

TWO = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def header(value: Any, data: bytes = b"xx", length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return raw_file(text, data, length)


def _entry(**fields: Any) -> bytes:
    return header({"a": {**TWO, **fields}})


def _twice(text: str) -> bytes:
    entry = json.dumps(TWO)
    return header(text.replace("E", entry).encode())


HEADERS: dict[str, tuple[str, bytes]] = {
    "empty file": ("not-the-file", b""),
    "seven bytes": ("header-length", b"\2\0\0\0\0\0\0"),
    "header longer than the file": ("header-length", header({"a": TWO}, length=1 << 20)),
    "header length 2^64 - 1": ("header-length", header({"a": TWO}, length=(1 << 64) - 1)),
    "no brace first": ("header-json", header(b" {}", b"")),
    "byte-order mark": ("header-json", header(b"\xef\xbb\xbf{}", b"")),
    "not UTF-8": ("header-json", header(b'{"\xff":1}', b"")),
    "a list": ("header-json", header(b"[]", b"")),
    "cut JSON": ("header-json", header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}')),
    "comma before the brace": ("header-json", _twice('{"a":E,}')),
    "text after the brace": ("header-json", _twice('{"a":E}x')),
    "NUL padding": ("header-json", header(b"{}\0\0\0\0\0\0", b"", 8)),
    "lone surrogate": ("header-json", _twice('{"\\ud800":E}')),
    "bad escape": ("header-json", _twice('{"\\x":E}')),
    "name twice": ("header-duplicate", _twice('{"a":E,"a":E}')),
    "field twice": (
        "header-duplicate",
        header(b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}'),
    ),
    "metadata twice": ("header-duplicate", _twice('{"__metadata__":{},"__metadata__":{},"a":E}')),
    "metadata key twice": ("header-duplicate", _twice('{"__metadata__":{"k":"1","k":"2"},"a":E}')),
    "metadata of numbers": ("header-metadata", header({"__metadata__": {"k": 1}, "a": TWO})),
    "metadata half a null": ("header-metadata", header(b'{"__metadata__":nul}', b"")),
    "metadata a list": ("header-metadata", header({"__metadata__": ["k"], "a": TWO})),
    "deep nesting": ("header-entry", header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    "deep objects": ("header-entry", header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)),
    "entry a list": ("header-entry", header({"a": ["U8", [2], [0, 2]]})),
    "no offsets": ("header-entry", header({"a": {"dtype": "U8", "shape": [2]}})),
    "three offsets": ("header-entry", _entry(data_offsets=[0, 1, 2])),
    "negative offset": ("header-entry", _entry(data_offsets=[-2, 0])),
    "minus zero": ("header-entry", header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[-0,2]}}')),
    "float offset": ("header-entry", _entry(data_offsets=[0, 2.0])),
    "exponent": ("header-entry", header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2e0]}}')),
    "true as a size": ("header-entry", _entry(shape=[True])),
    "NaN as a size": ("header-entry", header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}')),
    "size of 2^64": ("header-entry", _entry(shape=[1 << 64])),
    "offset of 10^30": ("header-entry", _entry(data_offsets=[0, 10**30])),
    "5,000 digits": (
        "header-entry",
        header(b'{"a":{"dtype":"U8","shape":[' + b"9" * 3_000 + b'],"data_offsets":[0,2]}}'),
    ),
    "65 axes": ("header-entry", _entry(shape=[1] * 65)),
    "dtype a number": ("header-entry", _entry(dtype=8)),
    "unknown dtype": ("unknown-dtype", _entry(dtype="F7_E9M9")),
    "lower-case dtype": ("unknown-dtype", _entry(dtype="u8")),
    "field of nobody": ("header-extra-field", _entry(checksum="x")),
    "shape of three, bytes of two": ("size-mismatch", _entry(shape=[3])),
    "overflowing shape": ("size-mismatch", _entry(shape=[1 << 63, 2])),
    "overflow hidden by a zero": ("size-mismatch", _entry(shape=[1 << 63, 4, 0], data_offsets=[0, 0])),
    "offsets reversed": ("size-mismatch", _entry(data_offsets=[2, 0])),
    "half a byte": ("size-mismatch", _entry(dtype="F4", shape=[3], data_offsets=[0, 2])),
    "overlap": ("overlap", header({"a": TWO, "b": {**TWO, "data_offsets": [1, 3]}}, b"xxx")),
    "alias": ("overlap", header({"a": TWO, "b": TWO})),
    "hole": ("hole", header({"a": TWO, "b": {**TWO, "data_offsets": [4, 6]}}, b"xxxxxx")),
    "hole at the start": ("hole", _entry(data_offsets=[2, 4])),
    "data cut": ("truncated-file", header({"a": TWO}, b"x")),
    "bytes at the end": ("trailing-bytes", header({"a": TWO}, b"xxx")),
    "empty name": ("tensor-name", header({"": TWO})),
    "name with NUL": ("tensor-name", header({"a\0b": TWO})),
    "name with a newline": ("tensor-name", header({"a\nb": TWO})),
    "name ../x": ("tensor-name", header({"../x": TWO})),
    "absolute name": ("tensor-name", header({"/etc/passwd": TWO})),
}


def _replace(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(data) and None


def _sparse(size: int, length: int) -> Callable[[Path], None]:
    """A file that is all holes, `size` bytes long, whose header claims `length`."""

    def damage(folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            os.truncate(file.fileno(), size)

    return damage


def _many(count: int) -> bytes:
    entries = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return raw_file(f"{{{entries}}}".encode())


def _many_metadata(count: int) -> bytes:
    return raw_file(('{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(count)) + "}}").encode())


CASES: tuple[Case, ...] = (
    *(Case(name, "plain", rule, damage=_replace(data)) for name, (rule, data) in HEADERS.items()),
    Case("header of 4 GB", "plain", "header-limit", damage=_sparse((4 << 30) + 100, 4 << 30)),
    Case("header of 60 MB of NUL", "plain", "header-json", damage=_sparse((60 << 20) + 100, 60 << 20)),
    Case("300,001 empty tensors", "plain", "header-limit", damage=lambda f: _replace(_many(300_001))(f)),
    Case("100,000 metadata", "plain", "header-limit", damage=lambda f: _replace(_many_metadata(100_000))(f)),
)
