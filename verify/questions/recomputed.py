"""The blocks of one weight, made again from the parent by the law of its numerics, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.encode import decodes_to
from shardmill.verify.formats.laws import REBLOCK, RECAST, bf16, nvfp4_of_mxfp4
from shardmill.verify.formats.linear import F32, SECOND, U8
from shardmill.verify.formats.matrices import Matrix, decoded, largest, values
from shardmill.verify.formats.opened import floats, scalar, scale_values
from shardmill.verify.questions.recomputable import OF_POWERS, Weight
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

Place = tuple[int, int, int, int]  # first row, row after the last, first column, column after the last
Wrong = tuple[str, str] | None  # (expected, got) where a block is not what its numerics make
_BYTES = ("F8_E4M3", "I8")  # of codes: one each


@dataclass(slots=True)
class Count:
    compared: int = 0
    exact: int = 0  # blocks that decode to the parent's numbers, where the manifest counts these
    wrong: int = 0
    totals: int = 0  # numbers of a whole weight that were made again
    findings: list[Finding] = field(default_factory=list)


def recompute(weight: Weight, blocks: Iterable[int], ours: OpenFiles, theirs: OpenFiles) -> Count:
    count = Count()
    scales, total = _stored(weight, ours)
    for number in blocks:
        count.compared += 1
        wrong = _compare(weight, int(number), scales, total, ours, theirs, count)
        if wrong is not None:
            count.wrong += 1
            row, col = divmod(int(number), weight.grid[1])
            where = f"block [{row}, {col}] of {list(weight.grid)}"
            tensor = weight.tensor
            count.findings.append(
                Finding("block-differs", tensor.file, tensor.name, wrong[0], f"{where}: {wrong[1]}")
            )
    return count


def recompute_total(
    weight: Weight, fused: Sequence[Weight], ours: OpenFiles, theirs: OpenFiles, count: Count
) -> None:
    """The number that the whole weight shares: of its own largest magnitude, and of those with the same number.

    fused: the weights of its fused module, itself among them.
    """
    assert weight.law is not None
    assert weight.law.total is not None
    stored = _stored(weight, ours)[1]
    sharing = [one for one in fused if _stored(one, ours)[1].tobytes() == stored.tobytes()]
    amax = np.float32(max(largest(one.parent, theirs) for one in sharing or [weight]))
    with np.errstate(all="ignore"):
        wanted = np.float32(weight.law.total(amax))
    count.totals += 1
    if wanted.tobytes() != stored.tobytes():
        count.wrong += 1
        where = f"{stored!r} for the whole weight"
        tensor = weight.tensor
        count.findings.append(Finding("block-differs", tensor.file, tensor.name, f"{wanted!r}", where))


def _stored(weight: Weight, ours: OpenFiles) -> tuple[F32, np.float32]:
    """The scales of all blocks, f32 like the grid, and the number of the whole weight, 1 where there is none."""
    linear = weight.child.linear
    if linear is None or linear.grid is None:
        return np.ones((1, 1), np.float32), np.float32(1)
    grid = linear.grid
    scales = scale_values(grid, ours.bytes(grid, 0, grid.bytes)).reshape(-1)
    if weight.law is not None and weight.law.by_row:
        return np.broadcast_to(scales[:1], weight.grid), np.float32(scales[0])
    second = linear.scales.get(SECOND.get(linear.kind, ""))
    total = np.float32(scalar(second, ours)[0]) if second is not None else np.float32(1)
    return scales.reshape(weight.grid), total


def _compare(
    weight: Weight,
    number: int,
    scales: F32,
    total: np.float32,
    ours: OpenFiles,
    theirs: OpenFiles,
    count: Count,
) -> Wrong:
    place = weight.place(number)
    if weight.numerics == REBLOCK:
        return _reblocked(weight, place, scales.flat[number], ours, theirs)
    if weight.law is None:
        return _rounded(weight, place, ours, theirs, count)
    source = _values(weight.parent, place, theirs)
    if not np.isfinite(source).all():
        return "a finite block in the parent", "NaN or infinity"
    codes, scale = _codes(weight.child, place, ours), np.float32(scales.flat[number])
    bf16_parent = weight.parent.linear is None and weight.parent.tensor.dtype == "BF16"
    if weight.numerics == "recover/1" and bf16_parent:
        if decodes_to(source, scale, codes):
            count.exact += 1
            return None
    elif weight.claims and np.array_equal(_values(weight.child, place, ours), source):
        count.exact += 1
        if weight.numerics == RECAST:
            return None
    made = _made(weight, place, source, total, ours, theirs)
    return _unlike(made, scale, codes) if made is not None else None


def _made(
    weight: Weight, place: Place, source: F32, total: np.float32, ours: OpenFiles, theirs: OpenFiles
) -> tuple[np.float32, U8] | None:
    """Scale and codes by the law; None where the child's block is proven otherwise."""
    assert weight.law is not None
    parent = weight.parent.linear
    with np.errstate(all="ignore"):  # a stored number may be anything
        if parent is not None and parent.kind in OF_POWERS and weight.numerics != RECAST:
            return _of_powers(weight, place, source, total, ours, theirs)
        return weight.law.encode(source, total)


def _of_powers(
    weight: Weight, place: Place, source: F32, total: np.float32, ours: OpenFiles, theirs: OpenFiles
) -> tuple[np.float32, U8] | None:
    """What a block that was MXFP4 becomes; None where it decodes to the parent's numbers, as all should that can."""
    assert weight.law is not None
    linear = weight.child.linear
    if linear is None or linear.kind not in SECOND:
        return weight.law.encode(source, total)
    if np.array_equal(_values(weight.child, place, ours).view(np.uint32), source.view(np.uint32)):
        return None
    first, last, left, _ = place
    begin = left // 32 * 32
    pair = _values(weight.parent, (first, last, begin, begin + 32), theirs)
    scale, codes = nvfp4_of_mxfp4(pair, total if linear.kind == "nvfp4" else np.float32(1) / total)
    return scale, codes[:, left - begin : left - begin + 16]


def _unlike(made: tuple[np.float32, U8], scale: np.float32, codes: U8) -> Wrong:
    want_scale, want_codes = made
    if scale.tobytes() != np.float32(want_scale).tobytes():
        return f"scale {want_scale!r}", f"scale {scale!r}"
    if np.array_equal(codes, want_codes):
        return None
    r, c = np.argwhere(codes != want_codes)[0]
    return f"code 0x{want_codes[r, c]:02x} at [{r}, {c}]", f"0x{codes[r, c]:02x}"


def _rounded(weight: Weight, place: Place, ours: OpenFiles, theirs: OpenFiles, count: Count) -> Wrong:
    """Floats that are the parent's values as BF16."""
    source, got = _values(weight.parent, place, theirs), _values(weight.child, place, ours)
    if not np.isfinite(source).all():
        return "a finite block in the parent", "NaN or infinity"
    count.exact += bool(np.array_equal(source, got))
    wanted = bf16(source)
    differs = wanted.view(np.uint32) != np.ascontiguousarray(got).view(np.uint32)
    if not differs.any():
        return None
    r, c = np.argwhere(differs)[0]
    return f"{wanted[r, c]!r} at [{r}, {c}]", repr(got[r, c])


def _reblocked(weight: Weight, place: Place, scale: np.float32, ours: OpenFiles, theirs: OpenFiles) -> Wrong:
    """The parent's own codes, under the parent's scale of the larger block in which this one lies."""
    codes, before = _codes(weight.child, place, ours), _codes(weight.parent, place, theirs)
    parent = weight.parent
    assert parent.linear is not None
    assert parent.linear.grid is not None
    grid = parent.linear.grid
    scales = scale_values(grid, theirs.bytes(grid, 0, grid.bytes)).reshape(-1)
    as_theirs = Weight(parent, parent, weight.numerics, parent.block, None)
    bank, within = divmod(place[0], as_theirs.bank_rows)
    down = as_theirs.grid[0] // max(parent.shape[0] // max(as_theirs.bank_rows, 1), 1)
    row = bank * down + within // parent.block[0]
    return _unlike((scales[row * as_theirs.grid[1] + place[2] // parent.block[1]], before), scale, codes)


def _values(matrix: Matrix, place: Place, opened: OpenFiles) -> F32:
    """f32 [rows, columns] of a block."""
    if matrix.linear is None and not matrix.transposed:
        return floats(matrix.tensor, _bytes(matrix.tensor, matrix.shape[1], place, opened))
    first, last, left, right = place
    return np.ascontiguousarray(values(matrix, opened, first, last)[:, left:right])


def _codes(matrix: Matrix, place: Place, opened: OpenFiles) -> U8:
    """u8 [rows, columns] of a block, a code each."""
    if matrix.tensor.dtype in _BYTES and matrix.tensor.bytes == matrix.shape[0] * matrix.shape[1]:
        return _bytes(matrix.tensor, matrix.shape[1], place, opened)
    first, last, left, right = place
    return decoded(matrix, opened, first, last)[1][:, left:right]


def _bytes(tensor: Tensor, columns: int, place: Place, opened: OpenFiles) -> NDArray[np.uint8]:
    """The bytes of one block: u8 [its rows, bytes of its columns], read row by row."""
    first, last, left, right = place
    width = DTYPE_BITS[tensor.dtype] // 8
    row = columns * width
    begin, end = left * width, right * width
    if begin == 0 and end == row:
        return opened.bytes(tensor, first * row, last * row).reshape(last - first, row)
    return np.stack([opened.bytes(tensor, r * row + begin, r * row + end) for r in range(first, last)])
