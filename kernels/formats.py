"""The small number formats, as tables and bit laws, each number born here once with its source.

E4M3 (OCP 8-bit Floating Point Specification 1.0, "E4M3"; torch.float8_e4m3fn) has no infinity: only 0x7F and
0xFF are NaN, and the largest value is 448. E2M1 and E2M3 (OCP Microscaling Formats 1.0) have neither infinity
nor NaN. Every table is indexed by the code read as an unsigned integer; the sign is the highest bit.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]

E4M3_MAX: Final = 448.0
E4M3_NAN_CODES: Final = (0x7F, 0xFF)
E2M1_MAX: Final = 6.0
E2M3_MAX: Final = 7.5


def _values(exponent_bits: int, mantissa_bits: int, bias: int) -> F32:
    """Every value of a sign-exponent-mantissa format with subnormals: f32 [2^(1 + exponent + mantissa bits)]."""
    magnitudes = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        significand = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
        magnitudes.append(significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return np.array(magnitudes + [-m for m in magnitudes], dtype=np.float32)


def _e4m3_values() -> F32:
    values = _values(exponent_bits=4, mantissa_bits=3, bias=7)
    values[list(E4M3_NAN_CODES)] = np.nan
    return values


def _frozen(values: F32) -> F32:
    values.flags.writeable = False
    return values


E4M3_VALUES: Final[F32] = _frozen(_e4m3_values())  # f32 [256]
E2M1_VALUES: Final[F32] = _frozen(_values(exponent_bits=2, mantissa_bits=1, bias=1))  # f32 [16]
E2M3_VALUES: Final[F32] = _frozen(_values(exponent_bits=2, mantissa_bits=3, bias=1))  # f32 [64]


def bf16_to_f32(bits: NDArray[Any]) -> F32:
    """BF16 bits (u16, any shape) -> the same numbers as f32. Exact: a BF16 is the upper half of an f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: NDArray[Any]) -> U16:
    """f32 of any shape -> BF16 bits, u16, rounded to nearest, ties to even. A NaN stays a NaN, made quiet."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(
        np.uint32
    )  # never 0-d: u32 arithmetic may wrap
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).reshape(np.shape(values))


def nearest_codes(values: NDArray[Any], table: F32) -> U8:
    """The code of the nearest of a table's values, found by looking; a tie goes to the even code. Any shape.

    table: one of the tables above, at most 256 codes. Beyond its largest value, the code of that; NaN is not for here.
    """
    half = table.size // 2
    magnitudes = table[:half][~np.isnan(table[:half])].astype(
        np.float64
    )  # ascending, as the codes 0, 1, ... are
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    wanted = np.abs(values).astype(np.float64)
    above, below = (
        np.searchsorted(middles, wanted, side="right"),
        np.searchsorted(middles, wanted, side="left"),
    )
    even = np.where(below % 2 == 0, below, above)  # they differ on a tie alone
    codes: U8 = np.where(np.signbit(values), even + half, even).astype(np.uint8)
    return codes
