"""A recipe is bounded like every other hostile input."""

from __future__ import annotations

import pytest

from shardmill.pipeline.recipe.globs import expand


@pytest.mark.parametrize(
    "glob", ["{a,b}" * 22, "**." * 40 + "a", "*a" * 40, "a" * 9999], ids=["braces", "parts", "stars", "long"]
)
def test_a_glob_that_asks_for_too_much_is_refused_at_once(glob: str) -> None:
    with pytest.raises(ValueError, match="limit"):
        expand(glob)
