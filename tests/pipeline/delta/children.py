"""Children in miniature, with the manifest that a build would write: for what needs a pair of checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from shardmill.pipeline.manifest.records import (
    FileRecord,
    Manifest,
    RecipeRecord,
    ShardRecord,
    manifest_algorithms,
)
from tests.pipeline.parents import INDEX, MANIFEST, Tensors, library_bytes


def write_child(
    folder: Path, shards: Mapping[str, Tensors], side: Mapping[str, bytes], sha256: bool = True
) -> Path:
    """Writes a checkpoint of `shards` and `side` files, its index and its manifest."""
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    files = {
        **{file: library_bytes(tensors, {"format": "pt"}) for file, tensors in shards.items()},
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        **side,
    }
    digests = {
        file: {name: xxhash.xxh3_128(data).hexdigest() for name, (_, _, data) in tensors.items()}
        for file, tensors in shards.items()
    }
    manifest = Manifest(
        plan_key="0" * 64,
        parent={"repository": "nobody/micro", "revision": None},
        parent_verified=False,
        recipe=RecipeRecord("pair"),
        numerics=(),
        algorithms=manifest_algorithms("sha256" if sha256 else "none"),
        files={
            name: FileRecord(len(data), hashlib.sha256(data).hexdigest() if sha256 else None)
            for name, data in files.items()
        },
        shards={file: ShardRecord("1" * 64, True, tensors, {}) for file, tensors in digests.items()},
        conversions={},
    )
    for name, data in {**files, MANIFEST: manifest.to_json()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
