"""A recipe and a parent that were never meant for each other, said in one sentence."""

from __future__ import annotations

from collections.abc import Collection

from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import Parent

_FEW = 3  # a recipe of fewer families may name one wrong glob and still be the right one


def mismatch(recipe: Recipe, parent: Parent, matched: Collection[str]) -> str | None:
    """One sentence where most families match nothing; None where the recipe may be meant for this parent.

    matched: the families that match anything.
    """
    total = len(recipe.family)
    missed = total - len(matched)
    if total < _FEW or 2 * missed <= total:
        return None
    kind = parent.config.get("model_type")
    what = f"model_type {kind}" if isinstance(kind, str) and kind.isprintable() else "without a model_type"
    return (
        f"{missed} of the {total} families of the recipe {recipe.name} match nothing in this parent ({what[:80]}); "
        "draft a recipe for it: shardmill init DIR, or choose another: shardmill recipes"
    )
