"""A lost page of a download shows in a norm; norms that are published as zeros do not."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from tests.verify.memory import Memory
from tests.verify.zoo.encoders import blob
from tests.verify.zoo.model import shard_bytes

LAYERS, NUMBERS = 4, 2_560
NAMES = tuple(f"model.layers.{layer}.input_layernorm.weight" for layer in range(LAYERS))


def _found(zeros: dict[str, slice], dtype: str = "BF16", value: float = 1.0) -> dict[str, str]:
    tensors = {}
    for name in NAMES:
        numbers = np.full(NUMBERS, value)
        numbers[zeros.get(name, slice(0, 0))] = 0
        tensors[name] = blob(dtype, numbers)
    report = integrity(Memory({"model.safetensors": shard_bytes(tensors)}))
    return {f.tensor: f.slug for f in report.findings if f.slug in ("zero-hole", "zero-weight")}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("where", [slice(0, 1_024), slice(300, 2_348), slice(2_300, 2_560)])
def test_a_page_of_zeros_in_a_norm_is_a_hole_wherever_it_begins(dtype: str, where: slice) -> None:
    assert _found({NAMES[2]: where}, dtype) == {NAMES[2]: "zero-hole"}


def test_one_norm_of_zeros_among_its_live_kind_is_found() -> None:
    assert _found({NAMES[1]: slice(0, NUMBERS)}) == {NAMES[1]: "zero-weight"}


def test_norms_that_are_all_zeros_and_single_zeros_are_honest() -> None:
    """Zero-centred norms are published as zeros, and trained ones have zeros here and there."""
    assert _found({}, value=0.0) == {}
    assert _found({name: slice(0, NUMBERS, 3) for name in NAMES}) == {}
    assert _found({NAMES[0]: slice(0, 100)}) == {}
