"""A child that others made and published: each scale right after its weight in the file, no manifest of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.reading.source import Folder
from tests.verify.zoo.all import ask
from tests.verify.zoo.clean import mixed_child, nvfp4_parent
from tests.verify.zoo.model import INDEX, Model


@pytest.fixture
def published() -> Model:
    model = mixed_child()
    model.manifest = None
    for file, shard in model.shards.items():
        after = {name: (name, f"{name}_scale_inv") for name in shard}
        order = [
            one for name in shard for one in after[name] if one in shard and not name.endswith("_scale_inv")
        ]
        model.shards[file] = {name: shard[name] for name in order}
    return model


@pytest.mark.parametrize("question", ["integrity", "lint", "loads"])
def test_it_is_accepted(published: Model, question: str, tmp_path: Path) -> None:
    published.write(tmp_path)
    assert ask(question, tmp_path).findings == []


def test_its_parent_is_carried_through(published: Model, tmp_path: Path) -> None:
    published.write(tmp_path / "child")
    nvfp4_parent().write(tmp_path / "parent")
    assert integrity(Folder(tmp_path / "child"), Folder(tmp_path / "parent")).findings == []


def test_a_total_size_that_is_another_releases_file_sizes_is_a_finding(
    published: Model, tmp_path: Path
) -> None:
    published.write(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"]["total_size"] = (
        sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) - 4096
    )
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert [finding.slug for finding in ask("integrity", tmp_path).findings] == ["total-size"]


def test_a_config_that_cannot_be_read_is_not_called_absent(published: Model, tmp_path: Path) -> None:
    published.write(tmp_path)
    (tmp_path / "config.json").write_text("{ x")
    report = ask("integrity", tmp_path)
    assert [finding.slug for finding in report.findings] == ["config-json"]
    assert report.not_checked["config"] == "config.json cannot be used"
