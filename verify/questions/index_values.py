"""Small tensors of whole numbers beside packed codes: each must say what the shapes say.

`g_idx` holds a group's number for each input. `weight_shape` holds the rows and columns before packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.by_elements import is_silent, state_of, state_tensor
from shardmill.verify.formats.forms.bitsandbytes import TABLES
from shardmill.verify.formats.linear import FLAT, Linear
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding

INDEX_BYTES_MAX = 4 << 20
TABLE_ERROR_MAX = 1e-4
INTEGERS = {"I32": "<i4", "I64": "<i8"}


def index_faults(checkpoint: Checkpoint, linears: Mapping[str, Linear]) -> Iterator[Finding]:
    with OpenFiles(checkpoint.source) as opened:
        for linear in linears.values():
            for leaf in ("g_idx", "weight_g_idx", "weight_shape"):
                tensor = linear.extras.get(leaf)
                if tensor is None or tensor.dtype not in INTEGERS or not 0 < tensor.bytes <= INDEX_BYTES_MAX:
                    continue
                if checkpoint.readable(tensor):
                    values = opened.bytes(tensor, 0, tensor.bytes).view(INTEGERS[tensor.dtype])
                    yield from (
                        _shape(linear, tensor, values)
                        if leaf == "weight_shape"
                        else _groups(linear, tensor, values)
                    )
            if linear.kind in FLAT and _all_readable(checkpoint, linear):
                found = list(_table(linear, opened))
                yield from () if found and is_silent(linear, opened) else found


def _groups(linear: Linear, tensor: Tensor, values: NDArray[np.integer[Any]]) -> Iterator[Finding]:
    """Numbers of groups; a table of which most are none is of another meaning, and named without an alarm."""
    grid = linear.grid
    if grid is None or len(grid.shape) != 2:
        return
    groups = grid.shape[0] if linear.kind == "gptq" else grid.shape[1]
    bad = np.flatnonzero((values < 0) | (values >= groups))
    if not len(bad):
        return
    place = int(bad[0])
    got = f"{int(values[place])} at {place}; {len(bad):,} of {len(values):,} like it"
    slug = "index-foreign" if 2 * len(bad) > len(values) else "index-range"
    yield Finding(slug, tensor.file, tensor.name, f"0 to {groups - 1}", got)


def _shape(linear: Linear, tensor: Tensor, values: NDArray[np.integer[Any]]) -> Iterator[Finding]:
    assert linear.weight is not None
    rows, words = (*linear.weight.shape, 0, 0)[:2]
    fits = (
        len(values) == 2 and values[0] == rows and words in (-(-int(values[1]) // 8), -(-int(values[1]) // 4))
    )
    if not fits:
        expected = f"[{rows}, {8 * words} or {4 * words}] for {linear.weight}"
        yield Finding("index-range", tensor.file, tensor.name, expected, str(values[:4].tolist()))


def _all_readable(checkpoint: Checkpoint, linear: Linear) -> bool:
    return all(checkpoint.readable(tensor) for tensor in (*linear.scales.values(), *linear.extras.values()))


def _table(linear: Linear, opened: OpenFiles) -> Iterator[Finding]:
    """bitsandbytes' table of sixteen numbers and its state; a missing one is a finding of its own."""
    table, state = linear.extras.get("quant_map"), state_tensor(linear)
    if table is not None and (table.dtype, table.shape) == ("F32", (16,)):
        values = opened.bytes(table, 0, table.bytes).view("<f4")
        far = np.abs(values - np.array(TABLES[linear.kind], np.float32)) > TABLE_ERROR_MAX
        if far.any() or not np.isfinite(values).all():
            place = int(np.argmax(far | ~np.isfinite(values)))
            expected = f"{TABLES[linear.kind][place]:.6g} at {place}, of {linear.kind}"
            yield Finding("table-foreign", table.file, table.name, expected, f"{values[place]:.6g}")
    if state is not None and table is not None and state_of(linear, opened) is None:
        expected = "shape, blocksize and offset in JSON that fit the codes and absmax"
        yield Finding("table-foreign", state.file, state.name, expected, "another state")
