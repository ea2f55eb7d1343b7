"""Stage `convert`: weights go from one number format to another, strip by strip, every part written in its place.

A format that is surveyed has two passes: first the largest number of the weight and of its whole fused group, then
the codes. Where the source is quantized, or the recipe says `lossless`, each block is counted: it is exact where it
decodes to the very f32 numbers that the parent's parts decode to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.actions import Convert
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Arrays, Part, Setting
from shardmill.pipeline.formats.module import MAIN, Held
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.converting.parts import NUMPY
from shardmill.pipeline.stages.converting.pieces import encoded_in_pieces, wide_rows
from shardmill.pipeline.stages.converting.weight import (
    COLUMN_ROWS,
    HELD_ELEMENTS,
    Weight,
    changed_scales,
    codes_of,
    is_transposed,
    is_wide,
    made_of,
    not_finite,
    numbers_of,
    output_of,
    setting_of,
    step_of,
)
from shardmill.pipeline.stages.exact import exact_blocks
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 20  # of the weight as f32 would be twice that


def convert(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each part of every weight that is converted; its bytes are in place."""
    weights: dict[str, list[Piece]] = {}
    for piece in pieces:
        if isinstance(piece.action, Convert):
            weights.setdefault(piece.source.name, []).append(piece)
    return {name: decoded for each in weights.values() for name, decoded in _converted(job, each).items()}


def _converted(job: ShardJob, pieces: list[Piece]) -> dict[str, Decoded]:
    first = pieces[0]
    action, source = first.action, first.source
    assert isinstance(action, Convert)
    near = {ref.name: ref for ref in (source, *first.reads)}
    held = action.held(source, near)
    assert isinstance(held, Held), held
    target = formats()[action.to]
    by_name = {piece.ref.name: piece.ref for piece in pieces}
    sources = _Hashes(held.refs)
    made: dict[str, Decoded] = {}
    for matrices, first_row, named in _weights(action, source, held):
        refs = {role: by_name[name] for role, (name, _) in named.items()}
        rows = held.shape[-2] // action.parts_of_rows(source)
        parts = {part.role: part for part in target.parts((rows, held.shape[-1]), action.params)}
        weight = Weight(job, action, source, held, target, refs, parts, matrices, first_row, rows)
        made.update(_of_one(weight, near, first.reads, sources))
    main = action.mains(source)[0]
    made[main] = replace(made[main], sources={**made[main].sources, **sources.digests(job)})
    return made


def _weights(
    action: Convert, source: TensorRef, held: Held
) -> Iterator[tuple[range, int, Mapping[str, tuple[str, Part]]]]:
    """(matrices of the parent's stack, first row in each, role -> (name, part)) of every weight that is made."""
    if not action.unstack:
        yield range(held.count), 0, action.made(source)
        return
    for module, expert, row in action.members(source):
        yield range(expert, expert + 1), row, action.made_of(source, module)


def _of_one(
    weight: Weight, near: Mapping[str, TensorRef], reads: Iterable[TensorRef], sources: _Hashes
) -> dict[str, Decoded]:
    """Output tensor -> Decoded, of one weight or of one stack."""
    action, source = weight.action, weight.source
    amax, partners = _surveyed(weight, near, reads) if action.surveys else (None, {})
    made, counts = encoded_in_pieces(weight, amax) if is_wide(weight) else _encoded(weight, amax, sources)
    # A lossless build counts all weights before it refuses.
    at_once = action.lossless and not weight.job.settings.lossless
    if at_once and counts["exact_blocks"] < counts["blocks"]:
        raise BuildError(
            f"{source.shard}: {source.name}: {counts['blocks'] - counts['exact_blocks']} of {counts['blocks']} blocks "
            f"lose something as {action.to}; drop `lossless`, choose another format, or keep this tensor's family"
        )
    main = next(role for role in MAIN if role in weight.pieces)
    return {
        ref.name: Decoded(
            made[role], partners if role == main else {}, counts=(counts or None) if role == main else None
        )
        for role, ref in weight.pieces.items()
    }


def _encoded(
    weight: Weight, amax: np.float32 | None, sources: _Hashes
) -> tuple[dict[str, str], dict[str, int]]:
    """Role -> digest of each output, written; and the blocks that were counted."""
    output = output_of(weight)
    blocks = exact = changed = 0
    setting = setting_of(weight, amax)
    for expert in weight.matrices:
        for begin, end in _strips(weight):
            first = weight.first_row + begin
            arrays = _read(weight.job, weight.held, expert, first, first + end - begin, sources)
            try:
                made, values = _strip(weight, arrays, setting)
            except NonFinite as fault:
                raise not_finite(weight, begin, 0, fault) from None
            output.put(expert - weight.matrices.start, (begin, end), (0, weight.held.shape[-1]), made)
            if weight.counted:
                all_blocks, same = exact_blocks(
                    values, weight.target.decode(made, setting), weight.unit(values.shape)
                )
                blocks, exact = blocks + all_blocks, exact + same
                changed += changed_scales(weight, arrays, made)
            weight.job.watch.done(sum(each.nbytes for each in arrays.values()))
    counts = {"blocks": blocks, "exact_blocks": exact} if weight.counted else {}
    counts |= {"changed_scales": changed} if changed else {}
    return output.digests(), counts


def _strip(weight: Weight, arrays: Arrays, setting: Setting) -> tuple[dict[str, NDArray[Any]], F32]:
    """The target's parts of a strip, and the strip's own numbers, f32 (where they are counted)."""
    strip = numbers_of(weight.held, arrays, setting.codes)
    values = widened(strip) if weight.counted else np.empty(0, np.float32)
    return made_of(weight, arrays, strip, setting), values


def _strips(weight: Weight) -> Iterator[tuple[int, int]]:
    """Runs of rows that are whole in every part of the source and of the target."""
    R, C = weight.rows, weight.held.shape[-1]
    step = step_of(weight)
    rows = max(1, STRIP_BYTES // (2 * C))
    if is_transposed(weight):
        rows = max(rows, min(COLUMN_ROWS[1], HELD_ELEMENTS // C))
    rows = max(step, rows // step * step)
    for begin in range(0, R, rows):
        yield begin, min(begin + rows, R)


def _read(
    job: ShardJob, held: Held, expert: int, begin: int, end: int, sources: _Hashes | None
) -> dict[str, NDArray[Any]]:
    """Role -> what rows [begin, end) of one matrix need of each part, as it is stored."""
    arrays = {}
    for role, part in held.parts.items():
        ref = held.refs[role]
        source, data_begin = job.inputs[ref.shard]
        first, last = part.span(begin, end)
        whole = ref.bytes // held.count
        place = data_begin + ref.begin + expert * whole
        dtype = np.dtype(NUMPY.get(part.dtype, np.uint8))
        if part.axis:
            arrays[role] = _columns(source, place, part, dtype, first, last)
            continue
        shape = (last - first, *part.shape[1:]) if part.per else part.shape
        row = whole // (part.shape[0] if part.shape else 1)
        size = (last - first) * row if part.per else whole
        data = memoryview(bytearray(size))
        source.read(data, place + (first * row if part.per else 0))
        arrays[role] = np.frombuffer(data, dtype).reshape(shape)
        if sources is not None and (part.per or begin == 0):
            sources.update(role, data)
    return arrays


def _columns(source: Any, place: int, part: Part, dtype: Any, first: int, last: int) -> NDArray[Any]:
    """Columns [first, last) of a part [n, m]: n short reads."""
    n, m = part.shape
    found = np.empty((n, last - first), dtype)
    for row in range(n):
        source.read(memoryview(found[row]).cast("B"), place + (row * m + first) * dtype.itemsize)
    return found


class _Hashes:
    """Digests of a weight's parts in the parent: taken as they are read, or of their own pass where columns are."""

    def __init__(self, refs: Mapping[str, TensorRef]) -> None:
        self._refs = refs
        self._seen = {role: TensorHash() for role in refs}
        self._bytes = dict.fromkeys(refs, 0)

    def update(self, role: str, data: memoryview) -> None:
        self._seen[role].update(data)
        self._bytes[role] += len(data)

    def digests(self, job: ShardJob) -> dict[str, str]:
        return {
            ref.name: self._seen[role].hexdigest() if self._bytes[role] == ref.bytes else _digest(job, ref)
            for role, ref in self._refs.items()
        }


def _digest(job: ShardJob, ref: TensorRef) -> str:
    source, data_begin = job.inputs[ref.shard]
    seen, buffer = TensorHash(), job.worker.buffers.get("strip", STRIP_BYTES)
    for _, chunk in source.chunks(buffer, data_begin + ref.begin, data_begin + ref.end):
        seen.update(chunk)
    return seen.hexdigest()


def _surveyed(
    weight: Weight, near: Mapping[str, TensorRef], reads: Iterable[TensorRef]
) -> tuple[np.float32, dict[str, str]]:
    """The largest number of the weight and of its fused group; and digests of the group's other weights."""
    largest = _largest(weight, weight.held, None)
    digests: dict[str, str] = {}
    if weight.action.unstack:
        return largest, digests
    own = {ref.name for ref in weight.held.refs.values()}
    for ref in reads:
        if ref.name in own or weight.action.consumes(ref.name, {"source": weight.action.source}):
            continue
        partner = weight.action.held(ref, near)
        assert isinstance(partner, Held), partner
        seen = _Hashes(partner.refs)
        largest = max(largest, _largest(weight, partner, seen))
        digests.update(seen.digests(weight.job))
    return largest, digests


def _largest(weight: Weight, held: Held, seen: _Hashes | None) -> np.float32:
    codes, largest = codes_of(weight.job), np.float32(0)
    rows = held.shape[-2]  # of all members: what is unstacked shares the number of its matrix
    surveyed = replace(weight, held=held, first_row=0, rows=rows)
    for begin, end, arrays in wide_rows(surveyed) if is_wide(surveyed) else _whole_rows(surveyed, seen):
        default_arithmetic()  # of this thread: a library may have set it to flush small numbers
        if weight.recast and weight.recast.survey:
            found = weight.recast.survey(arrays)
        else:
            found = np.abs(widened(numbers_of(held, arrays, codes))).max(initial=0)
        if not np.isfinite(found):
            raise BuildError(
                f"{held.refs[next(iter(held.refs))].name}: holds a number that is not finite in rows {begin} to {end}; "
                f"fix the parent checkpoint, or keep this tensor's family"
            )
        largest = max(largest, np.float32(found))
    return largest


def _whole_rows(weight: Weight, seen: _Hashes | None) -> Iterator[tuple[int, int, Arrays]]:
    for begin, end in _strips(weight):
        yield begin, end, _read(weight.job, weight.held, weight.matrices.start, begin, end, seen)
