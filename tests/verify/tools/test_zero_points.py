"""llm-compressor's INT4 with zero points decodes to its parent's weights, within half a step of each group."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.matrices import matrix_of, values
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.tools import golden, seeded


def test_values_are_within_half_a_step_of_the_parents_but_at_the_ends(tmp_path: Path) -> None:
    golden.unpack("llmcompressor int4 zero points", tmp_path)
    checkpoint = open_checkpoint(Folder(tmp_path), Report("x"))
    (linear,) = quantized(checkpoint.tensors).values()
    matrix = matrix_of(linear, declaration(checkpoint.quantization)[0])
    with OpenFiles(checkpoint.source) as opened:
        got = values(matrix, opened, 0, matrix.shape[0])
    want = seeded.weights()[f"{linear.module}.weight"]
    steps = (want.reshape(len(want), -1, 128).max(2) - want.reshape(len(want), -1, 128).min(2)) / 15
    away = np.abs(got - want).reshape(len(want), -1, 128) / steps[..., None]
    assert away.max() <= 1.05  # the zero is rounded too, which clips the ends
    assert (away <= 0.53).mean() > 0.98
