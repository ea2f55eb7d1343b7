"""What comes before any shard: the stages that read headers and small files, the lock, and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardmill.pipeline.container.hub import origin_of, other_commit
from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.manifest.lock import Lock
from shardmill.pipeline.plan.plan import make_plan
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.run.pin import hold
from shardmill.pipeline.run.place import refuse_names
from shardmill.pipeline.run.sources import folders_of
from shardmill.pipeline.run.unchanged import inputs_now
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import Dag, arrange, unknown_options
from shardmill.pipeline.stages.job import Checkpoint, Prepared, Products

_TAKEN = ("parent", "assignments", "receipt", "index")  # products of stages that the run uses


def prepare(
    recipe: Recipe,
    folder: Path,
    lock: Lock | None = None,
    paranoid: bool = False,
    sources: Mapping[str, Path] | None = None,
) -> Prepared:
    """Recipe and parent -> Prepared. Reads headers and small JSON files only.

    With a `lock` the parent is held to it; `paranoid` hashes its shards for that. sources: [[source]] -> its folder;
    of those that are not in it the recipe says where they are.
    """
    dag = _dag(recipe)
    folders = folders_of(recipe, sources or {})
    inputs = inputs_now(recipe, folder, lock, folders)
    if others := list(_other_commits(recipe, folder, folders)):
        raise PlanError(others)
    recipe = _with_origins(recipe, folder, folders)
    checkpoint = Checkpoint(recipe, folder, folders)
    products = dag.run("checkpoint", dag.before_shards(), checkpoint, Products())
    refuse_names((*products["parent"].carried, *(header.shard for header in products["parent"].own_headers)))
    if lock:
        hold(lock, products["parent"], recipe, paranoid)
    products["plan"] = make_plan(recipe, products["parent"], products["assignments"])
    return Prepared(
        dag,
        checkpoint,
        products,
        inputs.digest,
        lock,
        held_by_bytes=bool(lock and paranoid),
        began=inputs.began,
    )


def _other_commits(recipe: Recipe, folder: Path, folders: Mapping[str, Path]) -> Iterator[str]:
    """Why a place is not the repository or commit that the recipe names for it."""
    wanted = [(folder, recipe.parent.repository, recipe.parent.revision)]
    wanted += [(folders[table.name], table.repository, table.revision) for table in recipe.source]
    for place, repository, revision in wanted:
        if other := other_commit(place, repository, revision):
            yield other


def _with_origins(recipe: Recipe, folder: Path, folders: Mapping[str, Path]) -> Recipe:
    """The recipe with the repositories and commits that its parents come from, where a hub gave them."""
    sources = tuple(table.model_copy(update=_origin(folders[table.name])) for table in recipe.source)
    parent = recipe.parent.model_copy(update=_origin(folder))
    return recipe.model_copy(update={"parent": parent, "source": sources})


def _origin(folder: Path) -> dict[str, str]:
    origin = origin_of(folder)
    return {"repository": origin[0], "revision": origin[1]} if origin else {}


def _dag(recipe: Recipe) -> Dag:
    """The recipe's stages, arranged. Raises RecipeError with every problem."""
    if unknown := unknown_options({name: table.options for name, table in recipe.stages.items()}, STAGES):
        hint = "is not known; remove it or correct its spelling"
        raise RecipeError(
            [recipe.problem_at(("stages", *key), f"the key {key[1]!r} {hint}") for key in unknown]
        )
    needs = {name: table.needs for name, table in recipe.stages.items()}
    return arrange(needs, STAGES, wanted_products=_TAKEN)
