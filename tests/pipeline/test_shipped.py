"""Recipes that come with shardmill, and a recipe given to a parent that it was not meant for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.recipe.shipped import shipped

ROOT = Path(__file__).parents[2]


def _run(*words: object) -> Result:
    return CliRunner().invoke(shardmill, [str(word) for word in words])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped") / "toy"
    assert _run("toy-parent", folder).exit_code == 0
    return folder


def test_every_recipe_of_the_project_is_shipped_by_its_name() -> None:
    """One name a file; a recipe that extends another reads it."""
    files = {"pipeline.toml", *(path.name for path in ROOT.glob("recipes/*.toml"))}
    assert {path.name for path in shipped().values()} == files
    for name, path in shipped().items():
        assert load(path).name == name


def test_a_shipped_recipe_is_used_from_any_folder(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-c NAME` needs no file of the project."""
    monkeypatch.chdir(tmp_path)
    by_name = _run("plan", "-c", "glm-5.3-flash-fp8-bf16-vision", "--parent", toy)
    by_file = _run("plan", "-c", ROOT / "recipes/glm-5.3-flash-bf16-vision.toml", "--parent", toy)
    assert by_name.exit_code == 0
    kept = [result.output.partition("Next:")[0] for result in (by_name, by_file)]
    assert kept[0] == kept[1]
    assert "-c glm-5.3-flash-fp8-bf16-vision" in by_name.output


def test_a_file_of_a_shipped_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the folder is what its owner means."""
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b-fp8").write_text("format = 9\n")
    result = _run("plan", "-c", "qwen3-8b-fp8", "--parent", tmp_path)
    assert "qwen3-8b-fp8:1: format" in str(result.exception)


def test_a_printed_recipe_plans_as_the_shipped_one(toy: Path, tmp_path: Path) -> None:
    """The copy reads what it extends wherever it lies."""
    copy = tmp_path / "mine.toml"
    copy.write_text(_run("recipes", "glm-5.3-flash-fp8-amax").output)
    assert tomllib.loads(copy.read_text())["name"] == "glm-5.3-flash-fp8-amax"
    assert _run("plan", "-c", copy, "--parent", toy).exit_code == 0


def test_recipes_lists_each_with_its_purpose() -> None:
    """A name, and the recipe's first comment."""
    listed = _run("recipes").output
    assert all(name in listed for name in shipped())
    assert "NVFP4 experts pass through" in listed


@pytest.mark.parametrize("words", [("recipes", "qwen3-8"), ("plan", "-c", "qwen3-8", "--parent", ".")])
def test_an_unknown_name_is_a_usage_error_with_the_nearest(words: tuple[str, ...]) -> None:
    """Exit 2."""
    result = _run(*words)
    assert (result.exit_code, "qwen3-8b-fp8" in result.output) == (2, True)


def test_a_lock_is_not_written_into_the_package(toy: Path) -> None:
    """pin asks for a recipe of one's own."""
    result = _run("pin", "-c", "glm-5.3-flash-fp8", "--parent", toy)
    assert (result.exit_code, "copy this one first" in result.output) == (2, True)
    assert not any(path.with_suffix(".lock").exists() for path in shipped().values())


def test_a_wrong_pair_is_one_sentence(toy: Path) -> None:
    """Not a list of every glob: how many families match nothing, of which model, and what to do."""
    result = _run("plan", "-c", "llama-3.1-8b-fp8", "--parent", toy)
    error = str(result.exception)
    assert len(error.splitlines()) == 1
    assert all(part in error for part in ("match nothing", "glm5_next", "shardmill init DIR"))


def test_a_few_wrong_globs_are_named_with_the_nearest_names(toy: Path, tmp_path: Path) -> None:
    """A recipe that is meant for the parent keeps its details."""
    recipe = tmp_path / "r.toml"
    recipe.write_text((ROOT / "pipeline.toml").read_text().replace("lm_head.weight", "lm_haed.weight"))
    error = str(_run("plan", "-c", recipe, "--parent", toy).exception)
    assert "lm_haed" in error
    assert "the nearest names are" in error
