"""Weights that are byte copies of their siblings: an expert or a layer that was written twice.

The pass over the data keeps a digest of each weight's first bytes; only where these are equal, the weights are
read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.look import Sightings, whole
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

PAIRS_MAX = 2_000
STRIP_BYTES = 1 << 20
BYTES_MIN = 1_024  # smaller weights may be alike by chance, or by initialisation


def twin_faults(checkpoint: Checkpoint, sightings: Sightings) -> Iterator[Finding]:
    first: dict[tuple[str, int, tuple[int, ...]], str] = {}
    pairs: list[tuple[str, str]] = []
    alike = Counter(sightings.fronts.values())
    for name in sorted(name for name, front in sightings.fronts.items() if alike[front] > 1):
        tensor = checkpoint.tensors[name]
        if tensor.bytes < BYTES_MIN or whole(sightings.runs.get(name, ()), tensor):
            continue
        key = (kind_of(name), sightings.fronts[name], tensor.shape)
        if key in first:
            pairs.append((first[key], name))
        else:
            first[key] = name
    with OpenFiles(checkpoint.source) as opened:
        for one, other in pairs[:PAIRS_MAX]:
            if _equal(checkpoint.tensors, one, other, opened):
                yield Finding(
                    "twin-weight",
                    checkpoint.tensors[other].file,
                    other,
                    "values of its own",
                    f"the bytes of {one}",
                )


def _equal(tensors: Mapping[str, Tensor], one: str, other: str, opened: OpenFiles) -> bool:
    a, b = tensors[one], tensors[other]
    if a.bytes != b.bytes:
        return False
    return all(
        np.array_equal(
            opened.bytes(a, at, min(at + STRIP_BYTES, a.bytes)),
            opened.bytes(b, at, min(at + STRIP_BYTES, b.bytes)),
        )
        for at in range(0, a.bytes, STRIP_BYTES)
    )
