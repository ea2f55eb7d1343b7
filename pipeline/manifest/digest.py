"""Digests: what they are called and how they are computed.

Two are used. xxh3-128 names each tensor's data: it is free beside the disk and says *which* tensor changed.
sha256 names each published file: it is what hubs publish, so a copy can be checked without its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import xxhash

TENSOR_ALGORITHM = "xxh3-128"  # seed 0, canonical big-endian hex
FILE_ALGORITHM = "sha256"
NO_FILE_ALGORITHM = "none"

TensorHash = xxhash.xxh3_128


def canonical(value: Any) -> bytes:
    """The canonical JSON of `value`: keys sorted, no space, ASCII, one line feed at the end.

    Floats are refused, since their text is no one's promise.
    """
    _refuse_floats(value)
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


_NEITHER = frozenset({str, int, bool, type(None)})  # float nor a table or list that may hold one


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"a record holds whole numbers only, got {value!r}")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inside:
        if type(item) not in _NEITHER:
            _refuse_floats(item)


def key_of(value: Any) -> str:
    """sha256, in hex, of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


class TensorSplitter:
    """Digests of adjacent tensors, (name, bytes) each, from the stream of their data."""

    def __init__(self, tensors: Sequence[tuple[str, int]]) -> None:
        self._tensors = tensors
        self._digests: dict[str, str] = {}
        self._at, self._hash = 0, TensorHash()
        self._left = tensors[0][1] if tensors else 0

    def update(self, chunk: memoryview) -> None:
        while len(chunk):
            self._close_full()
            assert self._at < len(self._tensors), f"{len(chunk)} bytes belong to no tensor"
            part = chunk[: self._left]
            self._hash.update(part)
            self._left -= len(part)
            chunk = chunk[len(part) :]

    def digests(self) -> dict[str, str]:
        """Tensor name -> digest, once all bytes have been seen."""
        self._close_full()
        assert self._at == len(self._tensors), f"the stream ended inside {self._tensors[self._at][0]}"
        return self._digests

    def _close_full(self) -> None:
        """Closes every tensor whose bytes are complete, empty ones included."""
        while self._at < len(self._tensors) and self._left == 0:
            self._digests[self._tensors[self._at][0]] = self._hash.hexdigest()
            self._at, self._hash = self._at + 1, TensorHash()
            self._left = self._tensors[self._at][1] if self._at < len(self._tensors) else 0
