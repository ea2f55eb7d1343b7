"""A short random walk: each build equals one from nothing, or refuses. `make torture-walk` walks 2,000 steps."""

from __future__ import annotations

from pathlib import Path

from bench.torture_walk import walk


def test_a_walk_of_edits_ends_at_the_bytes_of_a_build_from_nothing(tmp_path: Path) -> None:
    faults, counts, _ = walk(seed=7, steps=8, home=tmp_path)
    assert faults == []
    assert counts["equal"]
