"""Words of four small floats on the GPU, and the shapes in which the row kernels hold them.

A program is one warp, and a tensor [32] holds one value for each of the 32 units of a row: one unit a lane.
Every conversion exists twice with the same bytes: with the card's instructions (inline PTX, compute capability
8.9 and up) and by integers alone.
"""

import triton
import triton.language as tl


@triton.jit
def _pack_e4m3_ptx(y0, y1, y2, y3):
    """Four f32 -> one word of four E4M3 bytes, round to nearest even, saturating; NaN gives 0x7F."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f",
        [y0, y1, y2, y3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_byte(y):
    """f32 -> E4M3 byte in an int32, by integers: the same rounding, saturation and NaN as the instruction."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 a step is 2**-9; adding 2**14 leaves the rounded count of steps in the lowest bits of the sum.
    steps = (tl.minimum(tl.abs(y), 1.0) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(magnitude < 0x3C800000, steps, tl.minimum(normal, 0x7E))
    return tl.where(magnitude > 0x7F800000, 0x7F, byte | ((bits >> 24) & 0x80))


@triton.jit
def pack_e4m3(y0, y1, y2, y3, PTX: tl.constexpr):
    if PTX:
        return _pack_e4m3_ptx(y0, y1, y2, y3)
    else:
        return e4m3_byte(y0) | (e4m3_byte(y1) << 8) | (e4m3_byte(y2) << 16) | (e4m3_byte(y3) << 24)


@triton.jit
def _unpack_e2m3_ptx(code, factor):
    """Four zero-extended E2M3 bytes * factor (a f16 power of two, twice in a word) -> four E4M3 bytes."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; .reg .b32 a, b;
        mov.b32 {low, high}, $1;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        mul.f16x2 a, a, $2;
        mul.f16x2 b, b, $2;
        cvt.rn.satfinite.e4m3x2.f16x2 low, a;
        cvt.rn.satfinite.e4m3x2.f16x2 high, b;
        mov.b32 $0, {low, high}; }""",
        "=r,r,r",
        [code, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _unpack_e2m3_integer(code, drop):
    """Four zero-extended E2M3 bytes of drop d -> four E4M3 bytes of the value * 2**(6 - d), by integers.

    A normal code (ee > 0) gains (12 - d) in the exponent. A subnormal one has its leading bit moved to the hidden
    place first: mmm = 1xx, 01x, 001 become exponents 0, -1, -2 with the rest of the bits as mantissa.
    """
    ones = 0x01010101
    exponent = (code >> 3) & 0x03030303
    mantissa = code & 0x07070707
    normal = ((exponent | (exponent >> 1)) & ones) * 255
    bit2 = (mantissa >> 2) & ones
    bit1 = (mantissa >> 1) & ones
    subnormal = ((bit2 * 255) & (0x10101010 + ((mantissa & 0x03030303) << 1))) | (
        ((bit1 & (bit2 ^ ones)) * 255) & (0x08080808 + ((mantissa & ones) << 2))
    )
    biased = (normal & ((code & 0x1F1F1F1F) + 0x10101010)) | ((normal ^ -1) & subnormal)
    byte = biased + (80 - drop * 8) * ones
    nonzero = (((normal & ones) | bit2 | bit1 | (mantissa & ones)) & ones) * 255
    return (code & -0x7F7F7F80) | (byte & nonzero)


@triton.jit
def unpack_e2m3(nibble, exponent, drop, PTX: tl.constexpr):
    """Nibbles (s m2 m1 m0, one a byte) and exponents (2 bits, one a byte) of a drop -> four E4M3 bytes."""
    code = ((nibble & 0x08080808) << 4) | (exponent << 3) | (nibble & 0x07070707)
    if PTX:
        return _unpack_e2m3_ptx(code, ((27 - drop) << 10) * 0x10001)  # f16 bits of 2**(12 - d), twice
    else:
        return _unpack_e2m3_integer(code, drop)


@triton.jit
def split4(words):
    """[32, 4] -> its four columns, each [32]; no value leaves its lane."""
    even, odd = tl.split(tl.reshape(words, [32, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def join4(c0, c1, c2, c3):
    """Four [32] -> [32, 4]; no value leaves its lane."""
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [32, 4])


@triton.jit
def row_offset(row, page_words, ROW_WORDS: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Word offset (int64) of a row number (int32) of a paged cache. PAGE_ROWS 0: pages without gaps."""
    if PAGE_ROWS == 0:
        return row.to(tl.int64) * ROW_WORDS
    else:
        page = row // PAGE_ROWS
        return page.to(tl.int64) * page_words + (row - page * PAGE_ROWS) * ROW_WORDS
