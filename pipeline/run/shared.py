"""What each worker does: whole shards, and where there would be too few, parts of shards.

The strips of a shard are independent; only the sha256 of its file goes from the first byte to the last. So a shard
that would keep one worker busy while others have nothing left is encoded by several, and then finished by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardmill.kernels.block_fp8 import BlockEncoder, Rows, rows_of
from shardmill.pipeline.actions import QuantizeBlock
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.run import shard
from shardmill.pipeline.run.processes import Finish, Unit
from shardmill.pipeline.run.shard import ShardTask
from shardmill.pipeline.stages.job import Watch, Worker

PART_BYTES_MIN = 8 << 20  # of the parent; less is done sooner than handed out
Work = Callable[[Mapping[str, Any], Watch, Worker], Finish]


def shared_out(tasks: Mapping[str, ShardTask], workers: int) -> tuple[list[Unit], dict[str, Work]]:
    """Units in the order in which they are begun, and what to do for each. That of a file's name gives its receipt."""
    units: list[Unit] = []
    work: dict[str, Work] = {}
    files, over = list(tasks), len(tasks) % workers
    shared = set(files[len(files) - over :]) if over <= workers // 2 else set()
    for file in files:
        parts = _parts(tasks[file], workers // over) if file in shared else []
        if len(parts) < 2:
            units.append(Unit(file, file))
            work[file] = partial(_whole, tasks[file])
            continue
        begun = f"{file}: begun"
        names = [f"{file}: part {number}" for number in range(len(parts))]
        units += [Unit(begun, file), *(Unit(name, file, frozenset([begun])) for name in names)]
        units.append(Unit(file, file, frozenset([begun, *names])))
        work[begun] = partial(_begun, tasks[file])
        work |= {
            name: partial(_part, tasks[file], pieces, begun)
            for name, pieces in zip(names, parts, strict=True)
        }
        work[file] = partial(_rest, tasks[file], names, begun)
    last = {unit.name for unit in units if unit.after and unit.name == unit.file}
    return [unit for unit in units if unit.name not in last] + [u for u in units if u.name in last], work


def _parts(task: ShardTask, most: int) -> list[tuple[Piece, ...]]:
    """Its pieces that are encoded or decoded, in groups of about one size."""
    pieces = [piece for piece in task.plan.pieces if piece.part != "bytes"] if task.dag.by_piece() else []
    total = sum(_load(piece) for piece in pieces)
    count = min(most, total // PART_BYTES_MIN)
    if count < 2:
        return []
    groups: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=_load, reverse=True):
        lightest = loads.index(min(loads))
        groups[lightest].append(piece)
        loads[lightest] += _load(piece)
    return [tuple(group) for group in groups if group]


def _load(piece: Piece) -> int:
    return piece.source.bytes if piece.part in ("codes", "values") else piece.ref.bytes


def _whole(task: ShardTask, results: Mapping[str, Any], watch: Watch, worker: Worker) -> Finish:
    return partial(shard.finish_shard, shard.fill(task, watch, worker), task)


def _begun(task: ShardTask, results: Mapping[str, Any], watch: Watch, worker: Worker) -> Finish:
    staged = shard.begin_shared(task)
    return lambda: staged


def _part(
    task: ShardTask,
    pieces: tuple[Piece, ...],
    begun: str,
    results: Mapping[str, Any],
    watch: Watch,
    worker: Worker,
) -> Finish:
    products = shard.fill_part(task, pieces, results[begun], watch, worker)
    return lambda: products


def _rest(
    task: ShardTask,
    names: Sequence[str],
    begun: str,
    results: Mapping[str, Any],
    watch: Watch,
    worker: Worker,
) -> Finish:
    parts = [results[name] for name in names]
    return partial(shard.finish_shard, shard.fill_rest(task, parts, results[begun], watch, worker), task)


def compiled(tasks: Iterable[ShardTask]) -> dict[str, Rows]:
    """Kernel's name -> the kernel, compiled: it has encoded a block of every kind to come."""
    rows: dict[str, Rows] = {}
    seen = set()
    for task in tasks:
        for piece in task.plan.pieces:
            action = piece.action
            if piece.part != "codes" or not isinstance(action, QuantizeBlock):
                continue
            kind = (action.numerics, action.block, piece.source.dtype)
            if kind in seen:
                continue
            seen.add(kind)
            kernel = rows.setdefault(task.settings.kernel, rows_of(task.settings.kernel))
            if kernel.name != "numpy":
                _encode_one_block(kernel, action, piece.source.dtype)
    return rows


def _encode_one_block(kernel: Rows, action: QuantizeBlock, dtype: str) -> None:
    block = (action.block.rows, action.block.cols)
    ramp = np.arange(1, 1 + block[0] * block[1], dtype=np.float32).reshape(block)
    source = {
        "BF16": (ramp.view(np.uint32) >> 16).astype(np.uint16),
        "F16": (ramp / ramp.size).astype(np.float16),
    }
    BlockEncoder(action.numerics, block, kernel).encode(
        source.get(dtype, ramp), np.empty(block, np.uint8), np.empty((1, 1), np.float32)
    )
