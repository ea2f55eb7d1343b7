"""Scales as they are stored: powers of two in a byte (E8M0), BF16, F16 or F32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32, U8, bf16_to_f32


def e8m0_values(codes: U8) -> F32:
    """E8M0 codes u8 -> 2^(code - 127) as f32, exactly; 255 is NaN (OCP Microscaling Formats 1.0)."""
    bits = np.where(codes == 0, 1 << 22, codes.astype(np.uint32) << 23).astype(np.uint32)
    bits[codes == 255] = 0x7FC00000
    return bits.view(np.float32)


def e8m0_codes(scales: F32) -> U8:
    """f32 powers of two from 2^-127 on -> E8M0 codes; asserts that each is one."""
    bits = np.ascontiguousarray(scales).view(np.uint32)
    power = (bits & np.uint32(0x7FFFFF) == 0) | (bits == 1 << 22)
    assert power.all(), "a scale is no power of two"
    codes: U8 = (bits >> np.uint32(23)).astype(np.uint8)
    return codes


def stored_scales(scales: NDArray[Any]) -> F32:
    """Scales as they are stored, u8 (E8M0), u16 (BF16 bits), f16 or f32, as f32."""
    if scales.dtype == np.uint8:
        return e8m0_values(scales)
    return bf16_to_f32(scales) if scales.dtype == np.uint16 else scales.astype(np.float32, copy=False)
