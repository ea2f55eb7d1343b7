"""What comes before any shard: the stages that read headers and small files, the lock, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill.pipeline.container.hub import origin_of, other_commit
from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.manifest.lock import Lock
from shardmill.pipeline.plan.plan import make_plan
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.run.pin import hold
from shardmill.pipeline.run.place import refuse_names
from shardmill.pipeline.run.unchanged import inputs_now
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import Dag, arrange, unknown_options
from shardmill.pipeline.stages.job import Checkpoint, Prepared, Products
from shardmill.pipeline.types import Consumed

_TAKEN = ("parent", "assignments", "receipt", "index")  # products of stages that the run uses


def prepare(
    recipe: Recipe,
    folder: Path,
    lock: Lock | None = None,
    paranoid: bool = False,
    consumed: Mapping[str, Consumed] | None = None,
) -> Prepared:
    """Recipe and parent -> Prepared. Reads headers and small JSON files only.

    With a `lock` the parent is held to it; `paranoid` hashes its shards for that. Shards in `consumed` may be gone.
    """
    dag = _dag(recipe)
    inputs = inputs_now(recipe, folder, lock)
    if other := other_commit(folder, recipe.parent.repository, recipe.parent.revision):
        raise PlanError([other])
    recipe = _with_origin(recipe, folder)
    checkpoint = Checkpoint(recipe, folder, consumed or {})
    products = dag.run("checkpoint", dag.before_shards(), checkpoint, Products())
    refuse_names((*products["parent"].carried, *(header.shard for header in products["parent"].headers)))
    if lock:
        hold(lock, products["parent"], recipe.parent.repository, recipe.parent.revision, paranoid)
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


def _with_origin(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the repository and commit that the parent comes from, where a hub gave it and it names none."""
    origin = origin_of(folder)
    if origin is None:
        return recipe
    named = {"repository": origin[0], "revision": origin[1]}
    return recipe.model_copy(update={"parent": recipe.parent.model_copy(update=named)})


def _dag(recipe: Recipe) -> Dag:
    """The recipe's stages, arranged. Raises RecipeError with every problem."""
    if unknown := unknown_options({name: table.options for name, table in recipe.stages.items()}, STAGES):
        hint = "is not known; remove it or correct its spelling"
        raise RecipeError(
            [recipe.problem_at(("stages", *key), f"the key {key[1]!r} {hint}") for key in unknown]
        )
    needs = {name: table.needs for name, table in recipe.stages.items()}
    return arrange(needs, STAGES, wanted_products=_TAKEN)
