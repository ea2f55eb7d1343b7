"""A recipe is bounded like every other hostile input: a few kilobytes of it cost no memory and no minutes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.recipe.globs import count, expand
from tests.pipeline.parents import RECIPE, prepare

HEAD = 'format = 1\nname = "x"\n'
FAMILY = '[[family]]\nname = "{name}"\nmatch = {match}\naction = "keep"\nreason = "r"\n'
ALL = FAMILY.format(name="a", match='"**"')


@pytest.mark.parametrize(
    "glob", ["{a,b}" * 22, "**." * 40 + "a", "*a" * 40, "a" * 9999], ids=["braces", "parts", "stars", "long"]
)
def test_a_glob_that_asks_for_too_much_is_refused_at_once(glob: str) -> None:
    with pytest.raises(ValueError, match="limit"):
        expand(glob)


@pytest.mark.parametrize("glob", ["a", "{a,b}.{c,d,e}", "x.{a}.*", "**.{0,1}.{q,k,v}_proj.weight"])
def test_a_glob_is_counted_without_being_expanded(glob: str) -> None:
    assert count(glob) == len(expand(glob))


HOSTILE = {
    "many globs of many braces": HEAD
    + FAMILY.format(
        name="a", match=str([f"{{a,b}}{{a,b}}{{a,b}}{{a,b}}{{a,b}}{{a,b}}.{i}" for i in range(200)])
    ),
    "as many in tables": HEAD
    + "".join(FAMILY.format(name=i, match='"' + "{a,b}" * 12 + f'.{i}"') for i in range(60)),
    "as many fused": HEAD
    + ALL
    + "".join(f'[[fused]]\nname = "{i}"\nmatch = "**.{{a,b,c,d}}{i}.{{x,y,z}}"\n' for i in range(900)),
    "one glob ten thousand times": HEAD + FAMILY.format(name="a", match=str(["**"] * 10_000)),
    "more families than any model has": HEAD
    + "".join(FAMILY.format(name=i, match=f'"**.w{i}"') for i in range(1100)),
    "two thousand aliases": RECIPE + '[[alias]]\nprefix = "p."\nalias = "q."\n' * 2000,
    "nested braces": HEAD + FAMILY.format(name="a", match='"' + "{a," * 300 + "b" + "}" * 300 + '"'),
    "a count of ten thousand digits": RECIPE.replace("expect = 4", "expect = 0x" + "f" * 10_000),
    "a count above all tensors": RECIPE.replace("expect = 4", "expect = 4000000000"),
    "a block of ten thousand digits": RECIPE.replace("[4, 4]", f"[4, 0x{'f' * 10_000}]"),
    "sizes without end": RECIPE.replace("[1, 2]", str(list(range(1, 5000)))),
    "lists in lists": HEAD + "a = " + "[" * 20_000 + "]" * 20_000,
    "tables in tables": HEAD + "a = " + "{a=" * 5000 + "1" + "}" * 5000,
    "a name of two thousand parts": HEAD + "[" + ".".join(["a"] * 2000) + "]\n",
    "a stage of ten thousand needs": HEAD + f"[stages]\nscan = {{ needs = {['x'] * 10_000} }}\n" + ALL,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_recipe_that_asks_for_too_much_is_refused_in_words(text: str, parent: Path) -> None:
    """Within bounds of memory, in sentences of bounded length."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((RecipeError, PlanError)) as refused:
        prepare(parent, text)
    assert len(str(refused.value)) < 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
