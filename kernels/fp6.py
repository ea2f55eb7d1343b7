"""E2M3, the six-bit float of the fp6 tile, and its exact road to E4M3.

The law of this module: a code with drop d restages to one E4M3 byte, and that byte means the same number.
It holds because E2M3 and E4M3 both carry three mantissa bits:

    bits s ee mmm, zero-extended to a byte, read as E4M3  ==  the E2M3 value * 2**-6
    the E2M3 value * 2**t is an E4M3 value for t = -6..5  (t = 6 fails for 7.5 alone: 480 > 448)

A group of elements shares a drop d = 0..3, two bits; its codes stand for 2**(6 - d) * E2M3(code) in units of
the tile's scale. E2M3 is the element format of OCP MX v1.0, section 5.3.2: bias 1, subnormals, no NaN, no Inf.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.kernels.formats import E2M3_VALUES, E4M3_MAX

Array = npt.NDArray[Any]

DROP_MAX = 3  # two bits
DROP_BITS = 2
E4M3_SHIFT = 6  # zero-extended E2M3 bits are the E4M3 byte of value * 2**-E4M3_SHIFT
E4M3_EXPONENT_TOP = 15  # the biased exponent of 256..448; a group that reaches it drops nothing
E4M3_SATURATED = 0x7E  # 448, the largest finite byte

_F32_TO_E4M3_BIAS = (127 - 7) << 3  # exponent bias of f32 less that of E4M3, at E4M3's place


def e4m3_nearest(value: Array) -> Array:
    """The E4M3FN byte nearest to each f32, ties to even, beyond 448 saturated; NaN gives 0x7F. u8, same shape."""
    f32 = np.ascontiguousarray(value, dtype=np.float32)
    bits = f32.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Drop 20 mantissa bits, round half to even by carry: 0x7FFFF plus the bit that stays last.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    normal = rounded.astype(np.int64) - _F32_TO_E4M3_BIAS
    with np.errstate(invalid="ignore", over="ignore"):
        # Below 2**-6 E4M3 steps by 2**-9; the product with 512 is exact and rint rounds half to even.
        subnormal = np.rint(np.minimum(np.abs(f32), 1) * np.float32(512))
    small = magnitude < np.uint32((127 - 6) << 23)
    byte = np.where(small, np.nan_to_num(subnormal).astype(np.int64), np.minimum(normal, E4M3_SATURATED))
    byte = np.where(magnitude > np.uint32(0x7F800000), 0x7F, byte).astype(np.uint8)
    return np.where(byte == 0x7F, byte, byte | sign)


def codes_nearest(value: Array) -> Array:
    """The E2M3 code (s ee mmm, u8 below 64) nearest to each f32, ties to even; |value| <= 7.5 is the caller's duty.

    NaN gives +0. Rounding happens once: the product with 2**-6 is exact, or far below the smallest code.
    """
    byte = e4m3_nearest(np.asarray(value, dtype=np.float32) * np.float32(2.0**-E4M3_SHIFT))
    nan = byte == 0x7F
    assert bool(((byte & 0x7F)[~nan] < 0x20).all()), (
        "above 7.5: the drop is not that of the group's own maximum"
    )
    return np.where(nan, 0, ((byte >> 2) & 0x20) | (byte & 0x1F)).astype(np.uint8)


def drops(exponent: Array) -> Array:
    """d = min(15 - E, 3) for each group's largest biased E4M3 exponent E: u8, same shape."""
    return np.minimum(E4M3_EXPONENT_TOP - exponent.astype(np.int64), DROP_MAX).astype(np.uint8)


def _restaged() -> Array:
    """u8[4, 64]: the E4M3 byte of 2**(6 - d) * E2M3(code) by (drop, code); 0xFF where there is none (7.5, d = 0)."""
    value = np.ldexp(E2M3_VALUES[None, :], (E4M3_SHIFT - np.arange(DROP_MAX + 1))[:, None])
    return np.where(np.abs(value) > E4M3_MAX, np.uint8(0xFF), e4m3_nearest(value))


RESTAGED: Array = _restaged()
