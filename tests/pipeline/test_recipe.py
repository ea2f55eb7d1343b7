"""The recipe: every problem at once, each with its line; what is not understood is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardmill.pipeline.actions import ACTIONS
from shardmill.pipeline.errors import RecipeError
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.recipe.tables import standard_stages
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import RECIPE, STAGED, write_recipe


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(RecipeError) as refused:
        load(write_recipe(folder, text))
    return list(refused.value.problems)


def line(text: str, words: str, occurrence: int = 1) -> int:
    """The number of the line that begins with `words`, the n-th time."""
    found = [number for number, each in enumerate(text.splitlines(), 1) if each.strip().startswith(words)]
    return found[occurrence - 1]


@pytest.mark.parametrize(
    "path", [ROOT / "pipeline.toml", *sorted((ROOT / "recipes").glob("*.toml"))], ids=lambda p: p.name
)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert load(path).name


def test_the_shipped_recipe_is_pinned_to_a_full_revision() -> None:
    recipe = load(ROOT / "pipeline.toml")
    assert recipe.parent.repository == "LibertAIDAI/GLM-5.3-Flash-NVFP4"
    assert recipe.parent.revision == "caca4e6a4ebbd66f159d3d2fc256683fd6e27177"
    assert {f.name: f.expect for f in recipe.family if f.action == "quantize"} == {
        "KDA q/k/v + b/f_a/g_a": 204,
        "o_proj": 46,
        "MLA q_a/kv_a/q_b": 36,
        "shared experts + dense MLP": 138,
        "lm_head": 1,
        "vision Linears": 124,
    }
    assert all(family.reason for family in recipe.family if family.action == "keep")


def test_all_problems_are_told_at_once_each_with_its_line(tmp_path: Path) -> None:
    """An unknown key, a missing reason, a wrong type and a bad revision: four sentences, four lines."""
    text = RECIPE.replace('reason = "small"\n', "").replace("expect = 2", 'expect = "2"')
    text = text.replace("tensor_parallel", "tensor_paralel").replace("0123456789abcdef0123", "main")
    found = problems(tmp_path, text)
    path = tmp_path / "pipeline.toml"
    assert len(found) == 4
    expected = {
        f"{path}:{line(text, 'tensor_paralel')}: output.tensor_paralel: the key 'tensor_paralel' is not known (do",
        f"{path}:{line(text, '[[family]]', 4)}: family 'norms': a family with action 'keep' needs `reason`",
        f"{path}:{line(text, 'expect', 2)}: family 'mlp': expect: should be a valid integer, not '2'",
        f"{path}:{line(text, 'revision')}: parent.revision: ",
    }
    for start in expected:
        assert any(problem.startswith(start) for problem in found), (start, found)


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ('name = "micro"\n', 'name = "micro"\nextra = 1\n', "extra", "the key 'extra' is not known"),
        ('name = "micro"\n', "", None, "the key 'name' is missing"),
        ("format = 1", "format = 2", "format", "1"),
        ("expect = 4", "expect = true", "expect", "integer"),
        ("expect = 4", "expect = 4.0", "expect", "integer"),
        ("expect = 4", "expect = -1", "expect", "greater"),
        ("block = [4, 4]", "block = [true, 4]", "block", "integer"),
        ("block = [4, 4]", "block = [4]", "block", "too few entries"),
        ("block = [4, 4]", "block = [4, 4, 4]", "block", "has too many entries"),
        ("block = [4, 4]", "block = [0, 4]", "block", "greater"),
        ("block = [4, 4]\n", "", "[[family]]", "needs `block`"),
        ("expect = 4\n", "", "[[family]]", "needs `expect`, the number of its tensors"),
        ('action = "quantize"', 'action = "halve"', "action", "'quantize'"),
        ('match = "model.layers.*.attn.{q,k}.weight"', 'match = "a.{b"', "match", "unbalanced braces"),
        ('match = "model.layers.*.attn.{q,k}.weight"', "match = []", "match", "at least 1 item"),
        ('axis = "rows"', 'axis = "depth"', "axis", "'rows'"),
        ('alias = "draft', 'nick = "draft', "[[alias]]", "the key 'alias' is missing"),
    ],
)
def test_what_is_not_understood_is_refused_at_its_line(
    tmp_path: Path, old: str, new: str, where: str | None, words: str
) -> None:
    text = RECIPE.replace(old, new, 1)
    found = problems(tmp_path, text)
    place = f"{tmp_path / 'pipeline.toml'}{f':{line(text, where)}' if where else ''}: "
    assert any(problem.startswith(place) and words in problem for problem in found), found


def test_a_reason_for_keeping_is_no_place_for_a_block(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, RECIPE.replace('action = "keep"', 'action = "keep"\nblock = [4, 4]', 1))
    assert "`block` has no meaning with action 'keep'" in problem


def test_two_families_of_one_name_are_refused(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, RECIPE.replace('name = "mlp"', 'name = "attention"'))
    assert "duplicate family name: attention" in problem


@pytest.mark.parametrize(
    ("text", "words"), [("a = 1\nb = = 2", "line 2"), ("\x00", "not valid TOML"), ("family = 3", "family")]
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert any(words in problem for problem in problems(tmp_path, text))


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml: does not exist"):
        load(tmp_path / "nowhere.toml")


def extend(folder: Path, text: str) -> Path:
    write_recipe(folder, RECIPE, "base.toml")
    return write_recipe(folder, f'extends = "base.toml"\n{text}', "child.toml")


def test_a_recipe_that_extends_another_replaces_families_of_the_same_name(tmp_path: Path) -> None:
    """Place and everything else stay the base's."""
    child = load(
        extend(
            tmp_path, 'name = "child"\n[[family]]\nname = "mlp"\nmatch = "m"\naction = "drop"\nreason = "x"\n'
        )
    )
    base = load(tmp_path / "base.toml")
    assert child.name == "child"
    assert [family.name for family in child.family] == [family.name for family in base.family]
    assert child.family[1].action == "drop"
    assert child.family[0] == base.family[0]
    assert (child.stages, child.fused, child.parent) == (base.stages, base.fused, base.parent)


def test_a_problem_of_an_extending_recipe_stands_at_its_own_files_line(tmp_path: Path) -> None:
    """The base's family is told with the base's line, the child's with the child's."""
    path = extend(tmp_path, 'name = "child"\n\n[[family]]\nname = "norms"\nmatch = "m"\naction = "keep"\n')
    base = tmp_path / "base.toml"
    base.write_text(RECIPE.replace("expect = 2", "expekt = 2"))
    with pytest.raises(RecipeError) as refused:
        load(path)
    text = base.read_text()
    assert [problem.partition(": ")[0] for problem in refused.value.problems] == [
        f"{base}:{line(text, '[[family]]', 2)}" if "needs" in problem else f"{base}:{line(text, 'expekt')}"
        for problem in refused.value.problems[:-1]
    ] + [f"{path}:4"]


def test_two_families_of_one_name_in_an_extending_recipe_are_refused_too(tmp_path: Path) -> None:
    family = '[[family]]\nname = "mlp"\nmatch = "m"\naction = "keep"\nreason = "x"\n'
    with pytest.raises(RecipeError, match="duplicate family name: mlp"):
        load(extend(tmp_path, family + family))


def test_a_recipe_that_extends_itself_is_refused(tmp_path: Path) -> None:
    write_recipe(tmp_path, 'extends = "b.toml"\n', "a.toml")
    write_recipe(tmp_path, 'extends = "a.toml"\n', "b.toml")
    with pytest.raises(RecipeError, match=r"a\.toml: extends itself"):
        load(tmp_path / "a.toml")


def test_an_extended_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml: does not exist"):
        load(write_recipe(tmp_path, 'extends = "nowhere.toml"\n'))


# ---- keys that an action doesn't know ---------------------------------------------------------------------------

KEY_VALUES = {"block": "[4, 4]", "source_block": "[8, 8]", "numerics": '"amax/1"', "to": '"x.*"'}
NEEDED = {"expect": "1", "reason": '"x"', **KEY_VALUES}


@pytest.mark.parametrize(
    ("action", "key"),
    [
        (name, key)
        for name, action in ACTIONS.items()
        for key in KEY_VALUES
        if key not in (*action.needs, *action.takes)
    ],
)
def test_a_key_that_the_action_does_not_use_is_refused_at_its_line(
    tmp_path: Path, action: str, key: str
) -> None:
    """Whatever the action and whatever the key: `numerics` with keep, `to` with quantize."""
    needed = "".join(f"{each} = {NEEDED[each]}\n" for each in ACTIONS[action].needs)
    family = (
        f'[[family]]\nname = "f"\nmatch = "a.*"\naction = "{action}"\n{needed}{key} = {KEY_VALUES[key]}\n'
    )
    text = f'format = 1\nname = "r"\n{family}'
    [problem] = problems(tmp_path, text)
    place = f"{tmp_path / 'pipeline.toml'}:{line(text, f'{key} =')}: family 'f': {key}: "
    assert problem == f"{place}`{key}` has no meaning with action {action!r}; remove it"


def test_a_misspelt_key_of_an_action_is_answered_with_the_nearest(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, RECIPE.replace("block = [4, 4]", "block = [4, 4]\nnumeric = 1", 1))
    assert "the key 'numeric' is not known (do you mean 'numerics'?)" in problem


@pytest.mark.parametrize(
    ("written", "meant"),
    [("acton =", "action"), ("actions =", "action"), ("nmae =", "name"), ("Format =", "format")],
)
def test_a_key_that_is_missing_since_it_is_misspelt_is_told_with_the_word_that_was_written(
    written: str, meant: str, tmp_path: Path
) -> None:
    """The reader sees the word to correct, and is not sent to look for it."""
    found = "\n".join(problems(tmp_path, re.sub(rf"(?m)^{meant} =", written, RECIPE, count=1)))
    misspelt = written.removesuffix(" =")
    assert f"the key {meant!r} is missing; {misspelt!r} is most like it: correct its spelling" in found


def test_a_key_that_is_simply_missing_is_told_without_a_hint(tmp_path: Path) -> None:
    found = "\n".join(problems(tmp_path, 'format = 1\nname = "r"\n[[family]]\nname = "f"\nmatch = "a.*"\n'))
    assert found.endswith("the key 'action' is missing")


# ---- the standard stages ----------------------------------------------------------------------------------------


def test_a_recipe_without_stages_gets_the_standard_six(tmp_path: Path) -> None:
    written, default = load(write_recipe(tmp_path, STAGED)), load(write_recipe(tmp_path / "b"))
    assert default.stages == written.stages


def test_a_stage_that_an_action_needs_comes_between_classify_and_rewrite() -> None:
    stages = standard_stages(["keep", "reblock", "dequantize", "reconcile", "no action"])
    assert stages["dequantize"] == stages["reconcile"] == {"needs": ("classify",)}
    assert stages["rewrite"]["needs"] == ("classify", "quantize", "scales", "dequantize", "reconcile")
    assert len(stages) == 8


# ---- words of the release before --------------------------------------------------------------------------------

OLD = """\
format = 1
name = "old"

[stages]
scan = { needs = [] }
classify = { needs = ["scan"] }
quantise = { needs = ["classify"] }
dequantise = { needs = ["classify"] }
scales = { needs = ["quantise"] }
rewrite = { needs = ["classify", "quantise", "dequantise", "scales"] }
index = { needs = ["scan", "rewrite"] }

[[family]]
name = "all"
match = "**"
action = "dequantise"
source_block = [8, 8]
expect = 1
"""


def test_old_spellings_work_with_one_notice_each_at_its_line(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path, OLD))
    new = load(write_recipe(tmp_path / "new", OLD.replace("quantise", "quantize")))
    assert recipe.model_dump() == new.model_dump()
    path = tmp_path / "pipeline.toml"
    words = "'dequantise' is now written 'dequantize'; the old word works for one more release"
    assert recipe.notices == (
        f"{path}:16: family 'all': action: {words}",
        f"{path}:7: stages.quantise: {words.replace('dequant', 'quant')}",
        f"{path}:8: stages.dequantise: {words}",
    )


def test_a_recipe_in_todays_words_has_no_notice(tmp_path: Path) -> None:
    assert load(write_recipe(tmp_path)).notices == ()
