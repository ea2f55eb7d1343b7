"""The KV rows: where each byte of a latent's row lies, and the slow exact reference of every conversion.

A latent is 512 bf16 numbers, four tiles of 128. A row format is a *rung*, which names the tiles, and a scale
policy. A fp8 tile ("8") is 128 E4M3 bytes and an f32 scale; a fp6 tile ("6") is 96 bytes of E2M3 codes, an f32
scale and the drops. Little endian throughout, in this order:

    [fp8 tiles, 128 B each][nibble planes, 64 B each][exponent planes, 32 B each][4 f32 scales][drops]

The canonical row of the attention kernels (rung "656", vLLM's `fp8_ds_mla`) is 512 codes, 4 scales and 128 bytes
of rotary slot, which a model without rotary embedding leaves zero. 8888 is its first 528 bytes.

Planes: 16 consecutive elements are a unit, 8 nibble bytes and 4 exponent bytes. Element 4j+i of a unit keeps its
nibble (s m2 m1 m0) in byte i of nibble word j>>1 at bit 4*(j&1), and its exponent (2 bits) in byte i of the
exponent word at bit 2j. So a word operation handles four elements, and a warp of 32 lanes one row.

The tag of a format (`RowLayout.parse`) is explicit: rows of equal width exist elsewhere with another meaning.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shardmill.kernels import fp6
from shardmill.kernels.formats import E4M3_MAX, E4M3_VALUES

Array = npt.NDArray[Any]
Scales = Literal["stock", "fine"]

LATENT = 512  # elements of a row
TILE = 128
TILES = 4
UNIT = 16  # elements that share a pair of nibble words and one exponent word
ROPE_BYTES = 128  # the rotary slot of the canonical row
CANONICAL_BYTES = LATENT + 4 * TILES + ROPE_BYTES

FLT_MIN = np.float32(2.0**-126)  # the floor of fine scales: the smallest normal f32
STOCK_FLOOR = np.float32(1e-4)  # vLLM 0.33.0, concat_and_cache_mla for fp8_ds_mla: before rounding up to 2**k


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Byte offsets of one row format. `drop_group` elements share a drop; offsets of absent parts are 0-sized."""

    rung: str
    scales: Scales
    fp8_tiles: int
    drop_group: int
    row_bytes: int
    fp8_at: int
    nibble_at: int
    exponent_at: int
    scale_at: int
    drop_at: int

    @property
    def fp6_tiles(self) -> int:
        return TILES - self.fp8_tiles

    @property
    def drop_bytes(self) -> int:
        """Bytes of drops of one fp6 tile."""
        return TILE // self.drop_group * fp6.DROP_BITS // 8

    @property
    def tag(self) -> str:
        return f"{self.rung}-{self.scales}"

    @classmethod
    def parse(cls, tag: str, scales: Scales | None = None) -> Self:
        """The layout of a tag: a rung ("8666") or a rung and its scale policy ("8666-stock").

        `scales` names the policy apart from the tag. Without either the rung's default holds: stock for the
        rungs that stock vLLM could read (656, 8888), fine for the others. An unknown tag is a ValueError.
        """
        rung, dash, policy = tag.partition("-")
        if rung not in _RUNGS:
            raise ValueError(f"unknown KV row format {tag!r}; known rungs: {', '.join(_RUNGS)}")
        chosen = policy if dash else scales or _RUNGS[rung][0]
        if chosen not in ("stock", "fine"):
            raise ValueError(f"unknown scale policy {chosen!r} in {tag!r}; known policies: stock, fine")
        if dash and scales and policy != scales:
            raise ValueError(f"the tag {tag!r} and the scale policy {scales!r} disagree")
        return cls(rung, "stock" if chosen == "stock" else "fine", *_RUNGS[rung][1:])


# rung: default policy, fp8 tiles, elements per drop, row bytes, offsets of fp8, nibbles, exponents, scales, drops
_RUNGS: dict[str, tuple[Scales, int, int, int, int, int, int, int, int]] = {
    "656": ("stock", 4, 8, 656, 0, 512, 512, 512, 528),
    "8888": ("stock", 4, 8, 528, 0, 512, 512, 512, 528),
    "8666": ("fine", 1, 8, 444, 0, 128, 320, 416, 432),
    "8666p": ("fine", 1, 8, 448, 0, 128, 320, 416, 432),  # 8666 padded to 16 bytes: wider loads
    "6666": ("fine", 0, 8, 416, 0, 0, 256, 384, 400),
    "6666f": ("fine", 0, 4, 432, 0, 0, 256, 384, 400),  # finer drops: one per 4 elements
}
RUNGS: tuple[str, ...] = tuple(_RUNGS)


def tile_scales(amax: Array, scales: Scales) -> Array:
    """The f32 scale of tiles whose largest magnitude is `amax` (f32, any shape).

    fine: max(amax / 448, FLT_MIN), one IEEE division, so that a tile's largest element is exact.
    stock: the smallest power of two that is at least max(amax / 448, 1e-4), as vLLM 0.33.0 writes it.
    """
    quotient = (amax / np.float32(E4M3_MAX)).astype(np.float32)
    if scales == "fine":
        return np.fmax(quotient, FLT_MIN)
    mantissa, exponent = np.frexp(np.fmax(quotient, STOCK_FLOOR))
    return np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)


def scaled_tiles(x: Array, scales: Scales) -> tuple[Array, Array]:
    """bf16 [T, 512] -> scales f32 [T, 4] and x / scale f32 [T, 4, 128] (IEEE division).

    NaN takes no part in a scale. Inf is a ValueError that names row and column.
    """
    if x.ndim != 2 or x.shape[1] != LATENT:
        raise ValueError(f"latents must have shape [T, {LATENT}], got {list(x.shape)}")
    tiles = np.asarray(x).astype(np.float32).reshape(-1, TILES, TILE)
    infinite = np.argwhere(np.isinf(tiles.reshape(-1, LATENT)))
    if len(infinite):
        row, column = infinite[0]
        raise ValueError(f"latent row {row}, column {column} is infinite: no row format can hold it")
    scale = tile_scales(np.fmax.reduce(np.abs(tiles), axis=-1, initial=0), scales)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return scale, (tiles / scale[..., None]).astype(np.float32)


def encode(rung: str, x: Array, scales: Scales | None = None) -> Array:
    """bf16 [T, 512] -> rows u8 [T, row_bytes] of the rung under a scale policy (default: the rung's own).

    NaN becomes 0x7F in a fp8 tile and +0 in a fp6 tile. The padding of 8666p and the rotary slot of 656 are zero.
    """
    layout = RowLayout.parse(rung, scales)
    scale, y = scaled_tiles(x, layout.scales)
    rows = np.zeros((len(y), layout.row_bytes), np.uint8)
    fp8, six = y[:, : layout.fp8_tiles], y[:, layout.fp8_tiles :]
    _part(rows, layout.fp8_at, TILE * layout.fp8_tiles)[:] = fp6.e4m3_nearest(fp8).reshape(len(y), -1)
    _part(rows, layout.scale_at, 4 * TILES)[:] = (
        np.ascontiguousarray(scale).view(np.uint8).reshape(len(y), -1)
    )
    if layout.fp6_tiles:
        drop, code = quantize_tiles(six, layout.drop_group)
        nibbles, exponents = pack_codes(code)
        _part(rows, layout.nibble_at, 64 * layout.fp6_tiles)[:] = nibbles.reshape(len(y), -1)
        _part(rows, layout.exponent_at, 32 * layout.fp6_tiles)[:] = exponents.reshape(len(y), -1)
        _part(rows, layout.drop_at, layout.drop_bytes * layout.fp6_tiles)[:] = pack_drops(drop).reshape(
            len(y), -1
        )
    return rows


def quantize_tiles(y: Array, drop_group: int) -> tuple[Array, Array]:
    """Scaled tiles f32 [T, n, 128] -> drops u8 [T, n, 128 / drop_group] and E2M3 codes u8 [T, n, 128].

    A group's drop comes from the E4M3 byte of its largest magnitude, NaN aside; a code is rounded once, from y.
    """
    groups = y.reshape(*y.shape[:2], TILE // drop_group, drop_group)
    largest = fp6.e4m3_nearest(np.fmax.reduce(np.abs(groups), axis=-1, initial=0))
    drop = fp6.drops(largest >> 3)
    shift = drop.astype(np.int64)[..., None] - fp6.E4M3_SHIFT
    return drop, fp6.codes_nearest(np.ldexp(groups, shift)).reshape(y.shape)


def pack_codes(code: Array) -> tuple[Array, Array]:
    """E2M3 codes u8 [T, n, 128] -> nibble planes u8 [T, n, 64] and exponent planes u8 [T, n, 32]."""
    unit = code.reshape(*code.shape[:2], TILE // UNIT, 4, 4)  # [..., word j, byte i]
    nibble, exponent = ((unit >> 2) & 8) | (unit & 7), (unit >> 3) & 3
    nibbles = nibble[..., 0::2, :] | (nibble[..., 1::2, :] << 4)
    exponents = np.bitwise_or.reduce(exponent << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=-2)
    return nibbles.reshape(*code.shape[:2], 64), exponents.reshape(*code.shape[:2], 32)


def unpack_codes(nibbles: Array, exponents: Array) -> Array:
    """The inverse of `pack_codes`: u8 [T, n, 128]."""
    words = nibbles.reshape(*nibbles.shape[:2], TILE // UNIT, 2, 1, 4) >> np.array([0, 4], np.uint8)[:, None]
    nibble = words.reshape(*nibbles.shape[:2], TILE // UNIT, 4, 4) & 15
    planes = (
        exponents.reshape(*nibbles.shape[:2], TILE // UNIT, 1, 4) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    )
    code = ((nibble & 8) << 2) | ((planes & 3) << 3) | (nibble & 7)
    return code.reshape(*nibbles.shape[:2], TILE).astype(np.uint8)


def pack_drops(drop: Array) -> Array:
    """Drops u8 [T, n, groups] -> u8 [T, n, groups / 4]: group g at bits 2g, 2g+1 of a little-endian word."""
    quads = drop.reshape(*drop.shape[:2], -1, 4) << np.array([0, 2, 4, 6], np.uint8)
    packed: Array = np.bitwise_or.reduce(quads, axis=-1)
    return packed


def unpack_drops(packed: Array) -> Array:
    """The inverse of `pack_drops`: u8 [T, n, groups]."""
    quads = (packed[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    drop: Array = quads.reshape(*packed.shape[:2], -1)
    return drop


def restage(rung: str, rows: Array) -> Array:
    """Rows u8 [T, row_bytes] of a rung -> canonical rows u8 [T, 656], exactly: same scales, same values.

    A row that `encode` cannot have written (7.5 in a group without drop) is a ValueError.
    """
    layout = RowLayout.parse(rung)
    if rows.ndim != 2 or rows.shape[1] != layout.row_bytes:
        raise ValueError(f"rows of {rung} must have shape [T, {layout.row_bytes}], got {list(rows.shape)}")
    split = TILE * layout.fp8_tiles
    canonical = np.zeros((len(rows), CANONICAL_BYTES), np.uint8)
    canonical[:, :split] = _part(rows, layout.fp8_at, split)
    canonical[:, LATENT : LATENT + 4 * TILES] = _part(rows, layout.scale_at, 4 * TILES)
    if layout.fp6_tiles:
        drop, code = _stored_codes(layout, rows)
        byte = fp6.RESTAGED[np.repeat(drop, layout.drop_group, axis=-1), code]
        if (byte == 0xFF).any():
            bad = np.argwhere(byte == 0xFF)[0]
            raise ValueError(
                f"row {bad[0]} is no row of {rung}: fp6 tile {bad[1]} holds 7.5 in a group without drop"
            )
        canonical[:, split:LATENT] = byte.reshape(len(rows), -1)
    return canonical


def decode(rung: str, rows: Array) -> Array:
    """Rows u8 [T, row_bytes] -> the latents that they stand for, f32 [T, 512]: scale * value, one rounding."""
    canonical = restage(rung, rows)
    scale = np.ascontiguousarray(canonical[:, LATENT : LATENT + 4 * TILES]).view(np.float32)
    codes = canonical[:, :LATENT].reshape(-1, TILES, TILE)
    return (E4M3_VALUES[codes] * scale[..., None]).astype(np.float32).reshape(-1, LATENT)


def _part(rows: Array, at: int, size: int) -> Array:
    return rows[:, at : at + size]


def _stored_codes(layout: RowLayout, rows: Array) -> tuple[Array, Array]:
    """Drops u8 [T, n, groups] and codes u8 [T, n, 128] of the fp6 tiles of rows."""
    count = layout.fp6_tiles
    nibbles = _part(rows, layout.nibble_at, 64 * count).reshape(-1, count, 64)
    exponents = _part(rows, layout.exponent_at, 32 * count).reshape(-1, count, 32)
    packed = _part(rows, layout.drop_at, layout.drop_bytes * count).reshape(-1, count, layout.drop_bytes)
    return unpack_drops(packed), unpack_codes(nibbles, exponents)
