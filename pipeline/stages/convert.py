"""Stage `convert`: weights go from one number format to another, strip by strip, every part written in its place.

A format that is surveyed has two passes: first the largest number of the weight and of its whole fused group, then
the codes. Where the source is quantized, or the recipe says `lossless`, each block is counted: it is exact where it
decodes to the very f32 numbers that the parent's parts decode to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import GroupCodes, widened
from shardmill.pipeline.actions import Convert
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Arrays, Coded, Format, Part, Recast, Setting
from shardmill.pipeline.formats.kept import recast_of
from shardmill.pipeline.formats.module import MAIN, Held
from shardmill.pipeline.formats.scales import stored_scales
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.types import Piece
from shardmill.pipeline.stages.exact import exact_blocks
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import TensorRef

STRIP_BYTES = 1 << 20  # of the weight as f32 would be twice that
TURNED_ROWS, TURNED_ELEMENTS = 2048, 1 << 21  # of a transposed part a strip reads so much, and holds no more

_NUMPY: Mapping[str, Any] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8,
}  # fmt: skip


def convert(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each part of every weight that is converted; its bytes are in place."""
    weights: dict[str, list[Piece]] = {}
    for piece in pieces:
        if isinstance(piece.action, Convert):
            weights.setdefault(piece.source.name, []).append(piece)
    return {name: decoded for each in weights.values() for name, decoded in _converted(job, each).items()}


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight on its way: what the parent holds, and what is made of it."""

    job: ShardJob
    action: Convert
    source: TensorRef
    held: Held
    target: Format
    pieces: Mapping[str, TensorRef]  # role -> output tensor
    parts: Mapping[str, Part]  # role -> the target's own part of one matrix
    matrices: range  # of the parent's stack
    first_row: int  # in each of these
    rows: int

    @property
    def recast(self) -> Recast | None:
        return recast_of(self.held.form, self.target, self.action.numerics)

    @property
    def counted(self) -> bool:
        settings = self.job.settings
        return settings.lossless or self.action.lossless or self.held.form.name != "bf16"

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of what a loss is counted by."""
        own = (self.target.counted or self.target.unit)(shape, self.action.params)
        return (self.recast.unit if self.recast else None) or own


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
        weight = _Weight(job, action, source, held, target, refs, parts, matrices, first_row, rows)
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
    weight: _Weight, near: Mapping[str, TensorRef], reads: Iterable[TensorRef], sources: _Hashes
) -> dict[str, Decoded]:
    """Output tensor -> Decoded, of one weight or of one stack."""
    action, source = weight.action, weight.source
    amax, partners = _surveyed(weight, near, reads) if action.surveys else (None, {})
    made, counts = _encoded(weight, amax, sources)
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
    weight: _Weight, amax: np.float32 | None, sources: _Hashes
) -> tuple[dict[str, str], dict[str, int]]:
    """Role -> digest of each output, written; and the blocks that were counted."""
    hashes = {role: TensorHash() for role in weight.pieces}
    blocks = exact = changed = 0
    setting = _setting(weight, amax)
    for expert in weight.matrices:
        once = True
        for begin, end in _strips(weight):
            first = weight.first_row + begin
            arrays = _read(weight.job, weight.held, expert, first, first + end - begin, sources)
            try:
                made, values = _strip(weight, arrays, setting)
            except NonFinite as fault:
                raise _not_finite(weight, begin, fault) from None
            _put(weight, expert - weight.matrices.start, begin, end, made, hashes, once)
            once = False
            if weight.counted:
                all_blocks, same = exact_blocks(
                    values, weight.target.decode(made, setting), weight.unit(values.shape)
                )
                blocks, exact = blocks + all_blocks, exact + same
                changed += _changed_scales(weight, arrays, made)
            weight.job.watch.done(sum(each.nbytes for each in arrays.values()))
    counts = {"blocks": blocks, "exact_blocks": exact} if weight.counted else {}
    counts |= {"changed_scales": changed} if changed else {}
    return {role: each.hexdigest() for role, each in hashes.items()}, counts


def _strip(weight: _Weight, arrays: Arrays, setting: Setting) -> tuple[dict[str, NDArray[Any]], F32]:
    """The target's parts of a strip, and the strip's own numbers, f32 (where they are counted)."""
    held = weight.held
    default_arithmetic()  # of this thread: a library may have set it to flush small numbers
    if held.form.name == "bf16":
        strip = arrays["values"].T if held.parts["values"].axis else arrays["values"]
        strip = np.ascontiguousarray(strip)
        values = widened(strip) if weight.counted else np.empty(0, np.float32)
        assert weight.target.encode is not None
        return weight.target.encode(strip, setting), values
    read = _source_setting(held, setting.codes)
    values = held.form.decode(arrays, read)
    if weight.recast and np.isfinite(values).all():
        return weight.recast.encode(Coded(held.form, arrays, read, values), setting), values
    assert weight.target.encode is not None
    return weight.target.encode(values, setting), values


def _put(
    weight: _Weight,
    expert: int,
    begin: int,
    end: int,
    made: Arrays,
    hashes: Mapping[str, TensorHash],
    first: bool,
) -> None:
    """Writes a strip's parts; what belongs to the whole matrix is written with its first strip."""
    extra = {"shape": np.array([weight.rows, weight.held.shape[-1]], "<i8")}
    for role, ref in weight.pieces.items():
        part = weight.parts[role]
        if not part.per and not first:
            continue
        array = made[role] if role in made else extra[role]
        data = np.ascontiguousarray(array).tobytes()
        whole = ref.bytes // len(weight.matrices)
        row = whole // part.shape[0] if part.per and part.shape else 0  # bytes of an index of the first axis
        place = expert * whole + part.span(begin, end)[0] * row if part.per else expert * whole
        weight.job.sink.write(data, weight.job.plan.header.data_begin + ref.begin + place)
        hashes[role].update(data)


def _strips(weight: _Weight) -> Iterator[tuple[int, int]]:
    """Runs of rows that are whole in every part of the source and of the target."""
    R, C = weight.rows, weight.held.shape[-1]
    parts = [*weight.held.parts.values(), *weight.parts.values()]
    step = lcm(*(part.per for part in parts if part.per))
    rows = max(1, STRIP_BYTES // (2 * C))
    if any(part.axis for part in weight.held.parts.values()):
        rows = max(rows, min(TURNED_ROWS, TURNED_ELEMENTS // C))
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
        dtype = np.dtype(_NUMPY.get(part.dtype, np.uint8))
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
    weight: _Weight, near: Mapping[str, TensorRef], reads: Iterable[TensorRef]
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


def _largest(weight: _Weight, held: Held, seen: _Hashes | None) -> np.float32:
    codes, largest = _codes(weight.job), np.float32(0)
    rows = held.shape[-2]  # of all members: what is unstacked shares the number of its matrix
    surveyed = replace(weight, held=held, first_row=0, rows=rows)
    for begin, end in _strips(surveyed):
        arrays = _read(weight.job, held, weight.matrices.start, begin, end, seen)
        default_arithmetic()
        if weight.recast and weight.recast.survey:
            found = weight.recast.survey(arrays)
        elif held.form.name == "bf16":
            found = np.abs(widened(arrays["values"])).max(initial=0)
        else:
            found = np.abs(held.form.decode(arrays, _source_setting(held, codes))).max(initial=0)
        if not np.isfinite(found):
            raise BuildError(
                f"{held.refs[next(iter(held.refs))].name}: holds a number that is not finite in rows {begin} to {end}; "
                f"fix the parent checkpoint, or keep this tensor's family"
            )
        largest = max(largest, np.float32(found))
    return largest


def _codes(job: ShardJob) -> GroupCodes:
    kernels = job.worker.kernels
    key = f"codes {job.settings.kernel}"
    if key not in kernels:
        kernels[key] = GroupCodes(job.settings.kernel)
    found: GroupCodes = kernels[key]
    return found


def _setting(weight: _Weight, amax: np.float32 | None) -> Setting:
    action = weight.action
    return Setting(action.params, action.spelling(), _codes(weight.job), action.numerics, amax)


def _source_setting(held: Held, codes: GroupCodes) -> Setting:
    return Setting(held.params, held.spelling, codes, held.spelling.law)


def _changed_scales(weight: _Weight, arrays: Arrays, made: Arrays) -> int:
    """Of a weight that stays in its format, how many scales of a strip are other numbers than before."""
    if weight.held.form is not weight.target or "scales" not in made:
        return 0
    before, after = stored_scales(arrays["scales"]).reshape(-1), stored_scales(made["scales"]).reshape(-1)
    return int((before != after).sum()) if before.size == after.size else 0


def _not_finite(weight: _Weight, begin: int, fault: NonFinite) -> BuildError:
    return BuildError(
        f"{weight.source.shard}: {weight.source.name}: the weight at row {begin + fault.row}, column {fault.col} is "
        f"{fault.value}, which {weight.action.to} can't hold; fix the parent checkpoint, or keep this tensor's family"
    )
