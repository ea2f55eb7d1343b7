"""`shardmill explain` names the acceptance runs that a changed checkpoint leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers, write_parent

RECIPE = Path(__file__).parents[3] / "pipeline.toml"


def test_explain_names_runs_that_a_build_would_make_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is built yet, so every shard is stale, and with it what was recorded of the folder."""
    parent, out = tmp_path / "parent", tmp_path / "out"
    write_parent(parent, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    asked = []

    def sentences(checkpoint: Path, will_change: bool) -> list[str]:
        asked.append((checkpoint, will_change))
        return ["runs/a: will be stale"]

    monkeypatch.setattr("shardmill.pipeline.commands.explain.stale_sentences", sentences)
    arguments = ["explain", "-c", str(RECIPE), "--parent", str(parent), "--out", str(out)]
    told = CliRunner().invoke(shardmill, arguments).output.splitlines()
    assert told[-1] == "runs/a: will be stale"
    assert (
        json.loads(CliRunner().invoke(shardmill, [*arguments, "--json"]).output)["accept_runs"] == told[-1:]
    )
    assert asked == [(out, True), (out, True)]
