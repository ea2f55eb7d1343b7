"""amax-bf16/1 and int8-bf16/1: scales that a loader which keeps them in BF16 has bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.kernels.group_codes import widened
from shardmill.pipeline.formats import formats
from shardmill.verify.formats.encode import encode_block
from tests.pipeline.formats.matrices import kinds, setting, source

LAWS = {
    "fp8-block": "amax-bf16/1",
    "fp8-channel": "amax-bf16/1",
    "fp8-tensor": "amax-bf16/1",
    "int8-channel": "int8-bf16/1",
}
PARAMS = {"fp8-block": {"block": (8, 64)}}
DTYPES = ("bf16", "f16", "f32")


def encoded(name: str, strip: Any, law: str) -> tuple[dict[str, Any], Any]:
    form = formats()[name]
    made = replace(setting(name, "compressed-tensors", strip, **PARAMS.get(name, {})), law=law)
    assert form.encode is not None
    return form.encode(strip, made), made


def as_bf16(values: Any) -> Any:
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAWS)
def test_scales_are_the_f32_laws_rounded_to_bf16(name: str, dtype: str) -> None:
    """Ties go to even, as ml_dtypes casts."""
    for _, values in kinds():
        strip = source(values, dtype)
        plain = encoded(name, strip, next(iter(formats()[name].laws)))[0]["scales"]
        rounded = encoded(name, strip, LAWS[name])[0]["scales"]
        assert rounded.tobytes() == as_bf16(plain).astype(np.float32).tobytes()


@pytest.mark.parametrize("name", LAWS)
def test_a_loader_that_decodes_in_bf16_has_the_decoded_weights_rounded_once(name: str) -> None:
    """bf16(code) times bf16(scale), rounded to BF16, is code times scale in f32, rounded to BF16."""
    for _, values in kinds():
        parts, made = encoded(name, source(values, "bf16"), LAWS[name])
        right = as_bf16(formats()[name].decode(parts, made))
        codes = parts["codes"].astype(np.float32) if name.startswith("int8") else E4M3_VALUES[parts["codes"]]
        one = {**parts, "scales": np.ones_like(parts["scales"])}
        spread = formats()[name].decode({**parts, "codes": _ones(name, parts["codes"])}, made)
        assert np.array_equal(formats()[name].decode(one, made), codes)
        loaders = as_bf16(codes) * as_bf16(spread)
        assert loaders.tobytes() == right.tobytes()


def _ones(name: str, codes: Any) -> Any:
    """Codes of 1."""
    return np.full_like(codes, 1 if name.startswith("int8") else 0x38)


@pytest.mark.parametrize("name", LAWS)
def test_the_error_grows_by_half_a_step_of_bf16_at_most(name: str) -> None:
    """The root of the squared error is at most the F32 law's and 1/256 of the matrix; with bells 1 % more."""
    for kind, values in kinds():
        strip = source(values, "bf16")
        errors = []
        for law in (next(iter(formats()[name].laws)), LAWS[name]):
            parts, made = encoded(name, strip, law)
            errors.append(float(np.linalg.norm(formats()[name].decode(parts, made) - widened(strip))))
        assert errors[1] <= errors[0] + np.linalg.norm(widened(strip)) / 256
        assert kind != "bell" or errors[1] <= 1.01 * errors[0]


@pytest.mark.parametrize("exponent", [-45, -41, -30, 0, 30])
def test_the_judge_makes_the_same_block_by_code_of_its_own(exponent: int) -> None:
    """From the smallest amax to the largest, scale and codes are the pipeline's, bit for bit."""
    block = (dict(kinds())["bell"][:8, :64].astype(np.float64) * 10.0**exponent).astype(np.float32)
    parts, _ = encoded("fp8-block", block, "amax-bf16/1")
    scale, codes = encode_block(block, "amax-bf16/1")
    assert parts["scales"].tobytes() == scale.tobytes()
    assert np.array_equal(parts["codes"], codes)
