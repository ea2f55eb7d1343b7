"""GPTQ, AWQ, NF4 and FP4 decode to the very numbers of the tools that packed them, and of a slow loop over words."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.declared import Declaration, declaration
from shardmill.verify.formats.matrices import Matrix, can_decode, matrix_of, matrix_with_state, values
from shardmill.verify.formats.schemes import Linear, quantized
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.tools import seeded
from tests.verify.zoo.encoders import blob
from tests.verify.zoo.model import shard_bytes

GOLDEN = Path(__file__).with_name("golden_packed")
LOST = {"nf4": 0.1, "bnb-fp4": 0.13, "gptq": 0.12, "awq": 0.12}
M = "model.layers.0.mlp.down_proj"


def _matrix(linear: Linear, declared: Declaration | None, opened: OpenFiles) -> Matrix:
    matrix = matrix_with_state(linear, opened) if linear.kind in BY_ELEMENTS else matrix_of(linear, declared)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.safetensors")), ids=lambda file: file.stem)
def test_a_tools_own_export_decodes_to_what_the_tool_decodes_bit_for_bit(file: Path) -> None:
    """Strips of any height give the same numbers; beside the seeded parent they lose what rounding costs."""
    raw = file.read_bytes()
    said = json.loads(raw[8 : 8 + struct.unpack_from("<Q", raw)[0]])["__metadata__"]
    config = json.dumps({"quantization_config": json.loads(said["quantization_config"])}).encode()
    source = Memory({"model.safetensors": raw, "config.json": config})
    checkpoint = open_checkpoint(source, Report("x"))
    (linear,) = quantized(checkpoint.tensors).values()
    with OpenFiles(source) as opened:
        matrix = _matrix(linear, declaration(checkpoint.quantization)[0], opened)
        rows = matrix.shape[0]
        got = values(matrix, opened, 0, rows)
        parts = [values(matrix, opened, at, min(at + 13, rows)) for at in range(0, rows, 13)]
    np.testing.assert_array_equal(np.concatenate(parts), got)
    assert hashlib.sha256((got + np.float32(0)).astype("<f4").tobytes()).hexdigest() == said["decoded"]
    want = seeded.weights()[f"{linear.module}.weight"]
    assert np.linalg.norm(got - want) < LOST[linear.kind] * np.linalg.norm(want)


def test_the_golden_files_are_of_three_tools_forms_and_small() -> None:
    assert len(list(GOLDEN.glob("*.safetensors"))) >= 7
    assert sum(file.stat().st_size for file in GOLDEN.iterdir()) <= 50_000


def _packed(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes into I32 words along an axis, a bit at a time, as one stream."""
    codes = codes if axis else codes.T
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(len(codes), -1).astype(np.uint8)
    words = np.packbits(stream, axis=1, bitorder="little").view("<i4")
    return np.ascontiguousarray(words if axis else words.T)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.booleans(), st.booleans(), st.integers(0, 2**32), st.integers(1, 64))
def test_gptq_is_code_less_zero_times_the_scale_of_the_inputs_group(
    bits: int, second_layout: bool, shuffled: bool, seed: int, step: int
) -> None:
    """In both layouts, with groups in order and by g_idx, at every width."""
    random = np.random.Generator(np.random.PCG64(seed))
    inputs, outputs, groups = 64, 64, 2
    codes = random.integers(0, 1 << bits, (inputs, outputs))
    zeros = random.integers(1, 1 << bits, (groups, outputs))
    scales = random.integers(1, 100, (groups, outputs)).astype(np.float16) / np.float16(64)
    of = (
        random.permutation(np.arange(inputs) % groups)
        if shuffled
        else np.arange(inputs) // (inputs // groups)
    )
    tensors = {
        "qweight": blob("I32", _packed(codes, bits, 0)),
        "qzeros": blob("I32", _packed(zeros - (not second_layout), bits, 1)),
        "scales": blob("F16", scales),
        "g_idx": blob("I32", of),
    }
    quantization = {
        "quant_method": "gptq",
        "bits": bits,
        "checkpoint_format": "gptq_v2" if second_layout else "gptq",
    }
    source = Memory(
        {
            "model.safetensors": shard_bytes({f"{M}.{leaf}": each for leaf, each in tensors.items()}),
            "config.json": json.dumps({"quantization_config": quantization}).encode(),
        }
    )
    checkpoint = open_checkpoint(source, Report("x"))
    linear = quantized(checkpoint.tensors)[M]
    assert can_decode(linear)
    with OpenFiles(source) as opened:
        matrix = _matrix(linear, declaration(checkpoint.quantization)[0], opened)
        got = [values(matrix, opened, at, min(at + step, outputs)) for at in range(0, outputs, step)]
    want = [
        [(codes[c, r] - zeros[of[c], r]) * np.float32(scales[of[c], r]) for c in range(inputs)]
        for r in range(outputs)
    ]
    np.testing.assert_array_equal(np.concatenate(got), np.array(want, np.float32))
