"""GPTQ of 4 and 8 bits, in both versions, read to the numbers that its words stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardmill.kernels.formats import bf16_to_f32
from shardmill.pipeline.commands.init import init
from tests.kernels.conftest import words
from tests.pipeline.convert.test_convert import MODULE, arrays_of, parent_of
from tests.pipeline.parents import build

ROWS, COLUMNS, GROUP = 16, 64, 32


def packed(numbers: Any, bits: int, axis: int) -> Any:
    """Numbers packed into I32 words along an axis, the first in the lowest bits, one at a time."""
    in_word = 32 // bits
    moved = np.moveaxis(numbers, axis, -1)
    out = np.zeros((*moved.shape[:-1], moved.shape[-1] // in_word), np.uint64)
    for place in range(in_word):
        out |= moved[..., place::in_word].astype(np.uint64) << np.uint64(bits * place)
    return np.moveaxis(out.astype(np.uint32).view(np.int32), -1, axis)


def gptq(bits: int, stored_less: int) -> tuple[dict[str, Any], Any]:
    """The tensors of one weight and its numbers [R, C]; the columns' groups are shuffled, as activation order does."""
    most = 1 << bits
    codes = (words(31, COLUMNS, ROWS) % most).astype(np.int64)
    zeros = (words(32, COLUMNS // GROUP, ROWS) % (most - 1) + 1).astype(np.int64)
    scales = (words(33, COLUMNS // GROUP, ROWS) % 100 + 1).astype(np.float16) / np.float16(64)
    groups = (words(34, COLUMNS) % (COLUMNS // GROUP)).astype(np.int32)
    tensors = {
        "qweight": ("I32", packed(codes, bits, 0)),
        "qzeros": ("I32", packed(zeros - stored_less, bits, 1)),
        "scales": ("F16", scales),
        "g_idx": ("I32", groups),
    }
    numbers = ((codes - zeros[groups]) * scales.astype(np.float64)[groups]).T
    return {f"{MODULE}.{end}": part for end, part in tensors.items()}, numbers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_init_undoes_gptq_and_a_build_gives_its_numbers(tmp_path: Path, bits: int, version: str) -> None:
    """The recipe that init drafts names the version that config.json states, and each number is right."""
    tensors, numbers = gptq(bits, 1 if version == "gptq" else 0)
    stated = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    parent = parent_of(tmp_path / "parent", tensors, {"quantization_config": stated})
    path = tmp_path / "undone.toml"
    drafted = CliRunner().invoke(init, [str(parent), "-o", str(path), "--to", "bf16"])
    assert drafted.exit_code == 0, drafted.exception
    named = {
        ("gptq", 4): "gptq",
        ("gptq", 8): "gptq-8bit",
        ("gptq_v2", 4): "gptq-v2",
        ("gptq_v2", 8): "gptq-v2-8bit",
    }
    assert f'source = "{named[version, bits]}"' in path.read_text()
    build(parent, tmp_path / "out", path)
    made = bf16_to_f32(arrays_of(tmp_path / "out")[f"{MODULE}.weight"])
    assert made.shape == (ROWS, COLUMNS)
    assert (np.abs(made - numbers) <= np.abs(numbers) * 2.0**-8).all()  # rounded once, to BF16
