"""What every kernel test needs: one comparator that says where, and one source of hostile latents.

All inputs come from integers of PCG64, never from a floating generator, so that they are the same on every
machine, and a digest computed on one is good on another.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16
from shardmill.kernels.kv_row import LATENT, TILE, TILES, RowLayout

Array = npt.NDArray[Any]

POISON = 0xA5  # what outputs hold before a run: a byte that no test expects everywhere


def first_difference(expected: Array, got: Array, layout: RowLayout | None = None) -> str | None:
    """None where two u8 arrays are equal, else a sentence on the first byte that differs: place and both values.

    With a layout, arrays are rows and the place within the row is named.
    """
    if expected.shape != got.shape:
        return f"shapes differ: expected {list(expected.shape)}, got {list(got.shape)}"
    if np.array_equal(expected, got):
        return None
    differs = expected != got
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    where = f"[{', '.join(map(str, place))}]"
    if layout is not None:
        where = f"row {place[-2]}, byte {place[-1]} ({part_name(layout, place[-1])})"
    count = int(differs.sum())
    return (
        f"{where}: expected 0x{int(expected[place]):02x}, got 0x{int(got[place]):02x}; {count} bytes differ"
    )


def part_name(layout: RowLayout, byte: int) -> str:
    """The part of a row that a byte belongs to, in words."""
    six = layout.fp6_tiles
    parts = [
        ("fp8 code", layout.fp8_at, TILE * layout.fp8_tiles, TILE, 0),
        ("nibbles", layout.nibble_at, 64 * six, 64, layout.fp8_tiles),
        ("exponents", layout.exponent_at, 32 * six, 32, layout.fp8_tiles),
        ("scale", layout.scale_at, 4 * TILES, 4, 0),
        ("drops", layout.drop_at, layout.drop_bytes * six, layout.drop_bytes, layout.fp8_tiles),
    ]
    for name, begin, size, tile_size, first_tile in parts:
        if begin <= byte < begin + size:
            return f"{name} of tile {first_tile + (byte - begin) // tile_size}"
    return "padding or rotary slot"


def random_rows(seed: int, rows: int) -> Array:
    """bf16 bits u16 [rows, 512] over 10**+-18: uniform significands and signs, exponents that fall off by halves."""
    words = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 32, (rows, LATENT), np.uint32)
    centre = 127 + (words[:, :1] >> 26).astype(np.int32) - 32  # one exponent for each row, 2**-32 .. 2**31
    exponent = (centre - _leading_zeros((words >> 8) & 0x3FFF)).astype(np.uint32)
    return (((words & 1) << 15) | (exponent << 7) | ((words >> 1) & 0x7F)).astype(np.uint16)


def _leading_zeros(values: Array) -> Array:
    """Zeros above the highest set bit of 14-bit numbers: 0 with probability 1/2, 1 with 1/4, ... 14. int32."""
    return (14 - np.frexp(values.astype(np.float32))[1]).astype(np.int32)


def digest_of_rows(rows: Array) -> str:
    """sha256 of u8 rows, in order."""
    return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()


def every_quotient() -> Array:
    """bf16 bits u16 [704, 512]: each pair of a tile's maximum and another element, by significand.

    The first element of a tile is its maximum, of each of the 128 significands in turn; the others run through
    128 significands at 21 exponents below it, both signs. No other quotient reaches a code but zero.
    """
    top = np.repeat(np.arange(128), 22)
    rest = np.arange(22 * (TILE - 1)) % (128 * 21)
    others = np.tile(rest.reshape(22, TILE - 1), (128, 1))
    tiles = np.empty((len(top), TILE), np.uint32)
    tiles[:, 0] = (134 << 7) | top
    exponent = 134 - others // 128
    # At the maximum's own exponent only significands up to its own may follow.
    significand = np.where(others < 128, np.minimum(others, top[:, None]), others % 128)
    sign = (np.arange(TILE - 1) & 1) << 15
    tiles[:, 1:] = sign | (exponent << 7) | significand
    return tiles.astype(np.uint16).reshape(-1, LATENT)


def every_bf16() -> Array:
    """bf16 bits u16 [128, 512]: every bit pattern but the two infinities, NaN among them, shuffled."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = np.where((bits & 0x7FFF) == 0x7F80, 0, bits).astype(np.uint16)
    return np.random.Generator(np.random.PCG64(5)).permutation(bits).reshape(-1, LATENT)


def hostile_latents() -> Iterator[tuple[str, Array]]:
    """Named cases of bf16 bits u16 [rows, 512], each a way in which a writer has gone wrong or could."""
    plain = random_rows(1, 8)
    yield "random", plain
    yield "zeros", np.zeros((2, LATENT), np.uint16)
    yield "negative zeros", np.full((2, LATENT), 0x8000, np.uint16)
    yield "signed zeros among numbers", np.where(np.arange(LATENT) % 3, plain, 0x8000).astype(np.uint16)
    yield "one number in a row of zeros", _placed(np.zeros((4, LATENT), np.uint16), 0x3F80)
    yield "scales at the smallest normal f32", _scaled(plain, 2.0**-117)
    yield "subnormal numbers", (plain & 0x807F).astype(np.uint16)
    yield "numbers of 1e30", _scaled(plain, 1e30)
    yield "numbers of 1e-30", _scaled(plain, 1e-30)
    yield "the largest bf16", np.where(plain & 1, 0x7F7F, 0xFF7F).astype(np.uint16)
    yield "scales at the stock floor", _scaled(plain, 2.0**-13 * 448)
    yield (
        "ties of the largest magnitude",
        np.where(np.arange(LATENT) % 5, plain, 0x4F00 | (plain & 0x8000)).astype(np.uint16),
    )
    yield "outliers x300", _outliers(plain)
    yield "ties of E4M3", _ties()
    yield "NaN among numbers", _placed(plain, 0x7FC0)
    yield "a tile of NaN", np.where(np.arange(LATENT) < TILE, 0xFFC1, plain).astype(np.uint16)
    yield "rows of NaN", np.full((2, LATENT), 0x7F81, np.uint16)
    yield "groups of NaN", np.where(np.arange(LATENT) % 24 < 8, 0x7FFF, plain).astype(np.uint16)


def _scaled(bits: Array, factor: float) -> Array:
    """The significands and signs of latents, at exponents 0..-7 around `factor`; overflow is clipped."""
    near_one = (bits & 0x807F) | ((127 - ((bits >> 7) & 7)) << 7)
    moved = bf16_to_f32(near_one.astype(np.uint16)).astype(np.float64) * factor
    return f32_to_bf16(np.clip(moved, -3.38e38, 3.38e38).astype(np.float32))


def _placed(bits: Array, value: int) -> Array:
    """One element of each row replaced, at a place that moves through tiles, units and groups."""
    rows = np.arange(len(bits))
    placed = bits.copy()
    placed[rows, (rows * 137 + 7) % LATENT] = value
    return placed


def _outliers(bits: Array) -> Array:
    loud = f32_to_bf16(bf16_to_f32(bits) * np.float32(300))
    return np.where(np.arange(LATENT) % 61 == 3, loud, bits).astype(np.uint16)


def _ties() -> Array:
    """Tiles with maximum 448, so that the scale is 1, and all midpoints between E4M3 values; then shuffled ones."""
    k = np.arange(LATENT)
    midpoints = ((135 - k // 8 % 16) << 7) | (k % 8 << 4) | 8 | ((k & 1) << 15)
    shuffled = np.random.Generator(np.random.PCG64(6)).permutation(midpoints)
    rows = np.stack([midpoints, shuffled]).astype(np.uint16)
    rows[:, ::TILE] = 0x43E0  # 448
    return rows
