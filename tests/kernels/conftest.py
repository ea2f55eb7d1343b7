"""What the tests of block FP8 share: kernels to run, matrices made of integers, and flags to set."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shardmill.kernels.block_fp8 import decode, encoder, grid
from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16

FINITE_BF16 = np.array([bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80], dtype=np.uint16)


@pytest.fixture(params=["numpy", "numba"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Each kernel in turn; numba where it is installed."""
    if request.param == "numba":
        pytest.importorskip("numba", reason="needs the extra `fast`")
    return request.param


def encode(recipe, source, block, kernel):
    """codes, scales and counts of a whole matrix."""
    codes = np.full(source.shape, 0x7F, np.uint8)
    scales = np.full(grid(source.shape, block), np.nan, np.float32)
    counts = encoder(recipe, block, kernel).encode(source, codes, scales)
    return codes, scales, counts


def as_f32(source):
    return bf16_to_f32(source) if source.dtype == np.uint16 else source.astype(np.float32)


def words(seed: int, *shape: int):
    """u32 of a shape, the raw bits of PCG64, whose stream numpy promises to keep."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(seed).random_raw(-(-count // 2))
    return np.asarray(raw, dtype="<u8").view("<u4")[:count].reshape(shape)


def bell_f32(seed: int, *shape: int):
    """Bell-shaped f32 numbers of 18 bits, sums of four 16-bit integers: about N(0, (0.009)^2), largest 0.031."""
    pairs = words(seed, 2, *shape)
    sums = (
        (pairs & 0xFFFF).sum(axis=0, dtype=np.int64) + (pairs >> 16).sum(axis=0, dtype=np.int64) - 2 * 65535
    )
    return sums.astype(np.float32) * np.float32(2.0**-22)


def bell(seed: int, *shape: int):
    """The same, cut to BF16 bits."""
    return (bell_f32(seed, *shape).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def native_copy(seed: int, block, rows: int, C: int):
    """BF16 bits of bell-shaped f32 weights that went through amax/1 once, as copies of native FP8 models are."""
    codes, scales, _ = encode("amax/1", bell_f32(seed, rows, C), block, "numpy")
    return f32_to_bf16(decode(codes, scales, block))


def assert_same_bits(expected, got, what: str) -> None:
    """Equal dtype, shape and bits, or the first place that differs."""
    assert expected.dtype == got.dtype
    assert expected.shape == got.shape
    kind = f"u{expected.itemsize}"
    differ = np.argwhere(np.ascontiguousarray(expected).view(kind) != np.ascontiguousarray(got).view(kind))
    assert len(differ) == 0, (
        f"{what}: {len(differ)} of {expected.size} differ, first at {tuple(differ[0])}: "
        f"expected {expected[tuple(differ[0])]!r}, got {got[tuple(differ[0])]!r}"
    )


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """Sets flush-to-zero and denormals-are-zero in this thread, through glibc's fenv, and proves it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("sets MXCSR through glibc's x86-64 fenv_t")
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    before, flushed = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
    libm.fegetenv(before)
    libm.fegetenv(flushed)
    mxcsr = ctypes.c_uint32.from_buffer(flushed, 28)  # struct fenv_t ends with __mxcsr
    mxcsr.value |= 0x8040
    libm.fesetenv(flushed)
    try:
        assert not (np.full(64, 2.0**-127, np.float32) * np.float32(1)).any(), "the flags are not set"
        yield
    finally:
        libm.fesetenv(before)
    assert (np.full(64, 2.0**-127, np.float32) * np.float32(1)).all(), "the flags are still set"
