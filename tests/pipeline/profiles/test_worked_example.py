"""Adding a profile as CONTRIBUTING says: a module's two functions and a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.plan import profiles
from shardmill.pipeline.plan.profiles import Profile
from shardmill.pipeline.plan.profiles.child import Child, blocks
from tests.pipeline.parents import build
from tests.pipeline.profiles.models import LINEAR, dense_parent, recipe


def problems(child: Child) -> list[str]:
    """This loader takes square blocks alone."""
    return [f"{name}: is not square" for name, block in blocks(child).items() if block.rows != block.cols]


def declare(child: Child) -> tuple[dict[str, Any], int]:
    """The parent's config with a table of modules; and how many entries that took."""
    table = {name: [block.rows, block.cols] for name, block in blocks(child).items()}
    return {**child.config, "blocks": table}, len(table)


@pytest.fixture(autouse=True)
def _with_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Profile("tabular", "_factor", problems, declare)
    monkeypatch.setitem(profiles.PROFILES, "tabular", row)  # type: ignore[arg-type]


def test_a_profile_is_added_by_its_file_and_a_row(tmp_path: Path) -> None:
    """A recipe names it, scales get its suffix, config.json is what it declares."""
    build(dense_parent(tmp_path / "parent"), tmp_path / "out", recipe("tabular"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(map(tuple, config["blocks"].values())) == {(128, 128)}
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(name.endswith(".weight_factor") for name in names)


def test_what_it_cannot_express_is_refused_by_plan(tmp_path: Path) -> None:
    """Its own sentence reaches the user before a byte is written."""
    oblong = recipe("tabular", LINEAR.replace("[128, 128]", "[64, 128]"))
    with pytest.raises(PlanError, match="is not square"):
        build(dense_parent(tmp_path / "parent"), tmp_path / "out", oblong)
