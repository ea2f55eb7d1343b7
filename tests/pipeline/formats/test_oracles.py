"""Our bits beside what other tools write: their formulas in PyTorch, and their own code where it is installed.

Numbers without a sign of zero: what another tool makes of -0 and of rows of zeros is told in docs/formats.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardmill.kernels.group_codes import unpack_nibbles, widened
from shardmill.pipeline.formats import formats
from tests.pipeline.formats.matrices import kinds, setting, source

torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
pytestmark = pytest.mark.torch

KINDS = ("bell", "heavy tails", "ties")
DTYPES = ("bf16", "f16", "f32")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix(kind: str, dtype: str) -> tuple[Any, Any]:
    """The matrix as it is stored, and the same numbers in f32 torch; -0 made +0."""
    values = dict(kinds())[kind] + np.float32(0)
    strip = source(values, dtype)
    return strip, torch.from_numpy(widened(strip).copy())


def ours(name: str, profile: str, strip: Any, **params: Any) -> dict[str, Any]:
    encode = formats()[name].encode
    assert encode is not None
    return encode(strip, setting(name, profile, strip, **params))


def nearest_e2m1(quotients: Any) -> Any:
    """Codes u8 of the nearest E2M1 values, ties to even."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    below = torch.searchsorted(middles, quotients.abs(), right=False)
    above = torch.searchsorted(middles, quotients.abs(), right=True)
    return (torch.where(below % 2 == 0, below, above) + 8 * (quotients < 0)).to(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_is_modelopts(kind: str, dtype: str) -> None:
    """s2 = amax / 2688, s = E4M3(amax16 / (6 s2)), code of w / (s s2), all in f32."""
    strip, weights = matrix(kind, dtype)
    number = weights.abs().max() / torch.tensor(2688.0)
    grouped = weights.view(len(weights), -1, 16)
    scales = (grouped.abs().amax(2) / (6 * number)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    codes = nearest_e2m1(grouped / (scales.float() * number)[..., None]).reshape(strip.shape)
    made = ours("nvfp4", "modelopt", strip)
    assert made["global"][0] == number.numpy()
    assert np.array_equal(made["scales"], scales.view(torch.uint8).numpy())
    assert np.array_equal(unpack_nibbles(made["codes"]), codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_of_compressed_tensors(kind: str, dtype: str) -> None:
    """g = 2688 / amax as PyTorch divides, s = E4M3(g * (amax16 / 6)), code of w / (s / g)."""
    strip, weights = matrix(kind, dtype)
    number = 2688.0 / weights.abs().max()
    grouped = weights.view(len(weights), -1, 16)
    scales = (number * (grouped.abs().amax(2) / torch.tensor(6.0))).clamp(max=448).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, torch.tensor(0.125), scales.float())
    codes = nearest_e2m1((grouped / (scales / number)[..., None]).clamp(-6, 6)).reshape(strip.shape)
    made = ours("nvfp4", "compressed-tensors", strip)
    assert made["global"][0] == number.numpy()
    assert np.array_equal(made["scales"], scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    assert np.array_equal(unpack_nibbles(made["codes"]), codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_is_modelopts(kind: str, dtype: str) -> None:
    """The exponent is ceil(log2(amax / 448)), from f64 here; the code is the cast of w / 2^exponent."""
    strip, weights = matrix(kind, dtype)
    grouped = weights.view(len(weights), -1, 32)
    exponents = torch.ceil(torch.log2(grouped.abs().amax(2).double() / 448)).clamp(-127, 127)
    codes = (grouped * torch.exp2(-exponents).float()[..., None]).to(torch.float8_e4m3fn)
    made = ours("mxfp8", "modelopt", strip)
    assert np.array_equal(made["scales"], (exponents + 127).to(torch.uint8).numpy())
    assert np.array_equal(made["codes"], codes.view(torch.uint8).reshape(strip.shape).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_those_of_compressed_tensors(kind: str, dtype: str) -> None:
    """INT8 by row: amax / 127.5; INT4 by 32: amax / 7.5 as BF16; codes are round(w / scale), clamped."""
    strip, weights = matrix(kind, dtype)
    scales = weights.abs().amax(1, keepdim=True) / torch.tensor(127.5)
    made = ours("int8-channel", "compressed-tensors", strip)
    assert np.array_equal(made["scales"], scales.numpy())
    assert np.array_equal(
        made["codes"], torch.round(weights / scales).clamp(-128, 127).to(torch.int8).numpy()
    )
    grouped = weights.view(len(weights), -1, 32)
    small = (grouped.abs().amax(2) / torch.tensor(7.5)).bfloat16()
    codes = (
        (torch.round(grouped / small.float()[..., None]).clamp(-8, 7) + 8)
        .to(torch.uint8)
        .reshape(strip.shape)
    )
    made = ours("int4-group", "compressed-tensors", strip, group=32)
    assert np.array_equal(made["scales"], small.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(unpack_nibbles(made["codes"].view(np.uint8)), codes.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_errs_no_more_than_either_power_of_two(kind: str) -> None:
    """The squared error is at most that of ceil(log2(amax / 6)) and of OCP's floor(log2(amax)) - 2, in every group."""
    strip, weights = matrix(kind, "bf16")
    made, form = ours("mxfp4", "compressed-tensors", strip), formats()["mxfp4"]
    decoded = torch.from_numpy(form.decode(made, setting("mxfp4", "compressed-tensors", strip)))
    grouped = weights.view(len(weights), -1, 32)
    error = ((decoded.view(grouped.shape) - grouped).double() ** 2).sum(2)
    amax = grouped.abs().amax(2).double()
    for exponents in (torch.ceil(torch.log2(amax / 6)), torch.floor(torch.log2(amax)) - 2):
        scales = torch.exp2(exponents).float()[..., None]
        codes = torch.from_numpy(nearest_e2m1((grouped / scales).clamp(-6, 6))).long()
        values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * scales
        assert (error <= ((values - grouped).double() ** 2).sum(2) * (1 + 1e-6)).all()
