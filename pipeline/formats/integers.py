"""What INT8 per channel and INT4 by group share: the scale of symmetric whole numbers, as compressed-tensors has it."""

from __future__ import annotations

from typing import Final

import numpy as np

from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import SMALLEST_SCALE

_HALF_RANGES: Final = {
    8: np.float32(127.5),
    4: np.float32(7.5),
}  # (max - min) / 2 of a signed number of so many bits


def scales_of(amax: F32, bits: int) -> F32:
    """amax / 127.5 or / 7.5, one f32 division, at least 2^-100; 1 for zeros. Any shape."""
    scales: F32 = np.maximum(amax / _HALF_RANGES[bits], np.float32(SMALLEST_SCALE))
    scales[amax == 0] = 1
    return scales
