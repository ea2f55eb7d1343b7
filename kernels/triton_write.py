"""The write kernel: bf16 latents into rows of a paged cache.

One lane quantizes one unit of 16 elements. What makes it fast without changing a bit is the quotient: instead of
an IEEE division for each element, x / scale is one product and one fused multiply-add with 1 / scale in two
terms. bf16 has so few significands that the equality was enumerated whole (tests/kernels_gpu). A program with a
tile outside the range of that proof, or with a NaN, divides.
"""

import triton
import triton.language as tl

from shardmill.kernels.kv_row import CANONICAL_BYTES
from shardmill.kernels.triton_convert import join4, pack_e4m3, row_offset, split4

FLT_MIN = tl.constexpr(2.0**-126)
STOCK_EXPONENT_MIN = tl.constexpr(127 - 13)  # 2**-13 is the smallest power of two above 1e-4
CANONICAL_WORDS = tl.constexpr(CANONICAL_BYTES // 4)

# How x / scale is taken. DIVIDE is right everywhere. The other two are right where no product leaves the normal
# range; rows with a tile outside it, or with a NaN, are divided.
DIVIDE = tl.constexpr(0)
TWO_TERMS = tl.constexpr(1)  # any f32 scale; amax within 2**-80 .. 2**60
POWER_OF_TWO = tl.constexpr(2)  # amax below 2**60
AMAX_MIN = tl.constexpr((127 - 80) << 23)
AMAX_MAX = tl.constexpr((127 + 60) << 23)

# 1/448 in two f32 terms: fma(a, HIGH, a * LOW) == f32(a / 448) for every bf16 a of the range (enumerated).
INVERSE_448_HIGH = tl.constexpr(float.fromhex("0x1.24924ap-9"))
INVERSE_448_LOW = tl.constexpr(float.fromhex("-0x1.b6db6ep-34"))


@triton.jit
def _low(word):
    """The f32 of the lower bf16 of a word, which comes first in memory."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _largest_of_pairs(a, b):
    """The larger magnitude of two bf16 pairs, pair by pair; NaN stays NaN; the sign bits mean nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _magnitude(bits, NUMBERS: tl.constexpr):
    """f32 bits -> magnitude bits; with NUMBERS a NaN counts as 0: it takes no part in scales and drops."""
    magnitude = bits & 0x7FFFFFFF
    if NUMBERS:
        return tl.where(magnitude > 0x7F800000, 0, magnitude)
    else:
        return magnitude


@triton.jit
def _largest(w0, w1, NUMBERS: tl.constexpr, PTX: tl.constexpr):
    """The largest magnitude of four bf16 as f32 bits. Without NUMBERS a NaN exceeds every number."""
    if PTX and not NUMBERS:
        pair = _largest_of_pairs(w0, w1)
        return tl.maximum(_magnitude(pair << 16, False), _magnitude(pair & -65536, False))
    else:
        low = tl.maximum(_magnitude(w0 << 16, NUMBERS), _magnitude(w1 << 16, NUMBERS))
        high = tl.maximum(_magnitude(w0 & -65536, NUMBERS), _magnitude(w1 & -65536, NUMBERS))
        return tl.maximum(low, high)


@triton.jit
def _tile_max(bits):
    """int32 [32] -> each tile's maximum in all of its 8 units, [32]."""
    tile = tl.max(tl.reshape(bits, [4, 8]), 1)
    return tl.reshape(tl.broadcast_to(tile[:, None], [4, 8]), [32])


@triton.jit
def _scale(amax, FINE: tl.constexpr, HOW: tl.constexpr):
    """Bits of a tile's largest magnitude -> its f32 scale by the policy (shardmill.kernels.kv_row.tile_scales)."""
    value = amax.to(tl.float32, bitcast=True)
    if not FINE:
        # amax / 448 = amax / 1.75 / 2**8: a mantissa above 1.75 takes the next power of two.
        exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, STOCK_EXPONENT_MIN)
        return (exponent << 23).to(tl.float32, bitcast=True)
    elif HOW == TWO_TERMS:
        return tl.fma(value, INVERSE_448_HIGH, value * INVERSE_448_LOW)
    else:
        return tl.maximum(tl.math.div_rn(value, tl.full(value.shape, 448.0, tl.float32)), FLT_MIN)


@triton.jit
def _inverse(scale, HOW: tl.constexpr):
    """What `_scaled` multiplies by: 1 / scale in two terms, or the exact 1 / scale, or (to divide) the scale.

    The first term lies a little below 1 / scale, so that the second is positive and x * second keeps the sign
    of a zero. fma(x, first, x * second) == f32(x / scale) for every bf16 x and amax and for any first term
    within a few units of 1 / scale (enumerated in the tests), so the card's approximate reciprocal will do.
    """
    if HOW == TWO_TERMS:
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        first = (near.to(tl.int32, bitcast=True) - 2).to(tl.float32, bitcast=True)
        return first, tl.fma(-scale, first, 1.0) * first
    elif HOW == POWER_OF_TWO:
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True), scale
    else:
        return scale, scale


@triton.jit
def _scaled(x, first, second, factor, HOW: tl.constexpr):
    """f32(x / scale) * factor, a power of two."""
    if HOW == TWO_TERMS:
        return tl.fma(x, first * factor, x * (second * factor))
    elif HOW == POWER_OF_TWO:
        return x * (first * factor)
    else:
        return tl.math.div_rn(x, first) * factor


@triton.jit
def _code_word(w0, w1, first, second, factor, six, HOW: tl.constexpr, PTX: tl.constexpr):
    """Two words of bf16 -> four E4M3 codes of x / scale * factor; a NaN gives 0x7F, in a fp6 tile +0."""
    word = pack_e4m3(
        _scaled(_low(w0), first, second, factor, HOW),
        _scaled(_high(w0), first, second, factor, HOW),
        _scaled(_low(w1), first, second, factor, HOW),
        _scaled(_high(w1), first, second, factor, HOW),
        PTX,
    )
    if HOW == DIVIDE:
        nan = ((word >> 6) & 0x01010101) * 255  # a code of a fp6 tile is below 0x20, but for NaN
        return tl.where(six, word & ~nan, word)
    else:
        return word


@triton.jit
def _drop(largest, first, second, six, HOW: tl.constexpr):
    """Bits of a group's largest |x| -> its drop d and the factor 2**(d - 12); 0 and 1 in a fp8 tile.

    Adding half a step of a 4-bit significand carries into the exponent exactly where rounding to E4M3 does.
    """
    y = _scaled(largest.to(tl.float32, bitcast=True), first, second, 1.0, HOW)
    top = tl.maximum(y.to(tl.int32, bitcast=True) + 0x80000, 132 << 23) & 0x7F800000
    drop = tl.where(six, 135 - (top >> 23), 0)
    return drop, tl.where(six, (250 << 23) - top, 127 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    words,
    six,
    FP6: tl.constexpr,
    GROUP: tl.constexpr,
    FINE: tl.constexpr,
    HOW: tl.constexpr,
    PTX: tl.constexpr,
):
    """The 8 words of each unit -> scale, 4 code words, and the unit's drops (4 bits, or 8 with groups of 4)."""
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    m0 = _largest(w0, w1, HOW == DIVIDE, PTX)
    m1 = _largest(w2, w3, HOW == DIVIDE, PTX)
    m2 = _largest(w4, w5, HOW == DIVIDE, PTX)
    m3 = _largest(w6, w7, HOW == DIVIDE, PTX)
    if GROUP == 8:
        m0 = tl.maximum(m0, m1)
        m2 = tl.maximum(m2, m3)
    scale = _scale(_tile_max(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))), FINE, HOW)
    first, second = _inverse(scale, HOW)
    f0 = 1.0
    f1 = 1.0
    f2 = 1.0
    f3 = 1.0
    drops = tl.zeros(w0.shape, tl.int32)
    if FP6:
        d0, f0 = _drop(m0, first, second, six, HOW)
        d2, f2 = _drop(m2, first, second, six, HOW)
        if GROUP == 8:
            f1 = f0
            f3 = f2
            drops = d0 | (d2 << 2)
        else:
            d1, f1 = _drop(m1, first, second, six, HOW)
            d3, f3 = _drop(m3, first, second, six, HOW)
            drops = d0 | (d1 << 2) | (d2 << 4) | (d3 << 6)
    c0 = _code_word(w0, w1, first, second, f0, six, HOW, PTX)
    c1 = _code_word(w2, w3, first, second, f1, six, HOW, PTX)
    c2 = _code_word(w4, w5, first, second, f2, six, HOW, PTX)
    c3 = _code_word(w6, w7, first, second, f3, six, HOW, PTX)
    return scale, c0, c1, c2, c3, drops


@triton.jit
def write_kernel(
    x,
    order,
    slots,
    cache,
    rows,
    x_row_words,
    page_words,
    FP8_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    FINE: tl.constexpr,
    NIBBLE: tl.constexpr,
    EXPONENT: tl.constexpr,
    SCALE: tl.constexpr,
    DROP: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    PTX: tl.constexpr,
    R: tl.constexpr,
):
    """Row r of x (bf16 [rows, 512] as words) -> row slots[r] of the cache; a negative slot is skipped.

    A program is one warp and R rows, whose loads are all under way before the first is needed.
    """
    parts = ()
    for i in tl.static_range(R):
        row = tl.program_id(0) * R + i
        slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int32)
        words = _latent_words(x, order, row.to(tl.int64) * x_row_words, row < rows, SPREAD)
        parts += ((slot, words),)
    for i in tl.static_range(R):
        slot, words = parts[i]
        at = cache + row_offset(slot, page_words, ROW_WORDS, PAGE_ROWS)
        scale, c0, c1, c2, c3, drops = _row_codes(words, FP8_TILES, GROUP, FINE, PTX)
        ok = slot >= 0
        _store_codes(at, ok, c0, c1, c2, c3, FP8_TILES, NIBBLE, EXPONENT)
        _store_tail(at, ok, scale, drops, FP8_TILES, GROUP, SCALE, DROP, ROW_WORDS)


@triton.jit
def _latent_words(x, order, offset, ok, SPREAD: tl.constexpr):
    """The 8 words (16 bf16) of each unit of a row, each [32]; with SPREAD element k is column order[k]."""
    at = tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 4)[None, :]
    if SPREAD:
        # x comes as 16-bit words here; the row lies in L1 after its first columns.
        low = _columns(x + offset * 2, order, at, ok)
        high = _columns(x + offset * 2, order, at + 4, ok)
    else:
        low = tl.load(x + offset + at, mask=ok, other=0)
        high = tl.load(x + offset + at + 4, mask=ok, other=0)
    return split4(low) + split4(high)


@triton.jit
def _columns(row, order, word, ok):
    """Elements 2 * word and 2 * word + 1 of a row in the stored order, as words."""
    even = tl.load(row + tl.load(order + 2 * word), mask=ok, other=0).to(tl.int32)
    odd = tl.load(row + tl.load(order + 2 * word + 1), mask=ok, other=0).to(tl.int32)
    return (even & 0xFFFF) | (odd << 16)


@triton.jit
def _row_codes(words, FP8_TILES: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr, PTX: tl.constexpr):
    """`_quantize` with the fastest quotient that is exact for this row."""
    FP6: tl.constexpr = FP8_TILES < 4
    six = tl.arange(0, 32) >= 8 * FP8_TILES
    if PTX:
        FAST: tl.constexpr = TWO_TERMS if FINE else POWER_OF_TWO
        if _has_odd_tile(words, FINE):
            scale, c0, c1, c2, c3, drops = _quantize(words, six, FP6, GROUP, FINE, DIVIDE, PTX)
        else:
            scale, c0, c1, c2, c3, drops = _quantize(words, six, FP6, GROUP, FINE, FAST, PTX)
    else:
        scale, c0, c1, c2, c3, drops = _quantize(words, six, FP6, GROUP, FINE, DIVIDE, PTX)
    return scale, c0, c1, c2, c3, drops


@triton.jit
def _has_odd_tile(words, FINE: tl.constexpr):
    """Whether a tile of the row lies outside the range of the fast quotient, or holds a NaN or an Inf."""
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    low = tl.maximum(_largest(w0, w1, False, True), _largest(w2, w3, False, True))
    high = tl.maximum(_largest(w4, w5, False, True), _largest(w6, w7, False, True))
    amax = _tile_max(tl.maximum(low, high))
    odd = amax > AMAX_MAX
    if FINE:
        odd = odd | (amax < AMAX_MIN)
    return tl.max(odd.to(tl.int32), 0) != 0


@triton.jit
def _store_codes(
    at, ok, c0, c1, c2, c3, FP8_TILES: tl.constexpr, NIBBLE: tl.constexpr, EXPONENT: tl.constexpr
):
    """The code words of a row: whole for fp8 tiles, split into nibble and exponent words for fp6 tiles."""
    unit = tl.arange(0, 32)
    if FP8_TILES > 0:
        k = unit[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(at + k, join4(c0, c1, c2, c3), mask=ok & (k < 32 * FP8_TILES))
    if FP8_TILES < 4:
        n0 = (c0 & 0x07070707) | ((c0 >> 4) & 0x08080808)
        n1 = ((c1 & 0x07070707) << 4) | (c1 & -0x7F7F7F80)
        n2 = (c2 & 0x07070707) | ((c2 >> 4) & 0x08080808)
        n3 = ((c3 & 0x07070707) << 4) | (c3 & -0x7F7F7F80)
        exponents = ((c0 >> 3) & 0x03030303) | ((c1 >> 1) & 0x0C0C0C0C)
        exponents |= ((c2 << 1) & 0x30303030) | ((c3 << 3) & -0x3F3F3F40)
        v = unit - 8 * FP8_TILES
        two = v[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(at + NIBBLE + two, tl.join(n0 | n1, n2 | n3), mask=ok & (two >= 0))
        tl.store(at + EXPONENT + v, exponents, mask=ok & (v >= 0))


@triton.jit
def _store_tail(
    at,
    ok,
    scale,
    drops,
    FP8_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DROP: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """Scales, drops and zeros behind the codes: one store of 4 bytes a lane, and the rotary slot of rung 656."""
    unit = tl.arange(0, 32)
    to = SCALE + unit // 8
    value = scale.to(tl.int32, bitcast=True)
    mine = unit % 8 == 1
    if FP8_TILES < 4:
        FIRST: tl.constexpr = FP8_TILES * 8 // GROUP
        WORDS: tl.constexpr = 32 // GROUP
        shift = tl.arange(0, GROUP) * WORDS
        word = tl.sum(tl.reshape(drops, [WORDS, GROUP]) << shift[None, :], 1)
        word = tl.reshape(tl.broadcast_to(word[:, None], [WORDS, GROUP]), [32])
        drop_lane = unit % GROUP == 0
        to = tl.where(drop_lane, DROP + unit // GROUP - FIRST, to)
        value = tl.where(drop_lane, word, value)
        mine = mine | (drop_lane & (unit >= 8 * FP8_TILES))
        if DROP + WORDS - FIRST < ROW_WORDS:  # the padding of 8666p, one word
            to = tl.where(unit == 0, DROP + WORDS - FIRST, to)
            value = tl.where(unit == 0, 0, value)
            mine = mine | (unit == 0)
    tl.store(at + to, value, mask=ok & mine)
    if ROW_WORDS == CANONICAL_WORDS:
        tl.store(at + 132 + unit, tl.zeros([32], tl.int32), mask=ok)
