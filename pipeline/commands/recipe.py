"""The recipe that a command is given, and the plan that it begins with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shardmill.pipeline.commands.options import tell
from shardmill.pipeline.container.hub import place_of
from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Prepared


def load_recipe(path: Path) -> Recipe:
    """The recipe at `path`. What is spelled in old words there is said on stderr."""
    recipe = recipes.load(path)
    for notice in recipe.notices:
        tell(notice)
    return recipe


def parent_words(parent: Path, sources: Mapping[str, Path]) -> list[str]:
    """The options that name these parents, for the command that comes next."""
    words = [word for name, each in sources.items() for word in ("--source", f"{name}={place_of(each)}")]
    return ["--parent", place_of(parent), *words]


def planned(
    recipe: Path, parent: Path, paranoid: bool = False, sources: Iterable[tuple[str, Path]] = ()
) -> Prepared:
    """The plan of the recipe at `recipe` for `parent`, held to the lock beside the recipe.

    sources: (name, folder) of each [[source]] that the command names.
    """
    return prepare(load_recipe(recipe), parent, load_lock(lock_path(recipe)), paranoid, dict(sources))
