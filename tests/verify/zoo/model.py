"""A checkpoint as plain dicts, and its bytes on disk. Shares no code with the writer or the judge.

The bytes are written by hand, so that a zoo case may be as wrong as it likes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
INDEX = "model.safetensors.index.json"
MANIFEST = "shardmill.manifest.json"


@dataclass
class Blob:
    """One tensor: dtype, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Model:
    """A checkpoint before it is bytes. `write` derives index and manifest, so that a clean model is coherent."""

    shards: dict[str, dict[str, Blob]]
    config: dict[str, Any] | None = None
    others: dict[str, bytes] = field(default_factory=dict)
    indexed: bool = True
    manifest: dict[str, Any] | None = (
        None  # fields that can't be derived: conversions, dropped, renamed, sources
    )

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def find(self, name: str) -> dict[str, Blob]:
        """The shard that holds a tensor."""
        return next(shard for shard in self.shards.values() if name in shard)

    def __getitem__(self, name: str) -> Blob:
        return self.find(name)[name]

    def drop(self, name: str) -> Blob:
        return self.find(name).pop(name)

    def rename(self, old: str, new: str) -> None:
        shard = self.find(old)
        shard[new] = shard.pop(old)

    @property
    def quantization(self) -> dict[str, Any]:
        assert self.config is not None
        value: dict[str, Any] = self.config["quantization_config"]
        return value

    @property
    def names(self) -> list[str]:
        return [name for shard in self.shards.values() for name in shard]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file, tensors in self.shards.items():
            (folder / file).write_bytes(shard_bytes(tensors))
        for file, data in self.others.items():
            (folder / file).write_bytes(data)
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config))
        if self.indexed:
            (folder / INDEX).write_text(json.dumps(self.index(), indent=2))
        if self.manifest is not None:
            (folder / MANIFEST).write_bytes(canonical(self.full_manifest(folder)))

    def index(self) -> dict[str, Any]:
        total = sum(len(blob.data) for shard in self.shards.values() for blob in shard.values())
        placed = {name: file for file, shard in self.shards.items() for name in shard}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}

    def full_manifest(self, folder: Path) -> dict[str, Any]:
        given = {"conversions": {}, "dropped": [], "renamed": {}, "sources": {}, **(self.manifest or {})}
        sources = given.pop("sources")
        value: dict[str, Any] = {
            "format": "shardmill/manifest/2",
            "plan_key": "0" * 64,
            "parent": {"repository": None, "revision": None},
            "parent_verified": False,
            "recipe": {"name": "zoo", "layers": []},
            "families": [],
            "numerics": sorted({row["numerics"] for row in given["conversions"].values()}),
            "algorithms": {"tensor": "xxh3-128", "file": "sha256"},
            "files": {
                path.name: {
                    "bytes": path.stat().st_size,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
                for path in sorted(folder.iterdir())
                if path.is_file() and path.name != MANIFEST
            },
            "shards": {
                file: {
                    "key": "0" * 64,
                    "rewritten": any(name in shard for name in (*sources, *given["conversions"])),
                    "tensors": {name: xxhash.xxh3_128_hexdigest(blob.data) for name, blob in shard.items()},
                    "sources": {name: digest for name, digest in sources.items() if name in shard},
                }
                for file, shard in self.shards.items()
            },
            "repairs": [],
            **given,
        }
        value["self"] = hashlib.sha256(canonical(value)).hexdigest()
        return value


def canonical(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n").encode()


def shard_bytes(tensors: Mapping[str, Blob], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    place = 0
    for name, blob in tensors.items():
        end = place + len(blob.data)
        header[name] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [place, end]}
        place = end
    return raw_file(
        json.dumps(header, separators=(",", ":")).encode(), b"".join(b.data for b in tensors.values())
    )


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of any header bytes; `length` may lie."""
    padded = header + b" " * (-len(header) % 8) if length is None else header
    return struct.pack("<Q", len(padded) if length is None else length) + padded + data


def bits(name: str, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that depend on the name alone: PCG64, never a float generator."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).integers(0, 256, count, np.uint8)


def bf16(name: str, *shape: int) -> Blob:
    """Weights of about +-0.03."""
    raw = bits(name, 2 * prod(shape)).view("<u2")
    return Blob("BF16", shape, ((raw & 0x807F) | 0x3C80 | ((raw >> 8 & 1) << 7)).astype("<u2").tobytes())


def f32(value: float, *shape: int) -> Blob:
    return Blob("F32", shape, np.full(prod(shape), value, "<f4").tobytes())


def scales(name: str, *shape: int, base: float = 1e-4) -> Blob:
    """F32 scales between base and 2 * base."""
    steps = bits(name, prod(shape)).astype("<f4")
    return Blob("F32", shape, (np.float32(base) * (1 + steps / 256)).astype("<f4").tobytes())


def codes(name: str, *shape: int) -> Blob:
    """E4M3 codes without NaN."""
    raw = bits(name, prod(shape))
    return Blob("F8_E4M3", shape, np.where((raw & 0x7F) == 0x7F, raw & 0xFE, raw).astype(np.uint8).tobytes())


def packed(name: str, *shape: int) -> Blob:
    return Blob("U8", shape, bits(name, prod(shape)).tobytes())


def block_scales(name: str, *shape: int) -> Blob:
    """E4M3 block scales of NVFP4: positive and not tiny."""
    return Blob("F8_E4M3", shape, (bits(name, prod(shape)) % 64 + 48).astype(np.uint8).tobytes())


def patch(blob: Blob, at: int, value: bytes) -> None:
    """Overwrites bytes of a tensor."""
    blob.data = blob.data[:at] + value + blob.data[at + len(value) :]
