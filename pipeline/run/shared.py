"""What each worker does: whole shards, and where there would be too few, parts of shards.

The strips of a weight are independent; only the sha256 of its file goes from the first byte to the last. So a shard
that would keep one worker busy while others have nothing left is encoded by several, a large weight by its rows, and
then finished by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardmill.kernels.block_fp8 import BlockEncoder, Rows, rows_of
from shardmill.kernels.group_codes import GroupCodes
from shardmill.pipeline.actions import Convert, QuantizeBlock
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.run import shard
from shardmill.pipeline.run.processes import Finish, Unit
from shardmill.pipeline.run.shard import Portion, ShardTask
from shardmill.pipeline.stages.converting.weight import encode_a_few
from shardmill.pipeline.stages.job import Watch, Worker

PART_BYTES_MIN = 8 << 20  # of the parent; less is done sooner than handed out
Work = Callable[[Mapping[str, Any], Watch, Worker], Finish]


def shared_out(tasks: Mapping[str, ShardTask], workers: int) -> tuple[list[Unit], dict[str, Work]]:
    """Units in the order in which they are begun, and what to do for each. That of a file's name gives its receipt."""
    units: list[Unit] = []
    work: dict[str, Work] = {}
    for file, task in tasks.items():
        parts = _parts(task, _workers_for(file, tasks, workers))
        if len(parts) < 2:
            units.append(Unit(file, file))
            work[file] = partial(_whole, task)
            continue
        begun = f"{file}: begun"
        names = [f"{file}: part {number}" for number in range(len(parts))]
        units += [Unit(begun, file), *(Unit(name, file, frozenset([begun])) for name in names)]
        units.append(Unit(file, file, frozenset([begun, *names])))
        work[begun] = partial(_begun, task)
        work |= {
            name: partial(_part, task, portions, begun) for name, portions in zip(names, parts, strict=True)
        }
        work[file] = partial(_rest, task, names, begun)
    return units, work


def _workers_for(file: str, tasks: Mapping[str, ShardTask], workers: int) -> int:
    """How many workers a shard is worth: more than one where it has more than its share, or is left over at the end."""
    loads = {name: task.plan.header.file_bytes for name, task in tasks.items()}
    if (load := loads[file]) * workers > sum(loads.values()):
        return -(-2 * load * workers // sum(loads.values()))  # halves, as the last part is done alone
    files, over = list(tasks), len(tasks) % workers
    return workers // over if 0 < over <= workers // 2 and file in files[len(files) - over :] else 1


def _parts(task: ShardTask, most: int) -> list[list[Portion]]:
    """What is encoded or decoded of a shard, in groups of about one size."""
    if most < 2 or not task.dag.by_piece():
        return []
    weights: dict[str, list[Piece]] = {}
    for piece in task.plan.pieces:
        if piece.part != "bytes":
            weights.setdefault(piece.source.name, []).append(piece)
    total = sum(_load(pieces) for pieces in weights.values())
    count = min(most, total // PART_BYTES_MIN)
    if count < 2:
        return []
    portions = [each for pieces in weights.values() for each in _portions(pieces, -(-total // count))]
    groups: list[list[Portion]] = [[] for _ in range(count)]
    loads = [0] * count
    for load, portion in sorted(portions, key=lambda each: each[0], reverse=True):
        lightest = loads.index(min(loads))
        groups[lightest].append(portion)
        loads[lightest] += load
    return [group for group in groups if group]


def _load(pieces: Sequence[Piece]) -> int:
    """Bytes to be read, or where scales alone are made to be written."""
    computed = [piece.source.bytes for piece in pieces if piece.part in ("codes", "values")]
    return max(computed, default=sum(piece.ref.bytes for piece in pieces))


def _portions(pieces: Sequence[Piece], most: int) -> list[tuple[int, Portion]]:
    """(bytes, portion) of one weight: its rows apart where it is larger than `most`, and rows can be."""
    action, source = pieces[0].action, pieces[0].source
    load = _load(pieces)
    if not isinstance(action, QuantizeBlock) or load <= most:
        return [(load, Portion(tuple(pieces)))]
    R, step = source.shape[0], action.block.rows
    rows = -(-R * most // load // step) * step or step
    return [
        (load * (min(row + rows, R) - row) // R, Portion(tuple(pieces), (row, min(row + rows, R))))
        for row in range(0, R, rows)
    ]


def _whole(task: ShardTask, results: Mapping[str, Any], watch: Watch, worker: Worker) -> Finish:
    return partial(shard.finish_shard, shard.fill(task, watch, worker), task)


def _begun(task: ShardTask, results: Mapping[str, Any], watch: Watch, worker: Worker) -> Finish:
    staged = shard.begin_shared(task)
    return lambda: staged


def _part(
    task: ShardTask,
    portions: Sequence[Portion],
    begun: str,
    results: Mapping[str, Any],
    watch: Watch,
    worker: Worker,
) -> Finish:
    products = shard.fill_part(task, portions, results[begun], watch, worker)
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


def compiled(tasks: Iterable[ShardTask]) -> dict[str, Any]:
    """What Worker.kernels begins with: kernels that have encoded a little of every kind to come, so are compiled."""
    kernels: dict[str, Any] = {}
    seen = set()
    for task in tasks:
        name = task.settings.kernel
        for piece in task.plan.pieces:
            action, dtype = piece.action, piece.source.dtype
            if not isinstance(action, QuantizeBlock | Convert) or piece.part == "scales":
                continue
            if (id(action), dtype) in seen:  # a family has one action
                continue
            seen.add((id(action), dtype))
            if isinstance(action, QuantizeBlock):
                kernel = kernels.setdefault(name, rows_of(name))
                if kernel.name != "numpy":
                    _encode_one_block(kernel, action, dtype)
            else:
                codes = kernels.setdefault(f"codes {name}", GroupCodes(name))
                if codes.name != "numpy":
                    encode_a_few(action, dtype, codes)
    return kernels


def _encode_one_block(kernel: Rows, action: QuantizeBlock, dtype: str) -> None:
    block = (min(action.block.rows, 128), min(action.block.cols, 128))
    ramp = np.arange(1, 1 + block[0] * block[1], dtype=np.float32).reshape(block)
    source = {
        "BF16": (ramp.view(np.uint32) >> 16).astype(np.uint16),
        "F16": (ramp / ramp.size).astype(np.float16),
    }
    BlockEncoder(action.numerics, block, kernel).encode(
        source.get(dtype, ramp), np.empty(block, np.uint8), np.empty((1, 1), np.float32)
    )
