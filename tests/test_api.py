"""The Python API does what the commands do."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill import api
from tests.pipeline.parents import published, write_parent, write_recipe


def test_plan_build_and_verify_without_a_terminal(tmp_path: Path) -> None:
    """The plan's sizes are those of the child that build makes and that verify finds clean."""
    parent, recipe = write_parent(tmp_path / "parent"), write_recipe(tmp_path)
    planned = api.plan(parent, recipe)
    summary = api.build(parent, recipe, tmp_path / "out", kernel="numpy", workers=1)
    assert summary.plan.key == planned.key
    shards = {shard.file: shard.header.file_bytes for shard in planned.shards}
    found = published(tmp_path / "out")
    assert {name: len(found[name]) for name in shards} == shards
    verdict = api.verify(tmp_path / "out", parent)
    assert {finding.file for finding in verdict.findings} <= {
        "config.json"
    }  # the micro model's names are invented
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert api.build(parent, recipe, tmp_path / "out", kernel="numpy").files_written == ()


def test_problems_are_exceptions_with_a_sentence(tmp_path: Path) -> None:
    """One base class catches them all."""
    with pytest.raises(api.ShardmillError, match="nowhere"):
        api.plan(tmp_path / "nowhere", write_recipe(tmp_path))


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/api.md, as its reader has it: a folder `parent` and a recipe `mine.toml` in the working folder."""
    write_parent(tmp_path / "parent"), write_recipe(tmp_path).rename(tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert (tmp_path / "child/model.safetensors.index.json").exists()


def test_every_name_of_the_api_is_there() -> None:
    """`__all__` names nothing that is absent."""
    assert [name for name in api.__all__ if not hasattr(api, name)] == []
