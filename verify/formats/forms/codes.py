"""Codes as numbers before any scale: bytes of a weight's rows in, f32 values and the codes themselves out.

Each takes u8 [rows, bytes of a row]. The values of E4M3 and E2M1 come from `kernels.formats`; E5M2 is the upper byte of
an IEEE half (OCP 8-bit Floating Point Specification 1.0).
"""

from __future__ import annotations

import numpy as np

from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES
from shardmill.verify.formats.linear import F32, U8

# AWQ's order of eight nibbles in a word: nibble i holds column AWQ_ORDER[i] (AutoAWQ, packing_utils.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def e4m3(raw: U8, bits: int = 8) -> tuple[F32, U8]:
    return E4M3_VALUES[raw], raw


def e5m2(raw: U8, bits: int = 8) -> tuple[F32, U8]:
    return (raw.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32), raw


def e2m1(raw: U8, bits: int = 4) -> tuple[F32, U8]:
    """Two codes a byte: the even element lies in the low nibble."""
    codes = np.empty((raw.shape[0], 2 * raw.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = raw & 0xF, raw >> 4
    return E2M1_VALUES[codes], codes


def int8(raw: U8, bits: int = 8) -> tuple[F32, U8]:
    return raw.view(np.int8).astype(np.float32), raw


def words(raw: U8, bits: int) -> U8:
    """Little-endian words of 32 bits -> their codes, the lowest bits first: u8 [rows, codes].

    Codes of 3 bits run on from one word into the next.
    """
    if 32 % bits:
        stream = np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little")
        weights = np.uint8(1) << np.arange(bits, dtype=np.uint8)
        return np.asarray((stream.reshape(raw.shape[0], -1, bits) * weights).sum(2, dtype=np.uint8))
    packed = np.ascontiguousarray(raw).view("<u4")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (
        ((packed[:, :, None] >> shifts) & np.uint32((1 << bits) - 1))
        .astype(np.uint8)
        .reshape(raw.shape[0], -1)
    )


def offset_words(raw: U8, bits: int) -> tuple[F32, U8]:
    """compressed-tensors' pack-quantized: a code is the integer plus 2^(bits - 1)."""
    codes = words(raw, bits)
    return codes.astype(np.float32) - np.float32(1 << (bits - 1)), codes
