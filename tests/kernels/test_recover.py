"""recover/1 gives back the scale of blocks that were FP8 once, and calls exact only what is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.kernels.block_fp8 import decode, encoder, grid
from shardmill.kernels.formats import E4M3_VALUES, f32_to_bf16, nearest_codes
from shardmill.kernels.recover import TOP_CODES, recover_scales
from tests.kernels.conftest import (
    FINITE_BF16,
    as_f32,
    assert_same_bits,
    bell,
    bell_f32,
    encode,
    native_copy,
    words,
)
from tests.kernels.test_block_fp8 import rows_of

FUNCTION_SCOPED = [HealthCheck.function_scoped_fixture]


def proven(source, block, kernel):
    """Checks every promise of recover/1 on a matrix; returns which blocks it calls exact, bool [n, m].

    Exact blocks decode to the source, bit for bit; all others hold amax/1's bytes; the counts agree.
    """
    rows = rows_of(kernel)
    scales, exact = recover_scales(rows, source, rows.maxima(source, block), block)
    codes, written, counts = encode("recover/1", source, block, kernel)
    assert_same_bits(scales, written, "scales")
    assert counts == {"blocks": exact.size, "exact_blocks": exact.sum()}
    plain_codes, plain_scales, _ = encode("amax/1", source, block, kernel)
    back = f32_to_bf16(decode(codes, scales, block))
    r, c = block
    for i, j in np.ndindex(exact.shape):
        at = slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c)
        if exact[i, j]:
            assert_same_bits(source[at], back[at], f"exact block {i, j}")
        else:
            assert_same_bits(plain_codes[at], codes[at], f"codes of block {i, j}")
            assert plain_scales[i, j] == scales[i, j]
    return exact


@pytest.mark.parametrize("top", [-120, -125, -130, -133])
def test_lossless_blocks_are_counted_at_every_scale_however_tiny(kernel, top):
    """A block of subnormal numbers that its codes hold whole counts, and none that they do not."""
    rng = np.random.Generator(np.random.PCG64(-top))
    whole = np.ldexp(rng.integers(-8, 9, (32, 64)).astype(np.float64), top)
    whole[0, ::16] = np.ldexp(8.0, top)
    source = f32_to_bf16(whole.astype(np.float32))
    exact = proven(source, (16, 16), kernel)
    codes, scales, _ = encode("amax/1", source, (16, 16), kernel)
    kept = f32_to_bf16(decode(codes, scales, (16, 16))) == source
    by_amax = kept.reshape(2, 16, 4, 16).all(axis=(1, 3))
    assert (exact >= by_amax).all()


def copy_of(codes, scales, block):
    return f32_to_bf16(decode(codes, scales, block))


def from_origin(origin: str):
    """BF16 copy and codes of a ragged matrix [300, 290], whose [64, 64] blocks got their scales in some other way."""
    block, fresh = (64, 64), bell_f32(41, 300, 290)
    if origin == "heavy tails":
        fresh = fresh**3
    recipe = "ue8m0/1" if origin == "power of two" else "amax/1"
    codes, scales, _ = encode(recipe, fresh, block, "numpy")
    factor = {"larger than amax / 448": 1.37, "clamped": 0.4}.get(origin, 1.0)
    if factor != 1.0:
        scales *= np.float32(factor)
        wide = np.repeat(np.repeat(scales, 64, axis=0)[:300], 64, axis=1)[:, :290]
        codes = nearest_codes(np.clip(fresh / wide, -448, 448), E4M3_VALUES)
    return copy_of(codes, scales, block), codes, scales


@pytest.mark.parametrize(
    "origin", ["amax / 448", "power of two", "larger than amax / 448", "clamped", "heavy tails"]
)
def test_native_blocks_come_back_whole(kernel, origin):
    """Whatever the original scale was, all ragged blocks are exact."""
    source, _, _ = from_origin(origin)
    assert proven(source, (64, 64), kernel).all()


def test_two_thousand_native_blocks(kernel):
    """Not one of 2,304 native blocks is missed: bounds at powers of two, where BF16's steps change, are right."""
    assert proven(native_copy(62, (16, 16), 768, 768), (16, 16), kernel).all()  # one hangs on it


def test_codes_of_amax_over_448_come_back(kernel):
    """Blocks whose scale was amax / 448 get the very codes they had."""
    source, codes, _ = from_origin("amax / 448")
    assert_same_bits(codes, encode("recover/1", source, (64, 64), kernel)[0], "codes")


def test_amax_alone_would_lose(kernel):
    """On the same blocks amax/1 has the codes right and, decoded to BF16, the weights wrong by 0.1 to 0.3 per cent."""
    source, codes, _ = from_origin("amax / 448")
    plain_codes, plain_scales, _ = encode("amax/1", source, (64, 64), kernel)
    weights = as_f32(source)
    lost = as_f32(copy_of(plain_codes, plain_scales, (64, 64))) - weights
    assert_same_bits(codes, plain_codes, "codes")
    assert 0.001 < np.linalg.norm(lost) / np.linalg.norm(weights) < 0.003


def test_scales_come_closer_to_the_original(kernel):
    """BF16 hides the original scale within 0.2 per cent; the middle of what is left errs less than half of amax/1."""
    source, _, scales = from_origin("amax / 448")
    errors = [encode(recipe, source, (64, 64), kernel)[1] / scales - 1 for recipe in ("recover/1", "amax/1")]
    recovered, plain = (float(np.sqrt(np.mean(error**2))) for error in errors)
    assert np.abs(errors[0]).max() < 0.002
    assert recovered < plain / 2


def test_powers_of_two_come_back_as_powers_of_two(kernel):
    """Scales that were UE8M0 once are again, so that a runtime that rounds scales to UE8M0 changes nothing."""
    source, _, scales = from_origin("power of two")
    ratios = scales / encode("recover/1", source, (64, 64), kernel)[1]
    assert set(ratios.flat) <= {1, 2}  # 2 where the largest code was 224: then all codes are doubled


def test_fresh_weights_are_not_claimed(kernel):
    """Of blocks that were never FP8, none is exact."""
    for block in ((128, 128), (32, 32), (64, 64)):
        assert not proven(bell(42, 300, 290), block, kernel).any()


def test_one_foreign_element_is_enough(kernel):
    """A block with one element that no code explains falls back to amax/1; the blocks around it stay exact."""
    source = native_copy(43, (64, 64), 128, 192)
    source[70, 130] ^= 1
    assert proven(source, (64, 64), kernel).tolist() == [[True, True, True], [True, True, False]]


def test_a_number_too_small_for_any_code_is_foreign(kernel):
    """An element whose mantissa fits and whose code would be 0 makes its block fall back."""
    source = native_copy(44, (16, 16), 16, 32)
    source[5, 20] = source[5, 20] & 0x807F | 0x2000
    assert proven(source, (16, 16), kernel).tolist() == [[True, False]]


def test_zeros_cost_nothing(kernel):
    """A block of zeros of both signs is exact; rows of zeros, the first and last too, do not hide the others."""
    source = native_copy(45, (32, 32), 64, 96)
    source[0], source[31], source[40:64] = 0, 0x8000, 0
    source[:32, 64:] = words(46, 32, 32) & 0x8000
    assert proven(source, (32, 32), kernel).all()


def test_one_number_in_a_block_of_zeros(kernel):
    """Any number alone in its block is exact, wherever it stands."""
    source = np.zeros((64, 64 * 32), np.uint16)
    patterns = FINITE_BF16[(FINITE_BF16 & 0x7FFF) > 0x0F00]
    for k, pattern in enumerate(patterns[:: len(patterns) // 64][:64]):
        i, j = divmod(k, 64)
        source[32 * i + k % 32, 32 * j + 5 * k % 32] = pattern
    assert proven(source, (32, 32), kernel).all()


@pytest.mark.parametrize("top", [*TOP_CODES, 120, 9.0, 0.875, 2.0**-9])
def test_any_top_code(kernel, top):
    """The largest code need not be 448: any m, any power of two, down to subnormal codes."""
    below = np.flatnonzero(E4M3_VALUES[:0x7F] <= top)
    codes = below[words(47, 32, 64) % len(below)].astype(np.uint8) | (words(48, 32, 64) & 0x80).astype(
        np.uint8
    )
    codes[3, 7] = codes[9, 60] = below[-1]
    scales = np.array([[0.000123, 3.21]], np.float32)
    assert proven(copy_of(codes, scales, (32, 32)), (32, 32), kernel).all()


def test_subnormal_codes(kernel):
    """Blocks that mix 448 with all of E4M3's subnormal codes are exact."""
    codes = (words(49, 32, 32) % 8).astype(np.uint8)
    codes[0, 0] = 0x7E
    assert proven(copy_of(codes, np.full((1, 1), 0.0173, np.float32), (32, 32)), (32, 32), kernel).all()


def test_a_sample_that_misses_a_mantissa_is_mended(kernel):
    """Where the sampled rows hold few of the block's mantissas, the whole block is looked through."""
    codes, scales, _ = encode("amax/1", bell_f32(50, 128, 1024), (128, 128), kernel)
    codes[0], codes[127] = 0x7E, 0x7E
    assert proven(copy_of(codes, scales, (128, 128)), (128, 128), kernel).all()


def test_the_share_tells_a_wrong_grid(kernel):
    """An offset grid, or blocks larger than the original ones, are hardly ever exact; smaller ones always are."""
    source = native_copy(51, (64, 64), 256, 256)
    assert proven(np.ascontiguousarray(source[32:]), (64, 64), kernel)[:3].mean() < 0.1
    assert proven(np.ascontiguousarray(source[:, 32:]), (64, 64), kernel)[:, :3].mean() < 0.1
    assert proven(source, (128, 128), kernel).mean() < 0.1
    assert proven(source, (32, 32), kernel).all()
    assert proven(source, (16, 64), kernel).all()


def test_blocks_too_tiny_for_row_arithmetic_are_proven_without_it(kernel):
    """Below a scale of 2^-116 integers and f64 prove a block, so that flushed subnormals cannot change an answer."""
    codes = (words(54, 16, 32) & 0x7F).astype(np.uint8)
    codes[codes == 0x7F] = 0
    codes[0, ::16] = 0x7E
    scales = np.array([[2.0**-117, 2.0**-115]], np.float32)
    assert proven(copy_of(codes, scales, (16, 16)), (16, 16), kernel).tolist() == [[True, True]]


@settings(max_examples=80, deadline=None, suppress_health_check=FUNCTION_SCOPED)
@given(data=st.data())
def test_every_native_block_is_recovered(kernel, data):
    """Whatever codes and scale a block was made of, it is exact (scales from 2^-100 to 2^100)."""
    rows, C = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = np.array(
        data.draw(st.lists(st.sampled_from(finite), min_size=rows * C, max_size=rows * C)), np.uint8
    )
    mantissa, exponent = data.draw(st.integers(1 << 23, (1 << 24) - 1)), data.draw(st.integers(-123, 77))
    scale = np.full((1, 1), mantissa * 2.0**exponent, np.float32)
    source = copy_of(codes.reshape(rows, C), scale, (rows, C))
    assert proven(source, (rows, C), kernel).all()


@settings(max_examples=80, deadline=None, suppress_health_check=FUNCTION_SCOPED)
@given(data=st.data())
def test_nothing_is_called_exact_that_is_not(kernel, data):
    """Blocks of a few BF16 numbers near to native ones: each that is called exact decodes to itself."""
    rows, C = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
    near = [0, 0x8000, *range(0x3F80, 0x4100, 9), *range(0x3C00, 0x3C20), 0xBF91, 0x3A00, 0x0001]
    numbers = data.draw(st.lists(st.sampled_from(near), min_size=rows * C, max_size=rows * C))
    block = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    exact = proven(np.array(numbers, np.uint16).reshape(rows, C), block, kernel)
    assert exact.shape == grid((rows, C), block)


@settings(max_examples=15, deadline=None, suppress_health_check=FUNCTION_SCOPED)
@given(cuts=st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_strips_add_up(kernel, cuts):
    """Read in strips of any number of block rows, scales, codes and counts are those of the whole."""
    source = np.concatenate([native_copy(55, (16, 16), 96, 80), bell(56, 90, 80)])
    codes, scales, counts = encode("recover/1", source, (16, 16), kernel)
    assert 0 < counts["exact_blocks"] < counts["blocks"]
    encoding, begin, exact = encoder("recover/1", (16, 16), kernel), 0, 0
    for height in [*cuts, 99]:
        part = source[begin : begin + 16 * height]
        got_codes, got_scales = (
            np.empty(part.shape, np.uint8),
            np.empty(grid(part.shape, (16, 16)), np.float32),
        )
        exact += encoding.encode(part, got_codes, got_scales)["exact_blocks"] if len(part) else 0
        assert_same_bits(codes[begin : begin + 16 * height], got_codes, "codes")
        assert_same_bits(scales[begin // 16 : begin // 16 + height], got_scales, "scales")
        begin += 16 * height
    assert exact == counts["exact_blocks"]
