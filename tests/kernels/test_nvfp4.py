"""NVFP4 as ModelOpt stores it: codes, group scales, tensor scale, packing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES
from shardmill.kernels.nvfp4 import decode, encode, pack, unpack
from tests.kernels.conftest import assert_same_bits, bell_f32, words


def test_codes_are_the_casts_of_ml_dtypes():
    """Each code is ml_dtypes' E2M1 cast of w / (group scale * tensor scale), each group scale its cast to E4M3."""
    weights = bell_f32(71, 48, 160)
    packed, group_scales, tensor_scale = encode(weights)
    amax = np.abs(weights).reshape(48, 10, 16).max(axis=2)
    expected_scales = (amax / np.float32(6) / tensor_scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    quotients = weights / np.repeat(E4M3_VALUES[group_scales] * tensor_scale, 16, axis=1)
    expected = np.clip(quotients, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert tensor_scale == np.abs(weights).max() / np.float32(6 * 448)
    assert group_scales.max() == 0x7E
    assert_same_bits(expected_scales, group_scales, "group scales")
    assert_same_bits(expected, unpack(packed), "codes")


def test_decoded_weights_are_near_and_encode_to_themselves():
    """Decoding errs by about a tenth, as four bits do; encoding the result again changes no bit."""
    weights = bell_f32(72, 64, 256)
    packed, group_scales, tensor_scale = encode(weights)
    decoded = decode(packed, group_scales, tensor_scale)
    assert 0.08 < np.linalg.norm(decoded - weights) / np.linalg.norm(weights) < 0.11
    again = encode(decoded, tensor_scale)
    assert_same_bits(decoded, decode(*again), "decoded weights")


def test_the_lower_nibble_is_the_even_column():
    """pack puts columns 0 and 1 into one byte, the first below; unpack undoes it."""
    codes = (words(73, 5, 32) & 0x0F).astype(np.uint8)
    packed = pack(codes)
    assert packed.shape == (5, 16)
    assert packed[3, 2] == codes[3, 4] | codes[3, 5] << 4
    assert_same_bits(codes, unpack(packed), "codes")


def test_no_scale_is_zero():
    """A group of zeros has the scale 2^-9, a tensor of zeros the tensor scale 1; both decode to zeros."""
    weights = bell_f32(74, 4, 64)
    weights[:, 16:32] = 0
    packed, group_scales, tensor_scale = encode(weights)
    assert (group_scales[:, 1] == 1).all()
    assert not decode(packed, group_scales, tensor_scale)[:, 16:32].any()
    _, zero_scales, one = encode(np.zeros((2, 16), np.float32))
    assert (zero_scales.tolist(), one) == ([[1], [1]], 1)


def test_a_shared_scale_saturates():
    """With a tensor scale that is too small, group scales stop at 448 and codes at 6."""
    weights = bell_f32(75, 2, 32)
    packed, group_scales, tensor_scale = encode(weights, np.float32(2.0**-20))
    assert tensor_scale == np.float32(2.0**-20)
    assert (E4M3_VALUES[group_scales] == 448).all()
    assert np.abs(E2M1_VALUES[unpack(packed)]).max() == 6


@pytest.mark.torch
def test_modelopts_formula_gives_the_same_bits():
    """ModelOpt's NVFP4QTensor.quantize, written out in f32 torch, gives our codes, scales and packing."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    source = bell_f32(76, 32, 128)
    weights = torch.from_numpy(source)
    tensor_scale = weights.abs().amax() / torch.tensor(6.0 * 448.0)
    grouped = weights.view(32, 8, 16)
    scales = (grouped.abs().amax(dim=2) / torch.tensor(6.0) / tensor_scale).to(torch.float8_e4m3fn)
    scaled = (grouped / (scales.float() * tensor_scale)[:, :, None]).view(32, 128)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    up_on_ties = torch.tensor([0.75, 1.75, 3.5])  # midpoints above an odd code
    codes = (
        torch.searchsorted(bounds, scaled.abs()) + (scaled.abs()[..., None] == up_on_ties).any(dim=-1).long()
    )
    codes = (codes + 8 * torch.signbit(scaled)).to(torch.uint8)
    packed, group_scales, got_scale = encode(source)
    assert got_scale == tensor_scale.item()
    assert_same_bits(scales.view(torch.uint8).numpy(), group_scales, "group scales")
    assert_same_bits((codes[:, 0::2] | codes[:, 1::2] << 4).numpy(), packed, "packed codes")
