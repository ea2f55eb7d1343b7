"""The judge's own encoder gives the bits that the written recipes ask for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.verify.formats.encode import decodes_to, encode_block, nearest


def _bf16(bits: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_nearest_equals_a_cast_for_every_bf16_value_up_to_448() -> None:
    values = _bf16(np.arange(1 << 16, dtype=np.uint16))
    values = values[np.abs(values) <= 448]
    assert np.array_equal(
        nearest(values.astype(np.float64)), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )


def test_a_tie_goes_to_the_even_code() -> None:
    ties = (E4M3_VALUES[:0x7E].astype(np.float64) + E4M3_VALUES[1:0x7F]) / 2
    assert not (nearest(ties) & 1).any()


@given(st.lists(st.integers(0, 0x7F7F), min_size=1, max_size=24), st.integers(0, 0xFFFFFFFF))
def test_amax_1_is_f32_division_and_nearest_code(magnitudes: list[int], signs: int) -> None:
    bits = np.array([m | (signs >> i & 1) << 15 for i, m in enumerate(magnitudes)], np.uint16)
    block = _bf16(bits).reshape(1, -1)
    scale, codes = encode_block(block, "amax/1")
    amax = np.abs(block).max()
    assert scale == (np.float32(1) if amax == 0 else amax / np.float32(448))
    quotient = np.clip(block / scale, -448, 448)
    best = np.abs(
        quotient[..., None].astype(np.float64) - E4M3_VALUES[:0x7F] * np.sign(quotient)[..., None]
    ).min(-1)
    assert np.array_equal(np.abs(quotient.astype(np.float64) - E4M3_VALUES[codes]), best)


def test_a_block_of_zeros_takes_the_scale_1_and_keeps_its_signs() -> None:
    scale, codes = encode_block(np.array([[0.0, -0.0]], np.float32), "amax/1")
    assert (scale, codes.tolist()) == (1.0, [[0x00, 0x80]])


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (449.0, 2.0), (7.0, 2.0**-6), (7.01, 2.0**-5), (1e-38, 2.0**-127)]
)
def test_ue8m0_1_takes_the_smallest_power_of_two(amax: float, scale: float) -> None:
    assert encode_block(np.array([[amax]], np.float32), "ue8m0/1")[0] == scale


def test_a_block_decodes_to_itself_only_bit_for_bit() -> None:
    codes = np.arange(0x7F, dtype=np.uint8).reshape(1, -1)
    scale = np.float32(0.0123)
    block = (E4M3_VALUES[codes] * scale).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert decodes_to(block, scale, codes)
    block[0, 5] = -block[0, 5]
    assert not decodes_to(block, scale, codes)
    assert not decodes_to(np.array([[-0.0]], np.float32), scale, np.array([[0]], np.uint8))


@given(st.integers(0, 1 << 32), st.integers(-34, 30))
def test_mse_1_is_the_pipelines_scale_bit_for_bit_though_the_code_is_another(
    draw: int, exponent: int
) -> None:
    from shardmill.kernels.block_fp8 import rows_of
    from shardmill.kernels.mse import mse_scales

    random = np.random.Generator(np.random.PCG64(draw))
    shape = (int(random.integers(1, 40)), int(random.integers(1, 40)))
    block = (random.standard_t(5, shape) * 10.0**exponent).clip(-1e38, 1e38).astype(np.float32)
    maxima = np.abs(block).max(keepdims=True).view(np.uint32)
    theirs, _ = mse_scales(rows_of("numpy"), block, maxima, shape)
    scale, codes = encode_block(block, "mse/1")
    assert scale == theirs[0, 0]
    assert np.array_equal(
        codes, nearest(np.clip((block / scale).astype(np.float32), -448, 448).astype(np.float64))
    )


def test_no_block_that_is_not_all_zeros_takes_the_scale_zero() -> None:
    scale, codes = encode_block(np.array([[2.0**-149, 0.0]], np.float32), "amax/1")
    assert (scale, codes.tolist()) == (np.float32(2.0**-149), [[0x38, 0x00]])
