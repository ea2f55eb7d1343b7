"""Globs over dotted names, against a slow matcher that follows their law word by word."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.pipeline.recipe.globs import GlobSet, captured, expand, filled, fused_instances, nearest


def slow_match(glob: list[str], name: list[str]) -> bool:
    """`**` takes any number of parts, any other part of the glob takes exactly one."""
    if not glob:
        return not name
    if glob[0] == "**":
        return slow_match(glob[1:], name) or (bool(name) and slow_match(glob, name[1:]))
    return bool(name) and fnmatchcase(name[0], glob[0]) and slow_match(glob[1:], name[1:])


PARTS = st.text("ab1", min_size=1, max_size=3)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
GLOB_PARTS = st.one_of(PARTS, st.sampled_from(["*", "**", "a*", "*b", "a*b", "*1*"]))
GLOBS = st.lists(GLOB_PARTS, min_size=1, max_size=5).map(".".join)


@given(st.lists(GLOBS, max_size=6), st.lists(NAMES, max_size=6))
def test_a_set_of_globs_matches_what_each_glob_matches_alone(globs: list[str], names: list[str]) -> None:
    """One GlobSet, asked again and again, gives the places of exactly the globs that match, in order."""
    many = GlobSet(globs)
    for name in names * 2:
        expected = [i for i, glob in enumerate(globs) if slow_match(glob.split("."), name.split("."))]
        assert many.matches(name) == expected


@given(GLOBS, NAMES)
def test_what_the_wildcards_stand_for_rebuilds_the_name(glob: str, name: str) -> None:
    values = captured(glob, name)
    assert (values is not None) == slow_match(glob.split("."), name.split("."))
    if values is not None:
        assert filled(glob, values) == name


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.*", "a", False),
        ("a.**", "a", True),
        ("**.c", "c", True),
        ("**", "a.b", True),
        ("a.**.c", "a.c", True),
        ("a.hc_*_fn", "a.hc_attn_fn", True),
        ("a.hc_*_fn", "a.hc_.x_fn", False),
        ("a+b", "aab", False),
        ("a.b", "a.B", False),
        ("a?c", "abc", False),
        ("[a]", "a", False),
    ],
)
def test_a_star_is_one_part_and_nothing_else_is_special(glob: str, name: str, expected: bool) -> None:
    assert GlobSet([glob]).matches(name) == ([0] if expected else [])


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("a.b", ["a.b"]),
        ("a.{b,c}.d", ["a.b.d", "a.c.d"]),
        ("{a,b}.{c,d}", ["a.c", "a.d", "b.c", "b.d"]),
        ("x{,_scale}", ["x", "x_scale"]),
    ],
)
def test_braces_expand_to_each_choice_in_order(glob: str, expected: list[str]) -> None:
    assert list(expand(glob)) == expected


@pytest.mark.parametrize("glob", ["a.{b", "a}.b", "{a,{b,c}}", "}{"])
def test_braces_that_do_not_pair_are_refused(glob: str) -> None:
    with pytest.raises(ValueError, match="unbalanced braces"):
        expand(glob)


def test_the_nearest_names_fold_numbers_and_come_closest_first() -> None:
    """A typo is answered with the pattern of the names that were meant, each pattern once."""
    names = [f"model.layers.{i}.attn.{x}.weight" for i in range(50) for x in "qk"] + ["lm_head.weight"]
    found = nearest("model.layer.*.attn.q.weight", names)
    assert found[0] == "model.layers.*.attn.q.weight"
    assert len(found) == len(set(found)) <= 3
    assert nearest("zzzzzzzz", names) == []


def test_fused_members_are_gathered_by_what_their_wildcards_stand_for() -> None:
    names = ["l.0.q", "l.0.k", "l.1.q", "other"]
    assert fused_instances(["l.*.q", "l.*.k"], names) == {
        ("0",): {"l.*.q": "l.0.q", "l.*.k": "l.0.k"},
        ("1",): {"l.*.q": "l.1.q"},
    }


def test_fused_members_at_any_depth_are_gathered_at_the_top_too() -> None:
    """A `**` may stand for nothing."""
    assert fused_instances(["**.q", "**.k"], ["q", "k", "a.b.q"]) == {
        ("",): {"**.q": "q", "**.k": "k"},
        ("a.b",): {"**.q": "a.b.q"},
    }


def test_a_new_name_lacks_the_part_that_stands_for_nothing() -> None:
    assert [filled("x.**.y", [value]) for value in ("", "a", "a.b")] == ["x.y", "x.a.y", "x.a.b.y"]
