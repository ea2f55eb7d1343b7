"""bitsandbytes' four bits as numbers: an entry of a table of 16, times the largest magnitude of the element's block.

The weight is U8 [elements / 2, 1], two codes a byte, the first in the high nibble; blocks are of elements in the order
of rows. `absmax` is F32, or U8 where it was quantized again: then it is an entry of `nested_quant_map` times
`nested_absmax` of its block of blocks, plus an offset. Shape, block sizes and offset are in the JSON `quant_state`.
(bitsandbytes `functional.py`, QuantState.as_dict and dequantize_4bit.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np

from shardmill.verify.formats.linear import F32, FLAT, U8, Linear, Shape
from shardmill.verify.formats.opened import floats
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles

BY_ELEMENTS = FLAT
STATE_BYTES_MAX = 4_096
COLUMNS_MAX = 1 << 22
LIVE_RATIO = 16.0  # below the median by this, an absmax was made of zeros
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class State:
    """What `quant_state` says of one weight."""

    shape: Shape
    block: int  # elements under one absmax
    nested: int = 0  # blocks under one nested_absmax; 0 = absmax is F32
    offset: float = 0.0


def state_of(linear: Linear, opened: OpenFiles) -> State | None:
    """The weight's state, if the file has a sound one and every part has the length that it asks for."""
    said = _said(linear, opened)
    state = _read(said) if said is not None else None
    return state if state is not None and _fits(linear, state) else None


def is_silent(linear: Linear, opened: OpenFiles) -> bool:
    """Whether the state says no shape: such a weight can't be decoded, and no more is known to be wrong with it."""
    said = _said(linear, opened)
    return said is not None and "shape" not in said and "blocksize" not in said


def _said(linear: Linear, opened: OpenFiles) -> dict[str, object] | None:
    tensor = state_tensor(linear)
    if linear.kind not in BY_ELEMENTS or linear.weight is None or tensor is None:
        return None
    if tensor.dtype != "U8" or not 0 < tensor.bytes <= STATE_BYTES_MAX:
        return None
    try:
        said = bounded_json.loads(opened.bytes(tensor, 0, tensor.bytes).tobytes())
    except BadJsonError:
        return None
    return said if isinstance(said, dict) else None


def state_tensor(linear: Linear) -> Tensor | None:
    return next(
        (linear.extras[leaf] for leaf in ("quant_state_nf4", "quant_state_fp4") if leaf in linear.extras),
        None,
    )


def _read(said: dict[str, object]) -> State | None:
    shape, block, nested = said.get("shape"), said.get("blocksize"), said.get("nested_blocksize", 0)
    offset = said.get("nested_offset", 0.0)
    if (
        not isinstance(shape, list)
        or len(shape) < 2
        or not all(type(n) is int and 0 < n < 1 << 40 for n in shape)
    ):
        return None
    if type(block) is not int or block not in BLOCKS or type(nested) is not int or not 0 <= nested <= 1 << 20:
        return None
    if not isinstance(offset, (int, float)) or not isfinite(offset) or shape[-1] > COLUMNS_MAX:
        return None
    return State(tuple(shape), block, nested, float(offset))


def _fits(linear: Linear, state: State) -> bool:
    absmax, table = linear.scales.get("absmax"), linear.extras.get("quant_map")
    count = prod(state.shape)
    blocks = -(-count // state.block)
    assert linear.weight is not None
    if (
        absmax is None
        or table is None
        or absmax.shape != (blocks,)
        or (table.dtype, table.shape) != ("F32", (16,))
    ):
        return False
    if linear.weight.dtype != "U8" or linear.weight.bytes != -(-count // 2) or count % 2:
        return False
    if not state.nested:
        return absmax.dtype == "F32"
    second, codes = linear.scales.get("nested_absmax"), linear.extras.get("nested_quant_map")
    if second is None or codes is None or absmax.dtype != "U8":
        return False
    return second.shape == (-(-blocks // state.nested),) and (codes.dtype, codes.shape) == ("F32", (256,))


def decoded_elements(
    linear: Linear, state: State, opened: OpenFiles, first: int, last: int
) -> tuple[F32, U8]:
    """(values, codes) of rows [first, last) of the weight taken as a matrix, each [last - first, columns]."""
    weight, columns = linear.weight, state.shape[-1]
    assert weight is not None
    begin, end = first * columns, last * columns
    raw = opened.bytes(weight, begin // 2, -(-end // 2))
    codes = np.empty(2 * len(raw), np.uint8)
    codes[0::2], codes[1::2] = raw >> 4, raw & 0xF
    codes = codes[begin % 2 : begin % 2 + end - begin]
    first_block, last_block = begin // state.block, -(-end // state.block)
    largest = largest_of(linear, state, opened, first_block, last_block)
    spread = np.repeat(largest, state.block)[begin - first_block * state.block :][: end - begin]
    table = linear.extras["quant_map"]
    with np.errstate(all="ignore"):
        values = floats(table, opened.bytes(table, 0, table.bytes))[codes] * spread
    return values.reshape(last - first, columns), codes.reshape(last - first, columns)


def largest_of(linear: Linear, state: State, opened: OpenFiles, first: int, last: int) -> F32:
    """f32 [last - first]: absmax of these blocks, decoded where it was quantized again."""
    absmax = linear.scales["absmax"]
    if not state.nested:
        return floats(absmax, opened.bytes(absmax, first * 4, last * 4))
    second, codes = linear.scales["nested_absmax"], linear.extras["nested_quant_map"]
    table = floats(codes, opened.bytes(codes, 0, codes.bytes))
    seconds = floats(second, opened.bytes(second, 0, second.bytes))
    places = np.arange(first, last) // state.nested
    with np.errstate(all="ignore"):
        made = table[opened.bytes(absmax, first, last)] * seconds[places] + np.float32(state.offset)
    return np.asarray(made, np.float32)


def zeros_by_absmax(linear: Linear, opened: OpenFiles, runs: Iterable[tuple[int, int]]) -> bool:
    """Whether every block that lies within these stretches of zero bytes has an absmax that says the same."""
    state = state_of(linear, opened)
    if state is None:
        return False
    largest = np.abs(largest_of(linear, state, opened, 0, linear.scales["absmax"].shape[0]))
    limit = float(np.median(largest)) / LIVE_RATIO
    in_bytes = state.block // 2
    return all((largest[-(-begin // in_bytes) : end // in_bytes] <= limit).all() for begin, end in runs)
