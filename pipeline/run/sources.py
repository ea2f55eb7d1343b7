"""Where each [[source]] of a recipe is: as the command says, else as the recipe does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardmill.pipeline.container.hub import sparse_mirror
from shardmill.pipeline.errors import RecipeError
from shardmill.pipeline.recipe.tables import FurtherParent, Recipe


def folders_of(recipe: Recipe, given: Mapping[str, Path]) -> dict[str, Path]:
    """[[source]] -> its folder, of a repository its sparse mirror. Raises RecipeError with every problem."""
    if problems := list(_problems(recipe, given)):
        raise RecipeError(problems)
    return {table.name: given.get(table.name) or _place(recipe, table) for table in recipe.source}


def _problems(recipe: Recipe, given: Mapping[str, Path]) -> Iterator[str]:
    known = {table.name for table in recipe.source}
    for name in sorted(set(given) - known):
        listed = f"it has {', '.join(sorted(known))}" if known else "it has none"
        yield f"--source {name}: the recipe {recipe.name} has no [[source]] of that name; {listed}"
    for table in recipe.source:
        if table.name in given:
            continue
        if table.path is None and not (table.repository and table.revision):
            yield (
                f"source {table.name!r}: nothing says where it is; give --source {table.name}=DIR, or its `path`, "
                f"or its `repository` and `revision`"
            )
        elif table.path is not None and not (recipe.home / table.path).is_dir():
            yield (
                f"source {table.name!r}: {recipe.home / table.path}, which `path` names, is not a folder; correct it, "
                f"or give --source {table.name}=DIR"
            )


def _place(recipe: Recipe, table: FurtherParent) -> Path:
    if table.path is not None:
        return recipe.home / table.path
    return sparse_mirror(f"hf://{table.repository}@{table.revision}")
