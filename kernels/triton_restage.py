"""The restage kernel: rows of any rung back into the canonical 656-byte rows that the attention kernels read."""

import triton
import triton.language as tl

from shardmill.kernels.kv_row import CANONICAL_BYTES
from shardmill.kernels.triton_convert import join4, row_offset, unpack_e2m3

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

    A program is one warp and R rows, whose loads are all under way before the first is needed. Every byte of a
    row is written, the rotary slot with zeros: a row with a hole costs more than a whole one. A negative index
    leaves its row of `out` as it was.
    """
    parts = ()
    for i in tl.static_range(R):
        row = tl.program_id(0) * R + i
        source = _source(index, row, rows, INDEX_ROWS)
        at = cache + row_offset(source, page_words, ROW_WORDS, PAGE_ROWS)
        loaded = _load_row(at, source >= 0, FP8_TILES, GROUP, NIBBLE, EXPONENT, SCALE, DROP)
        parts += ((source >= 0, loaded),)
    for i in tl.static_range(R):
        ok, loaded = parts[i]
        to = out + (tl.program_id(0) * R + i).to(tl.int64) * CANONICAL_WORDS
        _store_row(to, ok, loaded, FP8_TILES, GROUP, PTX)


@triton.jit
def number_kernel(index, out, rows, BLOCK: tl.constexpr):
    """out[r] = r where index[r] names a row, else -1: the numbers of the restaged rows, int32."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(index + row, mask=row < rows, other=-1)
    tl.store(out + row, tl.where(wanted < 0, -1, row), mask=row < rows)


@triton.jit
def _source(index, row, rows, INDEX_ROWS: tl.constexpr):
    """The row number (int32) behind output row `row`; -1 for none."""
    if INDEX_ROWS == 0:
        return tl.load(index + row, mask=row < rows, other=-1)
    else:
        page = tl.load(index + row // INDEX_ROWS, mask=row < rows, other=-1)
        return tl.where(page < 0, -1, page * INDEX_ROWS + row % INDEX_ROWS)


@triton.jit
def _load_row(
    at,
    ok,
    FP8_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLE: tl.constexpr,
    EXPONENT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP: tl.constexpr,
):
    """The parts of the row at `at`: fp8 words, nibble words, exponent words, drops, and its tail.

    The tail is the last 144 bytes of a canonical row, 4 words a lane: the scales in lane 0, zeros elsewhere.
    """
    unit = tl.arange(0, 32)
    four = unit[:, None] * 4 + tl.arange(0, 4)[None, :]
    tail = tl.load(at + SCALE + four, mask=ok & (four < 4), other=0)
    if FP8_TILES == 4:
        codes = tl.load(at + four, mask=ok, other=0)
        return codes, codes, unit, unit, tail
    else:
        v = unit - 8 * FP8_TILES
        six = ok & (v >= 0)
        two = v[:, None] * 2 + tl.arange(0, 2)[None, :]
        nibbles = tl.load(at + NIBBLE + two, mask=ok & (two >= 0), other=0)
        exponents = tl.load(at + EXPONENT + v, mask=six, other=0)
        drops = tl.load(at + DROP + v // GROUP, mask=six, other=0) >> ((unit % GROUP) * (32 // GROUP))
        fp8 = tl.load(at + unit, mask=ok, other=0) if FP8_TILES > 0 else unit
        return fp8, nibbles, exponents, drops, tail


@triton.jit
def _store_row(to, ok, loaded, FP8_TILES: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr):
    fp8, nibbles, exponents, drops, tail = loaded
    unit = tl.arange(0, 32)
    four = unit[:, None] * 4 + tl.arange(0, 4)[None, :]
    if FP8_TILES == 4:
        tl.store(to + four, fp8, mask=ok)
    else:
        if FP8_TILES > 0:
            tl.store(to + unit, fp8, mask=ok)
        codes = _restaged_unit(nibbles, exponents, drops, GROUP, PTX)
        tl.store(to + four, codes, mask=ok & (four >= 32 * FP8_TILES))
    tl.store(to + 128 + four, tail, mask=ok & (four < 36))


@triton.jit
def _restaged_unit(nibbles, exponents, drops, GROUP: tl.constexpr, PTX: tl.constexpr):
    """Nibble words [32, 2], exponent words and drops (lowest bits) of the units -> their E4M3 words [32, 4]."""
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
