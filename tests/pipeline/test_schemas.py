"""What each command prints with --json is valid by its published schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pipeline.parents import write_recipe
from tests.pipeline.test_commands import Told, shardmill  # noqa: F401
from tests.schemas import held


def test_what_the_commands_print_is_valid(
    parent: Path,
    tmp_path: Path,
    shardmill: Callable[..., Told],  # noqa: F811
) -> None:
    """From a plan to a delta; a command that stops early would fail to name its form."""
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    places: list[Any] = ["-c", recipe, "--parent", parent]
    calls: dict[str, list[Any]] = {
        "plan": ["plan", *places, "--out", out, "--probe"],
        "explain": ["explain", *places, "--out", out],
        "build": ["build", *places, "--out", out],
        "init": ["init", parent, "-o", tmp_path / "drafted.toml"],
        "recipes": ["recipes"],
        "pin": ["pin", *places],
        "delta": ["delta", out, out, "--out", tmp_path / "delta"],
        "apply": ["apply", out, tmp_path / "delta", "--out", tmp_path / "new"],
    }
    for name, call in calls.items():
        code, said, complaint = shardmill(*call, "--json")
        assert (name, code, complaint[:300] if code else "") == (name, 0, "")
        assert held(said)["format"] == f"shardmill/{name}/1"
    assert held(shardmill("build", *places, "--out", out, "--json")[1])["kernel"] == "none"
