"""The write kernel divides by a product and a fused multiply-add. Why that is a division: all cases."""

import numpy as np
import pytest

F32 = np.float32
SIGNIFICANDS = (128 + np.arange(128)).astype(F32) / F32(128)  # of every normal bf16


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32(a * b + c) rounded once: product and sum are exact in f64 for the operands used here."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(F32)


def test_amax_over_448_in_two_terms_equals_the_division_for_every_significand():
    high, low = F32(float.fromhex("0x1.24924ap-9")), F32(float.fromhex("-0x1.b6db6ep-34"))
    got = fma(SIGNIFICANDS, np.full(128, high), SIGNIFICANDS * low)
    np.testing.assert_array_equal(got, SIGNIFICANDS / F32(448))


@pytest.mark.parametrize("off", [-5, -4, -3, -2, -1])
def test_x_over_scale_in_two_terms_equals_the_division_for_every_pair_whatever_the_reciprocal_s_last_bits(
    off,
):
    scale = (SIGNIFICANDS / F32(448)).astype(F32)
    first = ((F32(1) / scale).astype(F32).view(np.int32) + off).view(F32)
    rest = fma(-scale, first, np.ones(128, F32))
    second = (rest * first).astype(F32)
    assert (second > 0).all()  # so that x * second keeps the sign of a zero
    x = SIGNIFICANDS[None, :]
    got = fma(np.broadcast_to(x, (128, 128)), first[:, None], (x * second[:, None]).astype(F32))
    np.testing.assert_array_equal(got, (x / scale[:, None]).astype(F32))


def test_a_product_with_the_rounded_reciprocal_alone_would_not_do():
    scale = (SIGNIFICANDS / F32(448)).astype(F32)
    product = SIGNIFICANDS[None, :] * (F32(1) / scale)[:, None]
    assert (product != SIGNIFICANDS[None, :] / scale[:, None]).any()
