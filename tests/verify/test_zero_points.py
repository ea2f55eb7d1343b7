"""Packed integers with zero points and reordered groups decode to what a slow loop over the format's words says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.verify.formats.matrices import can_decode, matrix_of, values
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.zoo.encoders import blob
from tests.verify.zoo.model import Blob, shard_bytes

M = "model.layers.0.mlp.down_proj"


def _packed(codes: np.ndarray, axis: int) -> Blob:
    """4-bit codes into words along an axis, a code at a time, the first in the lowest bits."""
    codes = codes if axis else codes.T
    rows, count = codes.shape
    words = np.zeros((rows, -(-count // 8)), np.uint32)
    for row in range(rows):
        for place in range(count):
            words[row, place // 8] |= np.uint32(int(codes[row, place]) << (4 * (place % 8)))
    return blob("I32", (words if axis else words.T).view(np.int32))


def _source(tensors: Mapping[str, Blob]) -> Memory:
    return Memory({"model.safetensors": shard_bytes({f"{M}.{leaf}": each for leaf, each in tensors.items()})})


def _decoded(tensors: Mapping[str, Blob], step: int) -> np.ndarray:
    source = _source(tensors)
    linear = quantized(open_checkpoint(source, Report("x")).tensors)[M]
    assert can_decode(linear)
    matrix = matrix_of(linear, None)
    rows = matrix.shape[0]
    with OpenFiles(source) as opened:
        parts = [values(matrix, opened, at, min(at + step, rows)) for at in range(0, rows, step)]
    return np.concatenate(parts)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 21), st.sampled_from([1, 2, 4]), st.integers(0, 2**32), st.booleans(), st.integers(1, 9)
)
def test_a_value_is_its_code_less_its_groups_zero_times_its_groups_scale(
    rows: int, groups: int, seed: int, shuffled: bool, step: int
) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    codes, zeros = random.integers(0, 16, (rows, 32)), random.integers(0, 16, (rows, groups))
    scale = random.integers(1, 100, (rows, groups)).astype(np.float32) / np.float32(64)
    of = random.permutation(np.arange(32) % groups) if shuffled else np.arange(32) // (32 // groups)
    tensors = {
        "weight_packed": _packed(codes, 1),
        "weight_scale": blob("F32", scale),
        "weight_zero_point": _packed(zeros, 0),
        "weight_shape": blob("I64", np.array([rows, 32])),
        **({"weight_g_idx": blob("I32", of.astype(np.int32))} if shuffled else {}),
    }
    if groups == 1 and shuffled:
        return
    wanted = [[(codes[r, c] - zeros[r, of[c]]) * scale[r, of[c]] for c in range(32)] for r in range(rows)]
    np.testing.assert_array_equal(_decoded(tensors, step), np.array(wanted, np.float32))


@pytest.mark.parametrize(("leaf", "shape"), [("weight_zero_point", (3, 2)), ("weight_g_idx", (31,))])
def test_zeros_or_indices_of_another_shape_are_not_decoded(leaf: str, shape: tuple[int, ...]) -> None:
    tensors = {
        "weight_packed": blob("I32", np.zeros((16, 4), np.int32)),
        "weight_scale": blob("F32", np.ones((16, 2), np.float32)),
        leaf: blob("I32", np.zeros(shape, np.int32)),
    }
    linear = quantized(open_checkpoint(_source(tensors), Report("x")).tensors)[M]
    assert not can_decode(linear)
