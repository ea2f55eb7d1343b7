"""`verify origin` names the law of every format that this project writes, whatever the profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from tests.kernels.conftest import bell
from tests.pipeline.convert.test_convert import COLUMNS, MODULE, ROWS, parent_of, recipe
from tests.pipeline.parents import build

LAWS = {
    ("fp8-block", "amax/1"): "shardmill amax/1",
    ("fp8-block", "amax-bf16/1"): "amax / 448 rounded to",
    ("fp8-channel", "amax-bf16/1"): "amax / 448 rounded to",
    ("fp8-tensor", "amax-bf16/1"): "amax / 448 rounded to",
    ("mxfp8", "mxfp8/1"): "ModelOpt MXFP8",
    ("mxfp4", "mxfp4/1"): "shardmill mxfp4/1",
    ("nvfp4", "nvfp4-ct/1"): "llm-compressor NVFP4 on F32",
    ("int8-channel", "int8/1"): "llm-compressor on F32",
    ("int8-channel", "int8-bf16/1"): "int8-bf16/1",
    ("int4-group", "int4/1"): "shardmill int4/1",
}


@pytest.mark.parametrize(("form", "law"), LAWS)
def test_a_child_is_named_by_its_law(tmp_path: Path, form: str, law: str) -> None:
    """Every sampled block of a child is its law's, and lint and integrity find it clean."""
    parent = parent_of(tmp_path / "parent", {f"{MODULE}.weight": ("BF16", bell(41, ROWS, COLUMNS))})
    build(parent, tmp_path / "out", recipe(tmp_path, form, keys=f'numerics = "{law}"'))
    said = CliRunner().invoke(shardmill, ["verify", "origin", str(tmp_path / "out"), "--parent", str(parent)])
    assert LAWS[form, law] in said.output
    assert "no known formula" not in said.output
    for question in ("lint", "integrity"):
        assert CliRunner().invoke(shardmill, ["verify", question, str(tmp_path / "out")]).exit_code == 0
