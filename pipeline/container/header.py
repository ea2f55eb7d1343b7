"""The safetensors container: header bytes in, header bytes out, and data by offset.

The law of this room: `parse_header(header_bytes(h)) == h`, and the bytes written equal those that the
safetensors library writes for the same tensors. Its own writer is not used: with two metadata keys or more
its header follows a hash map's order, so two runs differ. Numbers are opaque here.
Format: https://huggingface.co/docs/safetensors (an 8-byte little-endian length, JSON, data).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from json.encoder import encode_basestring
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import Any

from shardmill.pipeline.container.header_text import LARGE_BYTES, usual_tensors, why_no_table
from shardmill.pipeline.container.recognize import HEAD_BYTES, looks_like
from shardmill.pipeline.container.regular import open_regular
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.types import DTYPE_RANK, Header, Shape, Stat, TensorRef, tensor_bytes

HEADER_BYTES_MAX = 100_000_000  # the safetensors library's own limit
_LENGTH_BYTES = 8
_PLACE = attrgetter("begin", "end")
_NUMBER_LIMIT = 1 << 63
_ALIGNMENT = 8  # a header is padded with spaces so that the data begin at a multiple of this


def file_stat(path: Path) -> Stat:
    """What changes when the file at `path` is written, replaced or touched."""
    facts = path.stat()
    return (facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)


def read_header(path: Path, shard: str) -> Header:
    """The header of the file at `path`, known as `shard` in messages and refs.

    Raises CheckpointError, in one sentence, for whatever the format forbids; reads no tensor data.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            length = int.from_bytes(head[:_LENGTH_BYTES], "little")
            if size < _LENGTH_BYTES:
                raise CheckpointError(
                    f"{shard}: {size} bytes are too few for a safetensors file; fetch it again"
                )
            if found := None if head[_LENGTH_BYTES:].startswith(b"{") else looks_like(head, size):
                raise CheckpointError(f"{shard}: is no safetensors file: it is {found}")
            file.seek(_LENGTH_BYTES)
            if length > min(size - _LENGTH_BYTES, HEADER_BYTES_MAX):
                raise CheckpointError(
                    f"{shard}: its header claims {length} bytes, the file has {size} and {HEADER_BYTES_MAX} is the "
                    f"limit; the file is truncated or is not safetensors, fetch it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{shard}: cannot be read: {error.strerror}") from error
    header = parse_header(text, shard)
    if header.file_bytes != size:
        kind = "truncated" if size < header.file_bytes else "followed by bytes that no tensor owns"
        raise CheckpointError(
            f"{shard}: its header accounts for {header.file_bytes} bytes but the file has {size}: "
            f"it is {kind}; fetch it again"
        )
    return header


def parse_header(text: bytes, shard: str) -> Header:
    """The Header that `text` (the JSON, without the length) describes."""
    if text and not text.startswith(b"{"):
        raise CheckpointError(f"{shard}: its header must begin with '{{' and does not; fetch the file again")
    try:
        usual = usual_tensors(text.decode("utf-8"), shard)
    except UnicodeDecodeError as error:
        raise _no_json(shard, error) from error
    refs, metadata = usual or _any_tensors(text, shard)
    refs.sort(key=_PLACE)  # stable: empty tensors that share a place keep the header's order
    digest = hashlib.sha256(text).hexdigest()
    return Header(shard, tuple(refs), metadata, _LENGTH_BYTES + len(text), digest)


def _any_tensors(text: bytes, shard: str) -> tuple[list[TensorRef], Mapping[str, str]]:
    """The same as usual_tensors for JSON in any form."""
    if len(text) > LARGE_BYTES and (reason := why_no_table(text)):
        raise CheckpointError(f"{shard}: its header is no table of tensors: {reason}; fetch the file again")
    try:
        # Decoded here, since json.loads guesses at other encodings.
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
        if b"\\u" in text:  # it lets escaped lone surrogates pass, which no UTF-8 can hold
            json.dumps(table, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _no_json(shard, error) from error
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # the library reads null as absent
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{shard}: __metadata__ must map strings to strings")
    return [_tensor(name, entry, shard) for name, entry in table.items()], metadata


def _no_json(shard: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{shard}: its header is not valid JSON ({error}); fetch the file again")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is there twice")
    return entries


def _tensor(name: str, entry: Any, shard: str) -> TensorRef:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        whole = all(type(number) is int and 0 <= number < _NUMBER_LIMIT for number in numbers)
        if not whole or len(entry) != 3 or type(shape) is not list:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{shard}: {name}: its header entry must hold exactly dtype, shape and two data_offsets, "
            f"all numbers whole and not negative"
        ) from None
    if not isinstance(dtype, str):
        raise CheckpointError(f"{shard}: {name}: dtype {dtype!r} is not one that safetensors knows")
    return TensorRef(name, intern(dtype), tuple(shape), shard, begin, end)


def lay_out(tensors: Iterable[tuple[str, str, Shape]], shard: str, metadata: Mapping[str, str]) -> Header:
    """The header of a shard that holds `tensors` (name, dtype, shape), in the library's canonical order.

    That is descending dtype rank, then name, so that every tensor is aligned to its element size
    whatever the mix.
    """
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_RANK[tensor[1]], tensor[0]))
    refs, place = [], 0
    for name, dtype, shape in ordered:
        end = place + tensor_bytes(dtype, shape)
        refs.append(TensorRef(name, dtype, shape, shard, place, end))
        place = end
    text = _header_text(refs, metadata)
    digest = hashlib.sha256(text).hexdigest()
    return Header(shard, tuple(refs), dict(sorted(metadata.items())), _LENGTH_BYTES + len(text), digest)


def header_bytes(header: Header) -> bytes:
    """The bytes that stand before the data: the length, then the JSON padded with spaces."""
    text = _header_text(header.tensors, header.metadata)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_text(refs: Collection[TensorRef], metadata: Mapping[str, str]) -> bytes:
    entries = [f'"__metadata__":{_compact(dict(sorted(metadata.items())))}'] if metadata else []
    sides = {shape: _compact(shape) for shape in {ref.shape for ref in refs}}
    entries += [
        f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":{sides[shape]},"data_offsets":[{begin},{end}]}}'
        for name, dtype, shape, _, begin, end in refs
    ]
    text = f"{{{','.join(entries)}}}".encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
