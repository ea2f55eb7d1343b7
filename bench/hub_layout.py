"""How many bytes a hub with content-defined chunks stores anew for a child, by the order of a shard's tensors.

A hub like Xet divides a file where its content says so: a rolling hash picks one place in 64 KiB, a chunk has 8 to
128 KiB, and a chunk that the storage has is not stored again. A chunk that lies in kept tensors alone is the parent's;
one that reaches over an edge to new bytes is new. This draws the places by chance, as a hash does on weights, on the
headers of the real layout, and compares the order that is written with new tensors in one run. It reads headers alone.

    shardmill toy-parent build/headers-parent --size headers
    python -m bench.hub_layout build/headers-parent [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shardmill.pipeline.commands.recipe import load_recipe
from shardmill.pipeline.plan.types import Piece, ShardPlan
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Prepared

MEAN, LEAST, MOST = 64 << 10, 8 << 10, 128 << 10  # bytes of a chunk

Run = tuple[
    str, int
]  # a stretch of content: its name, "new:..." for bytes that the parent lacks, and its bytes
Chunk = tuple[tuple[str, int, int], ...]  # its content: names with the bytes that it begins and ends at


class Places:
    """Where the rolling hash would divide a content: drawn once a name, so that equal content divides equally."""

    def __init__(self, seed: int) -> None:
        self._rng, self._drawn = np.random.default_rng(seed), dict[str, np.ndarray]()

    def of(self, run: Run) -> np.ndarray:
        name, size = run
        if name not in self._drawn:
            count = self._rng.poisson(size / MEAN)
            self._drawn[name] = np.sort(self._rng.integers(1, max(size, 2), count))
        return self._drawn[name]


def chunks(file: Sequence[Run], places: Places) -> Iterator[Chunk]:
    """The chunks of a file that consists of these stretches."""
    ends = np.cumsum([size for _, size in file])
    begins = ends - [size for _, size in file]
    marks = np.concatenate([begin + places.of(run) for begin, run in zip(begins, file, strict=True)])
    begin, total, run = 0, int(ends[-1]), 0
    while begin < total:
        at = int(np.searchsorted(marks, begin + LEAST))
        end = min(int(marks[at]) if at < len(marks) else total, begin + MOST, total)
        while ends[run] <= begin:
            run += 1
        parts, inside = [], run
        while begin < end:
            upto = min(end, int(ends[inside]))
            parts.append((file[inside][0], begin - int(begins[inside]), upto - int(begins[inside])))
            begin, inside = upto, inside + 1
        yield tuple(parts)


def stored_anew(files: Iterable[Sequence[Run]], known: set[Chunk], places: Places) -> int:
    """Bytes of the chunks that the storage does not know."""
    fresh = {chunk for file in files for chunk in chunks(file, places)} - known
    return sum(end - begin for chunk in fresh for _, begin, end in chunk)


def runs_of(shard: ShardPlan, together: bool) -> list[Run]:
    """The stretches of an output shard; `together` puts the new tensors in front of those that are kept."""
    pieces = sorted(shard.pieces, key=_is_kept) if together else shard.pieces
    header: Run = (f"new:{shard.file}", shard.header.file_bytes - shard.header.data_bytes)
    return [header, *((_name(piece), piece.ref.bytes) for piece in pieces if piece.ref.bytes)]


def _is_kept(piece: Piece) -> bool:
    return piece.action.kind == "copy"


def _name(piece: Piece) -> str:
    return piece.source.name if _is_kept(piece) else f"new:{piece.ref.name}"


def measure(prepared: Prepared, seed: int) -> Mapping[str, int]:
    """Bytes: of the rewritten shards, of their new tensors, and what a hub stores anew in each order."""
    places = Places(seed)
    shards = [shard for shard in prepared.plan.shards if shard.rewritten]
    names = {name for shard in shards for name in shard.inputs}
    parents = [
        [
            (f"parent:{file}", header.file_bytes - header.data_bytes),
            *((ref.name, ref.bytes) for ref in header.tensors),
        ]
        for header in prepared.parent.headers
        if (file := header.shard) in names
    ]
    known = {chunk for file in parents for chunk in chunks(file, places)}
    return {
        "rewritten shards": sum(shard.header.file_bytes for shard in shards),
        "new tensors in them": sum(p.ref.bytes for shard in shards for p in shard.pieces if not _is_kept(p)),
        "stored anew, as written": stored_anew([runs_of(shard, False) for shard in shards], known, places),
        "stored anew, new tensors together": stored_anew(
            [runs_of(shard, True) for shard in shards], known, places
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parent", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("pipeline.toml"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for what, count in measure(
        prepare(load_recipe(asked.recipe), asked.parent, None, False), asked.seed
    ).items():
        print(f"{what:<36} {count:>18,} bytes")


if __name__ == "__main__":
    main()
