"""Digests: what they are called and how they are computed.

Two are used. xxh3-128 names each tensor's data: it is free beside the disk and says *which* tensor changed.
sha256 names each published file: it is what hubs publish, so a copy can be checked without its bytes.
"""

from __future__ import annotations

import hashlib
import json
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


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError(f"a record holds whole numbers only, got {value!r}")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)


def key_of(value: Any) -> str:
    """sha256, in hex, of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()
