"""What lies honestly in a model or beside it raises no alarm; the same bytes in a dishonest place do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo.llama import whole
from tests.verify.zoo.model import Blob, Model, bf16

ROWS, COLS, BLOCK = 512, 256, 128
UP = "model.layers.0.mlp.up_proj.weight"


def _alarms(report: Report) -> set[str]:
    return {finding.slug for finding in report.findings if finding.severity != "info"}


def _with_a_block_of_zeros(folder: Path, scale: float, first: int = 0, rows: int = BLOCK) -> Report:
    """[512, 256] of FP8 blocks: rows from `first` on are zero, and the first row of blocks has this `scale`."""
    codes = np.random.default_rng(1).integers(0x20, 0x70, (ROWS, COLS), np.uint8)
    codes[first : first + rows] = 0
    grid = np.full((ROWS // BLOCK, COLS // BLOCK), 0.011, "<f4")
    grid[0] = scale
    weight = Blob("F8_E4M3", (ROWS, COLS), codes.tobytes())
    tensors = {UP: weight, f"{UP}_scale_inv": Blob("F32", grid.shape, grid.tobytes())}
    Model({"model.safetensors": tensors}, {}, indexed=False).write(folder)
    return integrity(Folder(folder))


def test_whole_blocks_of_zeros_under_the_scale_made_for_zeros_are_no_hole(tmp_path: Path) -> None:
    """A converter that saw zeros writes 1; a download that lost the codes leaves the scales of live weights."""
    assert _alarms(_with_a_block_of_zeros(tmp_path / "honest", 1.0)) & {"zero-hole", "zero-codes"} == set()
    assert "zero-hole" in _alarms(_with_a_block_of_zeros(tmp_path / "lost", 0.011))
    assert "zero-hole" in _alarms(_with_a_block_of_zeros(tmp_path / "both lost", 0.0))


def test_a_hole_within_live_blocks_stays_a_hole_whatever_other_blocks_say(tmp_path: Path) -> None:
    assert "zero-hole" in _alarms(_with_a_block_of_zeros(tmp_path / "elsewhere", 1.0, 200, 40))
    assert "zero-hole" in _alarms(_with_a_block_of_zeros(tmp_path / "beyond", 1.0, 0, BLOCK + 20))


def test_a_float_scale_below_the_smallest_normal_number_is_not_zero(tmp_path: Path) -> None:
    """Weights of 1e-40 have such scales, and decode to what they were."""
    assert "zero-scale" not in _alarms(_with_a_block_of_zeros(tmp_path / "small", 2e-43, 300, 1))
    assert "zero-scale" in _alarms(_with_a_block_of_zeros(tmp_path / "zero", 0.0, 300, 1))


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model.fp32-00001-of-00002.safetensors"])
def test_another_form_of_the_model_beside_it_is_said_to_be_unjudged_and_no_fault(
    file: str, tmp_path: Path
) -> None:
    model = whole()
    model.shards[file] = {"layers.0.attention.wq.weight": bf16("wq", 8, 8), UP: bf16("again", 8, 8)}
    model.write(tmp_path)
    report = lint(Folder(tmp_path))
    assert _alarms(report) == set()
    assert "1 files beside the model" in report.not_checked


def test_a_stray_file_of_any_other_name_is_a_fault(tmp_path: Path) -> None:
    model = whole()
    model.shards["model-2.safetensors"] = {UP: bf16("again", 8, 8)}
    model.write(tmp_path)
    assert _alarms(lint(Folder(tmp_path))) != set()


def test_the_names_that_peft_gives_an_adapter_are_its_own(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for file, alarms in (("adapter_model.safetensors", set()), ("model.safetensors", {"wrapper-name"})):
        Model({file: {name: bf16("a", 8, 128)}}, None, indexed=False).write(tmp_path / file)
        assert _alarms(lint(Folder(tmp_path / file))) & {"wrapper-name"} == alarms


def test_codes_of_bitsandbytes_beside_their_tables_are_not_compared_with_the_parents_floats(
    tmp_path: Path,
) -> None:
    parent, child = whole(), whole()
    codes = Blob("U8", (128 * 64, 1), bytes(range(1, 129)) * 64)
    child.find(UP)[UP] = codes
    child.write(tmp_path / "bare")
    child.find(UP)[f"{UP}.absmax"] = Blob("U8", (256,), bytes(range(256)))
    child.write(tmp_path / "child")
    parent.write(tmp_path / "parent")
    slugs = {
        name: _alarms(integrity(Folder(tmp_path / name), Folder(tmp_path / "parent")))
        for name in ("bare", "child")
    }
    assert "carried-retyped" in slugs["bare"]
    assert "carried-retyped" not in slugs["child"]


def test_a_bitsandbytes_weight_whose_state_says_no_shape_is_judged_in_part(tmp_path: Path) -> None:
    """Nothing decodes it, so it is neither a fault nor ever counted as judged."""
    child, state = whole(), b'{"quant_type": "nf4"}'
    child.find(UP)[UP] = Blob("U8", (128 * 64, 1), bytes(range(1, 129)) * 64)
    child.find(UP)[f"{UP}.absmax"] = Blob("F32", (256,), b"\0\0\x80\x3f" * 256)
    child.find(UP)[f"{UP}.quant_map"] = Blob("F32", (16,), b"\0\0\x80\x3f" * 16)
    child.find(UP)[f"{UP}.quant_state.bitsandbytes__nf4"] = Blob("U8", (len(state),), state)
    child.write(tmp_path)
    report = integrity(Folder(tmp_path))
    assert "table-foreign" not in _alarms(report)
    assert dict(report.coverage.in_part) == {"NF4 of bitsandbytes: its state says no shape": 1}
    assert "NF4 of bitsandbytes" not in report.coverage.judged
