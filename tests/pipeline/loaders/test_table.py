"""Stock transformers holds what was built, or plan refuses: some rows of the table that `make loaders-table` prints.

Needs the extra `loaders`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra `loaders`")
pytest.importorskip("transformers", reason="needs the extra `loaders`")
pytest.importorskip("compressed_tensors", reason="needs the extra `loaders`")
pytest.importorskip("accelerate", reason="needs the extra `loaders`")

from tests.pipeline.loaders.architectures import KINDS, model_config
from tests.pipeline.loaders.table import REFUSED, RIGHT, WAYS, WRONG, draft_and_build, loaded, rows
from tests.verify.loaders.held import save

pytestmark = pytest.mark.filterwarnings("ignore")
SOME = ("llama", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_neox", "phimoe", "qwen2_5_vl")
MIXTURES = ("qwen3_moe", "deepseek_v3", "phimoe")
UNREAD = {("fp8", "fp8-tensor")}
OF_EXPERTS = {("compressed-tensors", form) for form in ("fp8", "mxfp8", "nvfp4", "int8-channel")}


def test_the_table_has_forty_architectures() -> None:
    assert len(set(KINDS)) >= 40


@pytest.mark.parametrize("kind", SOME)
def test_every_way_is_right_or_refused(kind: str, tmp_path: Path) -> None:
    """Refused are exactly the ways that transformers 5.24 can't read; all else is right, bit for bit."""
    refused = UNREAD | (OF_EXPERTS if kind in MIXTURES else set())
    found = {(row.profile, row.form): row for row in rows(kind, tmp_path)}
    for way in WAYS:
        assert found[way].verdict == (REFUSED if way in refused else RIGHT), str(found[way])


def test_a_head_that_is_not_listed_is_found_wrong(tmp_path: Path) -> None:
    """The comparison finds what a loader makes of a tied head that the list lacks."""
    parent = save(model_config("gemma2"), tmp_path / "parent", seed=1)
    child = tmp_path / "child"
    assert draft_and_build(parent, child, "compressed-tensors", "fp8-channel") is None
    assert loaded(child)[0] == RIGHT
    config = json.loads((child / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (child / "config.json").write_text(json.dumps(config))
    assert loaded(child)[0] == WRONG
