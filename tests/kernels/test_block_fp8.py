"""The law of amax/1 and ue8m0/1: every kernel gives the bits that looking at all 256 codes gives."""

from __future__ import annotations

from pickle import UnpicklingError

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.kernels.block_fp8 import (
    NonFinite,
    decode,
    encode_reference,
    encoder,
    grid,
    known_kernels,
    why_no_numba,
)
from shardmill.kernels.block_fp8_numpy import NumpyRows
from shardmill.kernels.formats import E4M3_MAX, E4M3_VALUES, f32_to_bf16, nearest_codes
from tests.kernels.conftest import FINITE_BF16, as_f32, assert_same_bits, bell, encode, words

BLOCKS = [(128, 128), (32, 32), (1, 7), (5, 3), (128, 1), (1, 128)]


def check(source, block, kernel):
    """encode's codes and scales are the reference's."""
    expected_codes, expected_scales = encode_reference(as_f32(source), block)
    codes, scales, counts = encode("amax/1", source, block, kernel)
    assert_same_bits(expected_scales, scales, f"scales {block}")
    assert_same_bits(expected_codes, codes, f"codes {block}")
    assert counts == {}


def rows_of(kernel):
    if kernel == "numpy":
        return NumpyRows()
    from shardmill.kernels.block_fp8_numba import NumbaRows

    return NumbaRows()


def test_every_bf16_over_many_scales_gives_the_nearest_code(kernel):
    """Every finite BF16 pattern, over scales of all 128 mantissas of amax, gives the nearest of 256 to the quotient."""
    amaxes = (np.arange(128, dtype=np.uint16) << 0) | (np.arange(128, dtype=np.uint16) % 5 * 45 + 40 << 7)
    scales = (as_f32(amaxes) / np.float32(E4M3_MAX)).reshape(-1, 1)  # from 2^-96 to 2^92
    wide = np.repeat(FINITE_BF16[None], len(scales), axis=0)
    with np.errstate(over="ignore"):
        quotients = as_f32(wide) / scales
    near = np.abs(quotients) < 464
    quotients[~near], wide[~near] = 0, 0
    codes = np.empty(wide.shape, np.uint8)
    rows_of(kernel).codes(wide, scales, (1, wide.shape[1]), codes)
    assert near.sum() > 2_000_000
    assert_same_bits(nearest_codes(quotients, E4M3_VALUES), codes, "codes")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_ragged_matrices_of_any_finite_bits(kernel, block, dtype):
    """Sources of all three dtypes, any finite bits, any block shape, ragged edges: the reference's bits."""
    bits = words(7, 133, 201)
    if dtype == "bf16":
        source = np.where(bits & 0x7F80 == 0x7F80, bits & 0x807F, bits).astype(np.uint16)
    elif dtype == "f16":
        source = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits).astype(np.uint16).view(np.float16)
    else:
        source = (
            np.where(bits & 0x7F800000 == 0x7F800000, bits & 0x807FFFFF, bits)
            .astype(np.uint32)
            .view(np.float32)
        )
    check(source, block, kernel)


@pytest.mark.parametrize("exponents", [(0, 2), (0, 20), (1, 30), (8, 12)])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_tiny_blocks(kernel, exponents, dtype):
    """Blocks whose scale, weights or quotients are subnormal f32 numbers obey the law too."""
    low, high = exponents
    spread = (words(8, 70, 90) % (high - low) + low) << 23 | words(9, 70, 90) & 0x807FFFFF
    source = spread.astype(np.uint32).view(np.float32)
    check(source if dtype == "f32" else f32_to_bf16(source), (16, 32), kernel)


def test_the_scale_never_reaches_zero(kernel):
    """An amax of a few times 2^-149 gets the smallest scale there is, and keeps its digits."""
    source = np.arange(-300, 300, dtype=np.int32).reshape(20, 30)
    check(
        (np.abs(source) | np.where(source < 0, 1 << 31, 0)).astype(np.uint32).view(np.float32),
        (1, 30),
        kernel,
    )


def test_subnormal_scales_round_to_even(kernel):
    """An amax midway between two multiples of 448 * 2^-149 gets the even one of the two scales."""
    units = 448 * np.arange(1, 9, dtype=np.uint32)[None] + 224
    _, scales, _ = encode("amax/1", units.view(np.float32), (1, 1), kernel)
    assert scales.view(np.uint32)[0].tolist() == [2, 2, 4, 4, 6, 6, 8, 8]


def test_ties_go_to_the_even_code(kernel):
    """With the scale 1, each midpoint of two neighbours gives the even code, the f32 beside it the nearer one."""
    values = E4M3_VALUES[:0x7F]
    ties = (values[1:] + values[:-1]) / 2
    down, up = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))
    source = np.concatenate([[448], values, ties, down, up]).astype(np.float32)[None]
    source = np.concatenate([source, -source], axis=1)
    codes, scales, _ = encode("amax/1", source, source.shape, kernel)
    code = np.arange(0x7E)
    expected = np.concatenate([[0x7E], np.arange(0x7F), code + code % 2, code, code + 1])
    assert scales[0, 0] == 1
    assert codes[0].tolist() == [*expected.tolist(), *(expected | 0x80).tolist()]


def test_zero_blocks_keep_signs(kernel):
    """A block of zeros has the scale 1, +0 gives 0x00 and -0 gives 0x80; its neighbour is not disturbed."""
    source = np.zeros((4, 8), np.uint16)
    source[1, 2] = 0x8000
    source[0, 4:] = 0x3F80
    codes, scales, _ = encode("amax/1", source, (4, 4), kernel)
    assert scales.tolist() == [[1, np.float32(1) / np.float32(448)]]
    expected = np.zeros((4, 8), np.uint8)
    expected[1, 2] = 0x80
    expected[0, 4:] = 0x7E
    assert_same_bits(expected, codes, "codes")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_any_block_any_bits(kernel, data):
    """Whatever the shape, the block and the finite BF16 bits: the reference's codes and scales."""
    rows, C = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    block = data.draw(st.integers(1, 25)), data.draw(st.integers(1, 25))
    patterns = st.integers(0, len(FINITE_BF16) - 1)
    lowest = data.draw(st.sampled_from([0, 0, 0x1000, 0x3000]))
    drawn = data.draw(st.lists(patterns, min_size=rows * C, max_size=rows * C))
    source = FINITE_BF16[drawn].reshape(rows, C)
    check(np.where((source & 0x7FFF) < lowest, source & 0x8000, source).astype(np.uint16), block, kernel)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(np.uint16, 0x7FC0), (np.uint16, 0x7F80), (np.uint16, 0xFF80), (np.uint16, 0xFFFF)]
    + [(dtype, bad) for dtype in (np.float16, np.float32) for bad in (np.nan, -np.nan, np.inf, -np.inf)],
)
def test_nan_and_inf_are_refused_by_place(kernel, dtype, bad):
    """A NaN or an Inf raises NonFinite with its row and column in the strip, the first one if there are two."""
    source = np.zeros((1200, 300), dtype)
    source[1190, 7] = source[1111, 299] = bad
    with pytest.raises(NonFinite, match="row 1111, column 299") as caught:
        encode("amax/1", source, (128, 128), kernel)
    assert (caught.value.row, caught.value.col) == (1111, 299)
    assert not np.isfinite(caught.value.value)


def test_ue8m0_is_the_smallest_power_of_two_not_below_amax_over_448(kernel):
    """A ue8m0/1 scale is 2^n >= amax/448 > 2^(n-1), never below 2^-127, and the codes are made with it."""
    amaxes = np.concatenate(
        [FINITE_BF16[FINITE_BF16 < 0x7F80][1::7], [0x43E0, 0x43E1, 0x43DF, 0x0001, 0x0380]]
    )
    source = np.stack([amaxes, amaxes // 2 | 0x8000]).astype(np.uint16)
    codes, scales, counts = encode("ue8m0/1", source, (2, 1), kernel)
    exact = as_f32(amaxes.astype(np.uint16)).astype(np.float64) / 448
    mantissa, _ = np.frexp(scales[0].astype(np.float64))
    assert (mantissa == 0.5).all()
    assert (scales[0] >= exact).all()
    assert ((scales[0] / 2 < exact) | (scales[0] == 2.0**-127)).all()
    quotients = (as_f32(source).astype(np.float64) / scales).astype(np.float32)
    assert_same_bits(nearest_codes(quotients, E4M3_VALUES), codes, "codes")
    assert counts == {}


def test_decode_multiplies(kernel):
    """decode gives E4M3 value times scale, ragged edges included, within half a step of the source."""
    source = bell(4, 150, 210)
    codes, scales, _ = encode("amax/1", source, (64, 32), kernel)
    decoded, weights = decode(codes, scales, (64, 32)), as_f32(source)
    assert decoded.dtype == np.float32
    assert decoded[149, 209] == E4M3_VALUES[codes[149, 209]] * scales[2, 6]
    assert 0.02 < np.linalg.norm(decoded - weights) / np.linalg.norm(weights) < 0.03


def test_decoded_codes_encode_to_themselves(kernel):
    """A block that holds the code 448, decoded to f32, gives the same codes again."""
    codes = (words(5, 64, 64) & 0xFF).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    codes[::32, ::32] = 0x7E
    scales = (words(6, 2, 2) % 1000 + 1).astype(np.float32) * np.float32(2.0**-17)
    again, _, _ = encode("amax/1", decode(codes, scales, (32, 32)), (32, 32), kernel)
    assert_same_bits(codes, again, "codes")


def test_auto_takes_the_fastest_kernel_there_is():
    """encoder's default is the last of known_kernels; a kernel's object says its name and recipe."""
    made = encoder("amax/1", (128, 128))
    assert (made.name, made.recipe) == (known_kernels()[-1], "amax/1")
    assert encoder("amax/1", (128, 128), "numpy").name == "numpy"


@pytest.mark.parametrize(
    "refusal",
    [
        ImportError("needs NumPy 2.3 or less"),
        RuntimeError("no locator available"),
        EOFError("Ran out of input"),  # an empty file in its cache
        UnpicklingError("pickle data was truncated"),
        AttributeError("of a class that another version pickled"),
        OSError(5, "Input/output error"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_numba_that_cannot_run_counts_as_none(monkeypatch, refusal):
    """Where numba is broken, cannot cache or has a damaged cache, auto is numpy, not a traceback."""

    def refuse(name):
        raise refusal

    known_kernels.cache_clear()
    why_no_numba.cache_clear()
    monkeypatch.setattr("importlib.import_module", refuse)
    assert known_kernels() == ("numpy",)
    assert encoder("amax/1", (128, 128)).name == "numpy"
    assert str(refusal) in str(why_no_numba())
    known_kernels.cache_clear()
    why_no_numba.cache_clear()


def test_grid_covers_the_matrix():
    """A matrix one larger than its blocks needs one block more."""
    assert grid((256, 129), (128, 128)) == (2, 2)
    assert grid((1, 1), (128, 128)) == (1, 1)
