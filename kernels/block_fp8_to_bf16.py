"""Block FP8 back to BF16: code times its block's scale as one f32 multiplication, rounded once to BF16.

The bits are those of DeepSeek's `weight_dequant` and of torch's `(codes.float() * scale).bfloat16()`. A block has
256 codes and one scale, so its 256 values are computed once and every element is looked up, if it has enough of them.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import Block, NonFinite
from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.formats import E4M3_NAN_CODES, E4M3_VALUES, F32, U8, U16, bf16_to_f32, f32_to_bf16
from shardmill.kernels.pieces import column_spans

CHUNK_ELEMENTS: Final = 32_768  # 256 KiB of places to look up stay in a core's second-level cache
BLOCKS_MAX: Final = 1024  # whose values are held together
ELEMENTS_MIN: Final = 512  # a block with fewer is not worth a table of its 256 values
_NAN: Final = np.uint8(E4M3_NAN_CODES[0])
_EXPONENT: Final = np.uint16(0x7F80)  # of BF16: all ones for Inf and NaN


def decode_to_bf16(codes: U8, scales: F32, block: Block, out: U16) -> None:
    """out u16 [rows, C] = BF16 bits of codes u8 [rows, C] times scales f32 [ceil(rows/r), ceil(C/c)].

    rows is a multiple of r but in a tensor's last strip. Raises NonFinite where a code is NaN or a value passes
    BF16's largest number, and then leaves out undefined.
    """
    default_arithmetic()
    r, c = block
    rows, C = codes.shape
    for i, begin in enumerate(range(0, rows, r)):
        own = slice(begin, min(begin + r, rows))
        for col, end in column_spans(0, C, c, min(BLOCKS_MAX * c, CHUNK_ELEMENTS * 4)):
            blocks = scales[i, col // c : -(-end // c)]
            few = min(r, rows) * c < ELEMENTS_MIN
            (_multiply if few else _look_up)(codes[own, col:end], blocks, c, out[own, col:end])
    _refuse_non_finite(codes, out)


def _look_up(codes: U8, scales: F32, c: int, out: U16) -> None:
    """out u16 [k, n] of codes u8 [k, n] and scales f32 [ceil(n/c)], from a table of each block's values."""
    k, n = codes.shape
    values = _values(scales)  # [blocks * 256]
    first_value = (np.arange(n, dtype=np.intp) // c) * 256  # [n]: where the values of a column's block begin
    chunk_rows = max(1, CHUNK_ELEMENTS // n)
    places = np.empty((min(chunk_rows, k), n), np.intp)
    for row in range(0, k, chunk_rows):
        chunk = slice(row, min(row + chunk_rows, k))
        at = places[: chunk.stop - chunk.start]
        np.add(codes[chunk], first_value, out=at)
        np.take(values, at, out=out[chunk], mode="clip")


def _multiply(codes: U8, scales: F32, c: int, out: U16) -> None:
    """The same, value by value: for blocks of fewer elements than a table has."""
    k, n = codes.shape
    wide = np.repeat(scales, c)[:n]
    chunk_rows = max(1, CHUNK_ELEMENTS // n)
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(0, k, chunk_rows):
            chunk = slice(row, min(row + chunk_rows, k))
            out[chunk] = f32_to_bf16(E4M3_VALUES[codes[chunk]] * wide)


def _values(scales: F32) -> NDArray[np.uint16]:
    """scales f32 [blocks] -> BF16 bits u16 [blocks * 256] of every code."""
    with np.errstate(over="ignore", invalid="ignore"):
        return f32_to_bf16(E4M3_VALUES[None, :] * scales[:, None]).reshape(-1)


def _refuse_non_finite(codes: U8, out: U16) -> None:
    nan_codes = (codes & _NAN) == _NAN
    if nan_codes.any() or (out & _EXPONENT).max(initial=0) == _EXPONENT:
        row, col = np.argwhere(nan_codes | ((out & _EXPONENT) == _EXPONENT))[0]
        raise NonFinite(int(row), int(col), float(bf16_to_f32(out[row : row + 1, col])[0]))
