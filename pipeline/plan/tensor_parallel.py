"""At which tensor-parallel sizes the result loads: every rank's part of a weight must end at whole blocks."""

from __future__ import annotations

from collections.abc import Iterable

from shardmill.pipeline.actions import Conversion
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.plan.types import Assignment, LoadsAt
from shardmill.pipeline.recipe.globs import GlobSet, fused_instances
from shardmill.pipeline.recipe.tables import Parallel, Recipe
from shardmill.pipeline.types import BlockShape, Shape

SIZES_SHOWN = (1, 2, 4, 8)


def loads_at(recipe: Recipe, assignments: Iterable[Assignment]) -> Iterable[LoadsAt]:
    """For each tensor-parallel size whether the blocks divide what a rank gets."""
    quantized = {
        each.source.name: unit
        for each in assignments
        if isinstance(each.action, Conversion) and (unit := each.action.rank_unit(each.source))
    }
    axes = _axes(recipe, quantized)
    inner = _inner_members(recipe, quantized)
    for size in sorted({*SIZES_SHOWN, *recipe.output.tensor_parallel}):
        reasons = (
            _why_not_at(size, name, shape, block, axes.get(name), name in inner)
            for name, (shape, block) in quantized.items()
        )
        yield LoadsAt(size, next((reason for reason in reasons if reason), None))


def _axes(recipe: Recipe, names: Iterable[str]) -> dict[str, Parallel]:
    """Weight -> its [[parallel]] table. No two match one weight: classify refuses that."""
    rows = [(glob, table) for table in recipe.parallel for glob in table.globs()]
    globs = GlobSet([glob for glob, _ in rows])
    return {name: rows[places[0]][1] for name in names if (places := globs.matches(name))}


def _inner_members(recipe: Recipe, names: Iterable[str]) -> set[str]:
    """Members of a fused group that others follow: their rows must end on a block at every size."""
    listed = list(names)
    inner: set[str] = set()
    for group in recipe.fused:
        last = group.folded()[-1]
        for present in fused_instances(group.globs(), listed).values():
            inner.update(name for member, name in present.items() if member != last)
    return inner


def _why_not_at(
    size: int, name: str, shape: Shape, block: BlockShape, split: Parallel | None, inner: bool
) -> str | None:
    """Why a rank's part of a weight [R, C] does not end at whole blocks; vLLM's `validate_fp8_block_shape`."""
    sides = {"rows": (shape[0], block.rows), "columns": (shape[1], block.cols)}
    for side, (length, step) in sides.items():
        ranks = min(size, split.shares or size) if split and split.axis == side else 1
        must_divide = ranks > 1 or (side == "rows" and inner)
        if length % ranks:
            return f"{name}: the number of {side}, {length}, is not divisible by {ranks} ranks"
        if must_divide and (length // ranks) % step:
            return f"{name}: {length // ranks} {side} a rank, not a multiple of the block's {step}"
    return None


def refuse_unloadable(recipe: Recipe, loads: Iterable[LoadsAt]) -> None:
    problems = [
        f"the result must load at tensor-parallel size {at.tensor_parallel} ([output] tensor_parallel), "
        f"but can't: {at.reason}; choose a smaller block, or remove that size"
        for at in loads
        if at.tensor_parallel in recipe.output.tensor_parallel and at.reason
    ]
    if problems:
        raise PlanError(problems)
