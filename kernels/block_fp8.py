"""Block FP8 weights: one E4M3 code an element, one f32 scale a block of r x c elements.

The law of `amax/1`, all in f32: scale = amax / 448; code = E4M3, nearest and ties to even, of
clip(w / scale, -448, 448); both divisions are true IEEE divisions, never multiplications by a reciprocal. A
block of zeros has the scale 1 and keeps its zeros' signs. A scale never falls below 2^-149, the smallest f32.
NaN and Inf are refused. Blocks at the right and lower edge are smaller, never padded. Code times scale gives
the weight back.

A recipe's name enters every hash. To change one bit of what it writes is to give it a new name.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8_numpy import NumpyRows
from shardmill.kernels.block_fp8_scales import amax_scales, bf16_scales, ue8m0_scales
from shardmill.kernels.block_fp8_tiny import is_tiny, tiny_codes
from shardmill.kernels.float_env import default_arithmetic
from shardmill.kernels.formats import E4M3_MAX, E4M3_VALUES, F32, U8, U16, U32, bf16_to_f32, nearest_codes
from shardmill.kernels.mse import mse_in_pieces, mse_scales
from shardmill.kernels.pieces import Pieces, blocks_of
from shardmill.kernels.recover import recover_in_pieces, recover_scales
from shardmill.kernels.recover_numpy import Bounds

Block = tuple[int, int]
GROUP_BYTES: Final = (
    1 << 20
)  # sources are taken in groups of block rows of about this size, so that they stay in cache
_INFINITY_BITS: Final = 0x7F800000


class NonFinite(ValueError):  # noqa: N818  (it names what the source is, as a finding does)
    """A source holds a NaN or an Inf: no scale is right for its block. row and col count within the strip."""

    def __init__(self, row: int, col: int, value: float) -> None:
        super().__init__(f"{value} at row {row}, column {col}")
        self.row, self.col, self.value = row, col, value


class Rows(Protocol):
    """What a kernel does with matrices [rows, C]; see NumpyRows for the laws."""

    @property
    def name(self) -> str: ...

    def maxima(self, source: NDArray[Any], block: Block) -> U32: ...

    def codes(self, source: NDArray[Any], scales: F32, block: Block, out: U8) -> None: ...

    def lossless(self, source: U16, scales: F32, block: Block) -> NDArray[np.bool_]: ...

    def squared_errors(self, source: NDArray[Any], scales: F32, block: Block) -> NDArray[np.int64]: ...

    def candidates(self, sample: U16, maxima: U32, c: int, wanted: int, bounds: Bounds) -> F32: ...


Choice = Callable[[Rows, NDArray[Any], U32, Block], tuple[F32, dict[str, int]]]
ChoiceInPieces = Callable[[Rows, Pieces, U32, Block], tuple[F32, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a block's scale is chosen: choose(rows, source, maxima, block) -> scales, f32 like maxima, and counts.

    in_pieces(rows, pieces, maxima, block) is the same for a row of blocks that is too large to be held.
    """

    law: str
    choose: Choice
    in_pieces: ChoiceInPieces


def _counted(name: str, chosen: tuple[F32, NDArray[np.bool_]]) -> tuple[F32, dict[str, int]]:
    scales, flags = chosen
    return scales, {"blocks": flags.size, name: int(flags.sum())}


RECIPES: Final[dict[str, Recipe]] = {
    "amax/1": Recipe(
        "amax / 448",
        lambda rows, source, maxima, block: (amax_scales(maxima), {}),
        lambda rows, pieces, maxima, block: (amax_scales(maxima), {}),
    ),
    "amax-bf16/1": Recipe(
        "amax / 448 rounded to BF16, which loaders that keep scales in the model's dtype hold exactly",
        lambda rows, source, maxima, block: (bf16_scales(maxima), {}),
        lambda rows, pieces, maxima, block: (bf16_scales(maxima), {}),
    ),
    "mse/1": Recipe(
        "the best by squared error of eight from amax / 448 to nearly its double",
        lambda *strip: _counted("moved_blocks", mse_scales(*strip)),
        lambda *pieces: _counted("moved_blocks", mse_in_pieces(*pieces)),
    ),
    "recover/1": Recipe(
        "the scale it had, where that is proven lossless, else amax / 448",
        lambda *strip: _counted("exact_blocks", recover_scales(*strip)),
        lambda *pieces: _counted("exact_blocks", recover_in_pieces(*pieces)),
    ),
    "ue8m0/1": Recipe(
        "the smallest power of two >= amax / 448",
        lambda rows, source, maxima, block: (ue8m0_scales(maxima), {}),
        lambda rows, pieces, maxima, block: (ue8m0_scales(maxima), {}),
    ),
}


@cache
def known_kernels() -> tuple[str, ...]:
    """The kernels that run here, the plainest first; all give the same bytes. Importing numba takes a second.

    A numba that refuses the numpy beside it, finds no folder where it may cache machine code, or finds there what it
    can't read, counts as none: `why_no_numba` says which.
    """
    return ("numpy", "numba") if why_no_numba() is None else ("numpy",)


@cache
def why_no_numba() -> str | None:
    """Why the kernel numba does not run here; None where it does. It compiles one small block to know."""
    try:
        module = importlib.import_module("shardmill.kernels.block_fp8_numba")
        rows = module.NumbaRows()
        source, out = np.ones((1, 1), np.uint16), np.empty((1, 1), np.uint8)
        rows.maxima(source, (1, 1))
        rows.codes(source, np.ones((1, 1), np.float32), (1, 1), out)
    except Exception as error:  # numba's cache is pickled: what a damaged file raises is anything
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None


def rows_of(kernel: str = "auto") -> Rows:
    """The passes of a kernel with buffers of their own, for one thread: "numpy", "numba", or "auto" for the fastest."""
    if kernel == "auto":
        kernel = known_kernels()[-1]
    if kernel == "numba":
        from shardmill.kernels.block_fp8_numba import NumbaRows

        return NumbaRows()
    assert kernel == "numpy", f"no kernel is called {kernel}"
    return NumpyRows()


def encoder(recipe: str, block: Block, kernel: str = "auto") -> "BlockEncoder":
    """An encoder for one thread, by the passes of `rows_of(kernel)`."""
    return BlockEncoder(recipe, block, rows_of(kernel))


class BlockEncoder:
    """Encodes strips of one block shape by one recipe. Encoders of one thread may share `rows`, which reuse buffers."""

    def __init__(self, recipe: str, block: Block, rows: Rows) -> None:
        self.recipe, self.block, self.name = recipe, block, rows.name
        self._rows, self._law = rows, RECIPES[recipe]

    def encode(self, source: NDArray[Any], codes: U8, scales: F32) -> dict[str, int]:
        """Fill codes u8 [rows, C] and scales f32 [ceil(rows/r), ceil(C/c)] from source [rows, C].

        source: u16 (BF16 bits), f16 or f32, contiguous as codes is; rows is a multiple of r but in a tensor's
        last strip. Returns what the recipe counts, {} for most. Raises NonFinite, and then leaves codes and
        scales undefined.
        """
        assert source.dtype in (np.uint16, np.float16, np.float32), source.dtype
        assert source.flags.c_contiguous, "strips are read into one buffer"
        assert codes.flags.c_contiguous, "codes are written flat"
        assert codes.shape == source.shape, (codes.shape, source.shape)
        default_arithmetic()
        r, _ = self.block
        rows, C = source.shape
        group = r * max(1, GROUP_BYTES // (r * C * source.itemsize))  # rows
        counts: dict[str, int] = {}
        for begin in range(0, rows, group):
            end = min(begin + group, rows)
            grid_rows = slice(begin // r, -(-end // r))
            found = self._encode_group(source[begin:end], codes[begin:end], scales[grid_rows], begin)
            counts = {key: counts.get(key, 0) + count for key, count in found.items()}
        return counts

    def _encode_group(self, source: NDArray[Any], codes: U8, scales: F32, first_row: int) -> dict[str, int]:
        maxima = self._rows.maxima(source, self.block)
        if maxima.max(initial=0) >= _INFINITY_BITS:
            raise _first_non_finite(source, first_row)
        chosen, counts = self._law.choose(self._rows, source, maxima, self.block)
        scales[...] = chosen
        self.encode_with(source, chosen, codes)
        return counts

    def encode_with(self, source: NDArray[Any], scales: F32, codes: U8) -> None:
        """Fill codes u8 [rows, C] from source [rows, C] of finite numbers by scales f32 [ceil(rows/r), ceil(C/c)]."""
        default_arithmetic()
        tiny = is_tiny(scales)
        if not tiny.any():
            self._rows.codes(source, scales, self.block, codes)
            return
        self._rows.codes(source, np.where(tiny, np.float32(1), scales), self.block, codes)
        for i, j in np.argwhere(tiny):
            at = block_at(self.block, i, j)
            codes[at] = tiny_codes(source[at], scales[i, j])

    def choose(self, pieces: Pieces, height: int, blocks: int) -> tuple[F32, dict[str, int]]:
        """The scales of one row of `blocks` blocks that is seen piece by piece: f32 [1, blocks], and counts.

        height: the row's own rows, at most r. Raises NonFinite, whose place counts from the first piece's corner.
        """
        default_arithmetic()
        maxima = np.zeros((1, blocks), np.uint32)
        for row, col, part in pieces():
            found = self._rows.maxima(part, (len(part), self.block[1]))
            if found.max(initial=0) >= _INFINITY_BITS:
                raise _first_non_finite(part, row, col)
            at = blocks_of(col, part, self.block[1])
            np.maximum(maxima[:, at], found, out=maxima[:, at])
        return self._law.in_pieces(self._rows, pieces, maxima, (height, self.block[1]))


def block_at(block: Block, i: int, j: int) -> tuple[slice, slice]:
    """The rows and columns of the block at [i, j] of the grid; numpy cuts them at the matrix's edge."""
    r, c = block
    return slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c)


def grid(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """How many blocks cover a matrix, downwards and across."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def decode(codes: U8, scales: F32, block: Block) -> F32:
    """f32 [R, C] = E4M3 value of codes u8 [R, C] times its block's scale, one f32 multiplication."""
    R, C = codes.shape
    r, c = min(block[0], R), min(block[1], C)
    wide = np.repeat(np.repeat(scales, r, axis=0)[:R], c, axis=1)[:, :C]  # [R, C]
    return E4M3_VALUES[codes] * wide


def encode_reference(weights: F32, block: Block) -> tuple[U8, F32]:
    """`amax/1`, slow and obvious: weights f32 [R, C] -> codes u8 [R, C], scales f32 [ceil(R/r), ceil(C/c)].

    It trusts f32 arithmetic, so it must not run where subnormal numbers are flushed to zero.
    """
    if not np.isfinite(weights).all():
        raise _first_non_finite(weights, 0)
    codes = np.empty(weights.shape, np.uint8)
    scales = np.empty(grid(weights.shape, block), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = block_at(block, i, j)
        amax = np.abs(weights[at]).max()
        scale = np.float32(1) if amax == 0 else max(amax / np.float32(E4M3_MAX), np.float32(2.0**-149))
        codes[at] = nearest_codes(np.clip(weights[at] / scale, -E4M3_MAX, E4M3_MAX), E4M3_VALUES)
        scales[i, j] = scale
    return codes, scales


def _first_non_finite(source: NDArray[Any], first_row: int, first_col: int = 0) -> NonFinite:
    values = bf16_to_f32(source) if source.dtype == np.uint16 else source
    row, col = np.argwhere(~np.isfinite(values))[0]
    return NonFinite(first_row + int(row), first_col + int(col), float(values[row, col]))
