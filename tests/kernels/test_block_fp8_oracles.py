"""amax/1 against what others wrote: ml_dtypes, PyTorch, and the formulas of slime and ModelOpt."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shardmill.kernels.block_fp8 import grid
from shardmill.kernels.block_fp8_numpy import e4m3_codes
from tests.kernels.conftest import assert_same_bits, bell, encode, native_copy, words

SOURCES = {
    "bell": lambda: bell(11, 300, 420),
    "any exponent": lambda: np.where(
        words(12, 300, 420) & 0x4000, 0x3000, words(12, 300, 420) & 0xBFFF
    ).astype(np.uint16),
    "native fp8 copy": lambda: native_copy(13, (128, 128), 300, 420),
}


def tiles(torch, matrix, block):
    """The matrix, zero-padded, as [grid rows, r, grid columns, c]."""
    (R, C), (r, c) = matrix.shape, block
    n, m = grid((R, C), block)
    padded = torch.zeros(n * r, m * c, dtype=matrix.dtype)
    padded[:R, :C] = matrix
    return padded.view(n, r, m, c)


def slime(torch, weights, block):
    """slime, tools/convert_hf_to_fp8.py, block_fp8: amax in BF16, floor 1e-12, f32 division, clamp."""
    tiled = tiles(torch, weights, block)
    scales = tiled.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12).to(torch.float32) / torch.tensor(
        448.0
    )
    codes = (tiled / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes, scales[:, 0, :, 0]


def modelopt(torch, weights, block):
    """ModelOpt, FP8QTensor.quantize for FP8_2D_BLOCKWISE: amax 448 for a block of zeros, f32 division, no clamp."""
    tiled = tiles(torch, weights.to(torch.float32), block)
    amax = tiled.abs().amax(dim=(1, 3), keepdim=True)
    scales = torch.where(amax == 0, torch.tensor(448.0), amax) / torch.tensor(448.0)
    return (tiled / scales).to(torch.float8_e4m3fn), scales[:, 0, :, 0]


@pytest.mark.torch
@pytest.mark.parametrize("formula", [slime, modelopt])
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
@pytest.mark.parametrize("name", SOURCES)
def test_slime_and_modelopt_write_the_same_bits(kernel, formula, block, name):
    """Both formulas, run in f32 torch on three kinds of ragged matrices, give our codes and scales."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    source = SOURCES[name]()
    R, C = source.shape
    expected, expected_scales = formula(
        torch, torch.from_numpy(source.view(np.int16)).view(torch.bfloat16), block
    )
    n, r, m, c = expected.shape
    codes, scales, _ = encode("amax/1", source, block, kernel)
    assert_same_bits(expected_scales.numpy(), scales, "scales")
    assert_same_bits(
        expected.view(torch.uint8).reshape(n * r, m * c)[:R, :C].contiguous().numpy(), codes, "codes"
    )


def f32_up_to_448():
    """Every 509th f32 of [0, 448]."""
    return np.arange(0, np.float32(448).view(np.uint32) + 1, 509, dtype=np.uint32).view(np.float32)


def test_rounding_is_ml_dtypes_cast():
    """round_to_e4m3 and the cast of ml_dtypes agree on 2.2 million f32 numbers, subnormal ones included."""
    values = f32_up_to_448()
    assert_same_bits(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), e4m3_codes(values), "codes")


@pytest.mark.torch
def test_rounding_is_torchs_cast():
    """round_to_e4m3 and PyTorch's cast agree on 2.2 million f32 numbers, subnormal ones included."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    values = f32_up_to_448()
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert_same_bits(expected, e4m3_codes(values), "codes")
