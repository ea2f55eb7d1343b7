"""What every compiled row kernel starts from: numbers as f32 bits, E4M3 rounding, scales spread over a row."""

from typing import Any

import numpy as np
from numba import njit

from shardmill.kernels.formats import F32

# error_model: a division must be an instruction, not a test for zero and a jump, or nothing is vectorised.
compiled = njit(cache=True, nogil=True, error_model="numpy")


@compiled
def f32_bits(number: Any, narrow: bool) -> Any:
    """f32 bits of a number given by its bits, u16 of BF16 (narrow) or u32 of f32. LLVM moves the test out of loops."""
    return np.uint32(np.uint32(number) << np.uint32(16)) if narrow else np.uint32(number)


@compiled
def anchor_of(quotient: Any) -> Any:
    """The f32 that rounds a quotient as E4M3 does when added; see block_fp8_numpy.round_to_e4m3."""
    exponent = np.uint32(
        max(np.uint32(np.float32(quotient).view(np.uint32) >> np.uint32(23)), np.uint32(121))
    )
    return np.uint32(exponent * np.uint32((1 << 23) + 8) + np.uint32((20 << 23) - 8 * 121)).view(np.float32)


@compiled
def spread(scale_row: F32, c: int, divisors: F32) -> None:
    """divisors f32 [C] = each block's scale, c times; the last block may be narrower.

    The usual small blocks have loops of their own: LLVM makes one or two stores of a loop whose length it knows.
    """
    C, whole = divisors.size, 0
    if c == 16:
        whole = C // 16
        for k in range(whole):
            for j in range(16):
                divisors[16 * k + j] = scale_row[k]
    elif c == 32:
        whole = C // 32
        for k in range(whole):
            for j in range(32):
                divisors[32 * k + j] = scale_row[k]
    for k in range(whole, scale_row.size):
        for j in range(k * c, min((k + 1) * c, C)):
            divisors[j] = scale_row[k]
