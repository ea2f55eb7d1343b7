"""A recipe that converts nothing under a name that promises a format is refused, unless the parent has it already."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.pipeline.errors import PlanError
from tests.pipeline.parents import Tensor, bf16, prepare, write_parent

RECIPE = """
format = 1
name = "{name}"
[[family]]
name = "all"
match = "**"
action = "keep"
reason = "as it is"
"""
PACKED: Tensor = ("I32", (16, 8), bytes(512))
CODES: Tensor = ("F8_E4M3", (16, 8), bytes([1] * 128))


def planned(folder: Path, name: str, **tensors: Tensor) -> None:
    parent = write_parent(folder, {"model-00001-of-00001.safetensors": tensors}, config={})
    prepare(parent, RECIPE.format(name=name))


@pytest.mark.parametrize("name", ["x-fp8", "x-bf16", "x-int4", "X.NVFP4", "w8a8_x", "x-mxfp8"])
def test_a_copy_under_a_name_that_promises_a_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"converts nothing.*a copy.*the parent has 1 matrices of floats"):
        planned(tmp_path / "parent", name, w=bf16("w", 16, 8))


@pytest.mark.parametrize("name", ["copy", "xfp8", "fp8x-model", "bf160"])
def test_a_name_that_promises_nothing_may_be_a_copys(name: str, tmp_path: Path) -> None:
    planned(tmp_path / "parent", name, w=bf16("w", 16, 8))


@pytest.mark.parametrize(("name", "held", "holds"), [("x-fp8", CODES, True), ("x-fp8", PACKED, False),
                                                     ("x-gptq", PACKED, True), ("x-bf16", CODES, False)])  # fmt: skip
def test_a_parent_that_holds_the_format_already_keeps_the_name(
    name: str, held: Tensor, holds: bool, tmp_path: Path
) -> None:
    """A copy of an FP8 model is one; a copy of an INT4 model is not, and no copy has become BF16."""
    if holds:
        planned(tmp_path / "parent", name, w=held)
        return
    with pytest.raises(PlanError, match="quantized already"):
        planned(tmp_path / "parent", name, w=held)
