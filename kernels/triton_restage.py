"""The restage kernel: rows of any rung back into the canonical 656-byte rows that the attention kernels read."""

import triton
import triton.language as tl

from kernels.kv_row import CANONICAL_BYTES
from kernels.triton_convert import join4, row_offset, unpack_e2m3

CANONICAL_WORDS = tl.constexpr(CANONICAL_BYTES // 4)


@triton.jit
def restage_kernel(
    cache,
    index,
    out,
    rows,
    page_words,
    FP8_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLE: tl.constexpr,
    EXPONENT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    PTX: tl.constexpr,
    R: tl.constexpr,
):
    """Row r of out (656 bytes) = the restaged row index[r], or with INDEX_ROWS row r of the listed pages.

    Every byte of a row is written, the rotary slot with zeros: a row with a hole costs more than a whole one. A
    negative index leaves its row of `out` as it was.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    if INDEX_ROWS == 0:
        source = tl.load(index + row, mask=live, other=-1)
    else:
        page = tl.load(index + row // INDEX_ROWS, mask=live, other=-1)
        source = tl.where(page < 0, -1, page * INDEX_ROWS + row % INDEX_ROWS)
    ok = source >= 0
    at = row_offset(source, page_words, ROW_WORDS, PAGE_ROWS)
    to = row.to(tl.int64) * CANONICAL_WORDS
    unit = tl.arange(0, 32)[None, :]
    k = (unit * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    tile = tl.arange(0, 4)[None, :]
    scale = tl.load(cache + at[:, None] + SCALE + tile, mask=ok[:, None], other=0)
    if FP8_TILES == 4:
        codes = tl.load(cache + at[:, None, None] + k, mask=ok[:, None, None], other=0)
        tl.store(out + to[:, None, None] + k, codes, mask=ok[:, None, None])
    else:
        six = ok[:, None] & (unit >= 8 * FP8_TILES)
        v = unit - 8 * FP8_TILES
        pair = tl.arange(0, 2)[None, None, :]
        nibbles = tl.load(
            cache + at[:, None, None] + NIBBLE + v[:, :, None] * 2 + pair, mask=six[:, :, None], other=0
        )
        exponents = tl.load(cache + at[:, None] + EXPONENT + v, mask=six, other=0)
        drops = tl.load(cache + at[:, None] + DROP + v // GROUP, mask=six, other=0)
        if FP8_TILES > 0:
            for t in tl.static_range(FP8_TILES):
                raw = tl.load(cache + at[:, None] + 32 * t + unit, mask=ok[:, None], other=0)
                tl.store(out + to[:, None] + 32 * t + unit, raw, mask=ok[:, None])
        codes = _restaged_unit(nibbles, exponents, drops >> ((unit % GROUP) * (32 // GROUP)), GROUP, PTX)
        tl.store(out + to[:, None, None] + k, codes, mask=six[:, :, None])
    tl.store(out + to[:, None] + 128 + tile, scale, mask=ok[:, None])
    tl.store(out + to[:, None] + 132 + unit, tl.zeros([R, 32], tl.int32), mask=ok[:, None])


@triton.jit
def _restaged_unit(nibbles, exponents, drops, GROUP: tl.constexpr, PTX: tl.constexpr):
    """A unit's nibble words [R, 32, 2], exponent word and drops (lowest bits) -> its 16 E4M3 bytes, [R, 32, 4]."""
    n01, n23 = tl.split(nibbles)
    d0 = drops & 3
    if GROUP == 8:
        d1 = d0
        d2 = (drops >> 2) & 3
        d3 = d2
    else:
        d1 = (drops >> 2) & 3
        d2 = (drops >> 4) & 3
        d3 = (drops >> 6) & 3
    c0 = unpack_e2m3(n01, exponents & 0x03030303, d0, PTX)
    c1 = unpack_e2m3(n01 >> 4, (exponents >> 2) & 0x03030303, d1, PTX)
    c2 = unpack_e2m3(n23, (exponents >> 4) & 0x03030303, d2, PTX)
    c3 = unpack_e2m3(n23 >> 4, (exponents >> 6) & 0x03030303, d3, PTX)
    return join4(c0, c1, c2, c3)
