"""E2M3 and its road to E4M3, enumerated whole."""

import ml_dtypes
import numpy as np

from shardmill.kernels import fp6
from shardmill.kernels.formats import E2M3_VALUES, E4M3_VALUES, bf16_to_f32

EVERY_BF16 = bf16_to_f32(np.arange(1 << 16, dtype=np.uint16))
FINITE = EVERY_BF16[np.isfinite(EVERY_BF16)]


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Brute force: the code of the nearest magnitude among all, of two equally near the even one; sign kept."""
    half = len(table) // 2
    magnitudes = table[:half].astype(np.float64)
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - magnitudes[None, :])
    least = distance.min(axis=1, keepdims=True)
    ranked = np.where(distance == least, np.arange(len(magnitudes)) % 2, 2)
    return (np.argmin(ranked, axis=1) | np.where(np.signbit(values), half, 0)).astype(np.uint8)


def test_e2m3_bits_extended_with_zeros_are_the_e4m3_byte_of_a_64th():
    code = np.arange(32)
    np.testing.assert_array_equal(E2M3_VALUES[code] * np.float32(2.0**-6), E4M3_VALUES[code])


def test_every_code_with_every_drop_restages_to_a_byte_of_equal_value_but_for_seven_and_a_half():
    for drop in range(4):
        for code in range(64):
            value = np.ldexp(E2M3_VALUES[code], 6 - drop)
            byte = fp6.RESTAGED[drop, code]
            if drop == 0 and abs(E2M3_VALUES[code]) == 7.5:
                assert byte == 0xFF
            else:
                assert E4M3_VALUES[byte] == value
                assert np.signbit(E4M3_VALUES[byte]) == (code >= 32)


def test_e4m3_rounding_is_the_nearest_of_all_bytes_for_every_bf16():
    clipped = np.clip(FINITE, -448, 448)
    np.testing.assert_array_equal(fp6.e4m3_nearest(FINITE), nearest(clipped, E4M3_VALUES))


def test_e4m3_rounding_equals_ml_dtypes_for_random_f32_bits():
    bits = np.random.Generator(np.random.PCG64(1)).integers(0, 1 << 32, 300_000, np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp6.e4m3_nearest(values), expected)


def test_e4m3_rounding_of_nan_is_the_one_nan_byte():
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    np.testing.assert_array_equal(fp6.e4m3_nearest(nans), 0x7F)


def test_codes_are_the_nearest_of_all_sixty_four_for_every_bf16_and_every_midpoint():
    small = FINITE[np.abs(FINITE) <= 7.5]
    middles = (E2M3_VALUES[:31] + E2M3_VALUES[1:32]) / 2
    values = np.concatenate([small, middles, -middles, np.nextafter(middles, 8), np.nextafter(middles, 0)])
    code = fp6.codes_nearest(values)
    wanted = nearest(values, E2M3_VALUES)
    np.testing.assert_array_equal(code, wanted)


def test_a_nan_becomes_the_code_plus_zero():
    np.testing.assert_array_equal(fp6.codes_nearest(np.array([np.nan, -np.nan], np.float32)), 0)


def test_a_drop_is_what_the_exponent_lacks_to_fifteen_up_to_three():
    np.testing.assert_array_equal(fp6.drops(np.arange(16, dtype=np.uint8)), [3] * 13 + [2, 1, 0])
