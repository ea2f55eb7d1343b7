"""The tables and bit laws of shardmill.kernels.formats, against ml_dtypes, which nobody here wrote."""

import ml_dtypes
import numpy as np
import pytest

from shardmill.kernels.formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E2M3_MAX,
    E2M3_VALUES,
    E4M3_MAX,
    E4M3_VALUES,
    bf16_to_f32,
    f32_to_bf16,
    nearest_codes,
)
from tests.kernels.conftest import FINITE_BF16, assert_same_bits, words

TABLES = [
    (E4M3_VALUES, ml_dtypes.float8_e4m3fn, E4M3_MAX),
    (E2M1_VALUES, ml_dtypes.float4_e2m1fn, E2M1_MAX),
    (E2M3_VALUES, ml_dtypes.float6_e2m3fn, E2M3_MAX),
]


@pytest.mark.parametrize(("table", "dtype", "largest"), TABLES)
def test_a_table_holds_what_ml_dtypes_reads(table, dtype, largest):
    """Every code stands for the value that ml_dtypes gives it, the sign of zero included."""
    codes = np.arange(table.size, dtype=np.uint8)
    expected = codes.view(dtype).astype(np.float32)
    assert np.array_equal(np.signbit(expected), np.signbit(table) | np.isnan(table) & np.signbit(expected))
    assert np.array_equal(expected, table, equal_nan=True)
    assert np.nanmax(table) == largest


def test_e4m3_has_two_nans():
    """Only 0x7F and 0xFF are NaN."""
    assert np.flatnonzero(np.isnan(E4M3_VALUES)).tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize(("table", "dtype", "largest"), TABLES)
def test_nearest_codes_are_what_ml_dtypes_casts_to(table, dtype, largest):
    """The nearest code is the cast's, for values, ties and their f32 neighbours up to the largest value."""
    values = np.sort(table[~np.isnan(table)])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [values, ties, np.nextafter(ties, np.float32(-9e9)), np.nextafter(ties, np.float32(9e9))]
    )
    near = np.concatenate([near, -near])
    assert_same_bits(near.astype(dtype).view(np.uint8), nearest_codes(near, table), "codes")


def test_every_bf16_survives_f32():
    """BF16 -> f32 -> BF16 changes no finite pattern and no infinity."""
    patterns = np.concatenate([FINITE_BF16, np.array([0x7F80, 0xFF80], np.uint16)])
    assert_same_bits(patterns, f32_to_bf16(bf16_to_f32(patterns)), "patterns")


def test_f32_to_bf16_rounds_as_ml_dtypes_does():
    """Rounding to BF16 is to nearest even, subnormal numbers and overflow to infinity included."""
    bits = np.concatenate(
        [words(1, 100_000), (words(2, 20_000) & 0xFFFF0000) | 0x8000, words(3, 9_000) & 0x807FFFFF]
    )
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    assert_same_bits(values.astype(ml_dtypes.bfloat16).view(np.uint16), f32_to_bf16(values), "bf16")


def test_f32_to_bf16_keeps_nan_and_shape():
    """A NaN stays NaN, even one whose payload lies in the lower half; a scalar stays 0-d."""
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(nans))).all()
    assert f32_to_bf16(np.float32(1)).shape == ()
    assert f32_to_bf16(np.zeros((2, 3), np.float32)).shape == (2, 3)
