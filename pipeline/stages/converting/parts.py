"""A weight's parts in the parent, read by rows and columns of the weight, so that a wide one is never held whole.

Parts that the parent stores transposed are turned on the disk first, in a file without a name, where a run of the
weight's rows would be too much: a row of the weight is a column there, and the disk has no columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import lcm, prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.pieces import column_spans
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.formats.base import Format, Params, Part
from shardmill.pipeline.formats.module import MAIN, Held
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.stages.job import ShardJob
from shardmill.pipeline.types import TensorRef

PIECE_ELEMENTS = 1 << 19
PIECE_COLUMNS = 1 << 17  # of a row that is read in parts
_TILE = 1024  # elements on a side of what is turned at once

NUMPY: Mapping[str, Any] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "I8": np.int8,
}  # fmt: skip


def columns_per(
    form: Format, parts: Mapping[str, Part], shape: tuple[int, int], params: Params
) -> dict[str, int]:
    """Role -> how many of the weight's columns one number of a row of the part covers; 0 where it is not by columns."""
    C = shape[1]
    found = {}
    for role, part in parts.items():
        across = part.shape[0] if part.axis else prod(part.shape[1:])
        if not part.per:
            found[role] = 1 if part.shape[:1] == (C,) and C > 1 else 0  # the group of each column
        elif role in MAIN:
            found[role] = C // across
        else:  # where columns name their group themselves, any group may be wanted
            found[role] = 0 if "groups" in parts else min(form.unit(shape, params)[1], C)
    return found


def runs(begin: int, end: int, columns: int, rows: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of rows of about a piece that make up [begin, end), none across a multiple of one of `rows`."""
    most = max(1, PIECE_ELEMENTS // columns) if columns <= PIECE_COLUMNS else 1
    while begin < end:
        last = min([begin + most, end, *(begin // step * step + step for step in rows)])
        yield begin, last
        begin = last


def spans(columns: int, units: tuple[int, ...], block: int) -> Iterator[tuple[int, int]]:
    """Runs of columns: whole `units`, and whole blocks of `block` columns or parts of one."""
    unit = lcm(*(step for step in units if step)) if any(units) else 1
    most = PIECE_COLUMNS // unit * unit
    whole = block if block > most else lcm(block, unit)
    fits = most and (whole <= most or whole >= columns or whole % unit == 0)
    yield from column_spans(0, columns, whole, most) if columns > PIECE_COLUMNS and fits else [(0, columns)]


class Parts:
    """The parts of one weight or stack, one matrix at a time."""

    def __init__(self, job: ShardJob, held: Held) -> None:
        self._job, self._held = job, held
        self._per = columns_per(held.form, held.parts, (held.shape[-2], held.shape[-1]), held.params)
        self._turned: dict[str, tuple[IO[bytes], Part]] = {}
        self._turned_of = -1

    @property
    def units(self) -> tuple[int, ...]:
        """Columns that a piece must hold whole."""
        return tuple(self._per.values())

    def aligned(self, begin: int, end: int) -> tuple[int, int]:
        """The rows that are decoded to have [begin, end): some formats pack several in a word."""
        step = lcm(*(part.per for part in self._held.parts.values() if part.axis and part.per))
        return begin // step * step, -(-end // step) * step

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows at whose multiples a piece must end."""
        return tuple(part.per for part in self._held.parts.values() if part.per > 1 and not part.axis)

    def read(self, expert: int, rows: tuple[int, int], cols: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Role -> what rows and columns [begin, end) of one matrix need of each part, as `decode` takes it."""
        self._turn(expert)
        return {role: self._part(role, expert, rows, cols) for role in self._held.parts}

    def close(self) -> None:
        for file, _ in self._turned.values():
            file.close()
        self._turned = {}

    def _part(self, role: str, expert: int, rows: tuple[int, int], cols: tuple[int, int]) -> NDArray[Any]:
        file, part = self._turned.get(role, (None, self._held.parts[role]))
        dtype = np.dtype(NUMPY.get(part.dtype, np.uint8))
        per = self._per[role]
        across = prod(part.shape[1:]) if part.per else prod(part.shape)
        first, last = part.span(*rows) if part.per else (0, 1)
        left, right = (cols[0] // per, -(-cols[1] // per)) if per else (0, across)
        found = np.empty((last - first, right - left), dtype)
        if right - left == across:
            self._fill(file, role, expert, found, first * across)
        else:
            for place, row in enumerate(found):
                self._fill(file, role, expert, row, (first + place) * across + left)
        if not part.per:
            return found.reshape(-1 if per else part.shape)
        return found if file is None else found.T

    def _fill(
        self, file: IO[bytes] | None, role: str, expert: int, target: NDArray[Any], element: int
    ) -> None:
        view = target.data.cast("B")
        if file is not None:
            count = os.preadv(file.fileno(), [view], element * target.itemsize)
            assert count == len(view), "the file was written whole"
            return
        ref = self._held.refs[role]
        source, data_begin = self._job.inputs[ref.shard]
        whole = ref.bytes // self._held.count
        source.read(view, data_begin + ref.begin + expert * whole + element * target.itemsize)

    def _turn(self, expert: int) -> None:
        """Has the transposed parts of a matrix on the disk as rows."""
        if self._turned_of == expert:
            return
        self._turned_of = expert
        for role, part in self._held.parts.items():
            if part.axis:
                if role not in self._turned:
                    path = self._job.sink.path  # os.devnull where blocks are only counted
                    file = TemporaryFile(dir=None if path == Path(os.devnull) else path.parent, buffering=0)  # noqa: SIM115  (see close)
                    self._turned[role] = file, replace(part, shape=(part.shape[1], part.shape[0]), axis=0)
                self._turn_part(self._turned[role][0], role, expert, part)

    def _turn_part(self, file: IO[bytes], role: str, expert: int, part: Part) -> None:
        n, m = part.shape
        item = np.dtype(NUMPY.get(part.dtype, np.uint8))
        try:
            for top in range(0, n, _TILE):
                for left in range(0, m, _TILE):
                    self._job.watch.done(0)
                    tile = np.empty((min(_TILE, n - top), min(_TILE, m - left)), item)
                    for place, row in enumerate(tile):
                        self._fill(None, role, expert, row, (top + place) * m + left)
                    for place, row in enumerate(np.ascontiguousarray(tile.T)):
                        os.pwrite(file.fileno(), row, ((left + place) * n + top) * item.itemsize)
        except OSError as failure:
            raise BuildError(
                f"{self._job.sink.path.parent}: a matrix of {n * m * item.itemsize} bytes cannot be turned there: "
                f"{failure.strerror}; make room, then build again"
            ) from None


class Output:
    """What becomes of one weight or stack, written in its place; each part's bytes must come in its own order."""

    def __init__(
        self,
        job: ShardJob,
        refs: Mapping[str, TensorRef],
        parts: Mapping[str, Part],
        per: Mapping[str, int],
        matrices: int,
        shape: tuple[int, int],
    ) -> None:
        """per: as columns_per says; shape: of one matrix."""
        self._job, self._refs, self._parts, self._per, self._matrices = job, refs, parts, per, matrices
        self._shape = np.array(shape, "<i8")
        self._hashes = {role: TensorHash() for role in refs}
        self._begun: set[tuple[str, int]] = set()

    def put(
        self, matrix: int, rows: tuple[int, int], cols: tuple[int, int], made: Mapping[str, NDArray[Any]]
    ) -> None:
        """Writes the parts `made` of some rows and columns, and with a matrix's first ones what is the whole's."""
        for role, ref in self._refs.items():
            part, whole = self._parts[role], ref.bytes // self._matrices
            if not part.per:
                if (role, matrix) not in self._begun:
                    self._begun.add((role, matrix))
                    self._write(role, matrix * whole, made.get(role, self._shape))
            elif role in made:
                row, per = whole // part.shape[0], self._per[role]
                column = cols[0] // per * (row // prod(part.shape[1:])) if per else 0
                self._write(role, matrix * whole + part.span(*rows)[0] * row + column, made[role])

    def _write(self, role: str, place: int, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).tobytes()
        self._job.sink.write(data, self._job.plan.header.data_begin + self._refs[role].begin + place)
        self._hashes[role].update(data)

    def digests(self) -> dict[str, str]:
        return {role: each.hexdigest() for role, each in self._hashes.items()}


class Count:
    """How many blocks there are, and in how many of them every number is decoded as it was, from pieces."""

    def __init__(self, unit: tuple[int, int], columns: int) -> None:
        self._unit, self._columns = unit, columns
        self._blocks = self._exact = self._first = 0
        self.changed = 0  # scales that are other numbers than before
        self._differ = np.zeros((0, 0), np.bool_)

    def begin(self, row: int, end: int) -> None:
        """Rows [row, end) follow, which are whole in every block."""
        r, c = self._unit
        self._first = row // r
        self._differ = np.zeros((-(-end // r) - self._first, -(-self._columns // c)), np.bool_)

    def add(self, row: int, col: int, differ: NDArray[np.bool_]) -> None:
        """differ: bool [k, n], of a part that begins at [row, col]."""
        r, c = self._unit
        k, n = differ.shape
        blocks = range(row // r, -(-(row + k) // r))
        by_rows = np.logical_or.reduceat(differ, [max(0, i * r - row) for i in blocks], axis=0)
        first = blocks.start - self._first
        self._differ[first : first + len(blocks), col // c : -(-(col + n) // c)] |= np.logical_or.reduceat(
            by_rows, np.arange(0, n, c), axis=1
        )

    def end(self) -> None:
        self._blocks += self._differ.size
        self._exact += int((~self._differ).sum())

    def counts(self) -> dict[str, int]:
        counts = {"blocks": self._blocks, "exact_blocks": self._exact}
        return counts | ({"changed_scales": self.changed} if self.changed else {})
