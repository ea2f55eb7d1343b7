"""Bytes of floats and of scales as numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.verify.formats.linear import EXPONENTS, F32, FLOATS
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles


def floats(tensor: Tensor, raw: NDArray[np.uint8]) -> F32:
    """Little-endian BF16, F16 or F32 bytes as f32, the last axis shrunk accordingly."""
    assert tensor.dtype in FLOATS
    if tensor.dtype == "F32":
        return raw.view("<f4")
    if tensor.dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def scale_values(tensor: Tensor, raw: NDArray[np.uint8]) -> F32:
    """Bytes of scales as f32, whatever dtype they have."""
    if tensor.dtype == "F8_E4M3":
        return E4M3_VALUES[raw]
    if tensor.dtype in EXPONENTS:
        exponents: F32 = raw.astype(np.float32) - np.float32(127)
        return np.asarray(np.exp2(exponents), np.float32)
    return floats(tensor, raw)


def scalar(tensor: Tensor, opened: OpenFiles) -> F32:
    return scale_values(tensor, opened.bytes(tensor, 0, tensor.bytes))[:1]
