"""Stage `classify`: every tensor of the parent gets exactly one family, and with it one action.

The order of the rules never matters: two that match one tensor are an error, as is none. What is not understood
is refused, all problems at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardmill.kernels.block_fp8 import RECIPES
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.plan import fp8_source, nvfp4_source
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.recipe.globs import GlobSet, filled, fused_instances, nearest
from shardmill.pipeline.recipe.read import Family, Fused, Recipe
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import (
    Action,
    Assignment,
    Copy,
    Dequantize,
    Drop,
    Parent,
    QuantizeBlock,
    Reblock,
    Reconcile,
    Rename,
    TensorRef,
)

_SHOWN = 5  # problems of one kind that are told in full
_FLOATS = frozenset({"BF16", "F16", "F32"})


def classify(checkpoint: Checkpoint, parent: Parent) -> tuple[Assignment, ...]:
    """One Assignment a tensor, in the parent's order. Raises PlanError with every problem found."""
    recipe = checkpoint.recipe
    families = {family.name: family for family in recipe.family}
    suffix = PROFILES[recipe.output.profile].scale_suffix
    rows = _rows(recipe)
    globs = GlobSet([row.glob for row in rows])
    matched = {name: globs.matches(name) for name in parent.tensors}
    owner_of = [row.family for row in rows]
    owners = {
        name: list(dict.fromkeys(filter(None, map(owner_of.__getitem__, at)))) for name, at in matched.items()
    }
    problems = _unmatched_globs(rows, matched, parent) + _unknown_numerics(recipe.family)
    assignments = []
    for ref in parent.tensors.values():
        owner = owners[ref.name]
        if len(owner) == 1:
            assignments.append(_assigned(ref, families[owner[0]], suffix, parent))
    problems += _capped(_ambiguities(owners), "tensors without exactly one family")
    problems += _counts(recipe.family, assignments)
    problems += _capped(_unfit(assignments, parent), "tensors that cannot be converted")
    problems += _capped(_orphans(families, assignments), "scales that would be consumed")
    grouped = {name for name, at in matched.items() if any(owner_of[place] is None for place in at)}
    problems += _uneven(
        recipe.fused, {each.source.name: each for each in assignments if each.source.name in grouped}
    )
    if problems:
        raise PlanError(problems)
    return tuple(assignments)


@dataclass(frozen=True, slots=True)
class _Row:
    """A glob of the recipe: where it stands, and the family that it gives its tensors, if it is a family's."""

    where: str
    glob: str
    family: str | None = None


def _rows(recipe: Recipe) -> list[_Row]:
    rows = [
        _Row(f"family {table.name!r}", glob, table.name) for table in recipe.family for glob in table.globs()
    ]
    rows += [_Row(f"fused group {table.name!r}", glob) for table in recipe.fused for glob in table.globs()]
    return rows + [
        _Row(f"parallel {table.axis!r}", glob) for table in recipe.parallel for glob in table.globs()
    ]


def _assigned(ref: TensorRef, family: Family, scale_suffix: str, parent: Parent) -> Assignment:
    action = family.deed(ref, scale_suffix)
    reads_scales = isinstance(action, Dequantize | Reblock)
    scales = fp8_source.scales_of(ref, parent.tensors) if reads_scales else None
    reads = nvfp4_source.halves(ref, parent.tensors) if isinstance(action, Reconcile) else ()
    return Assignment(ref, family.name, action, scales, reads)


def _unknown_numerics(families: Sequence[Family]) -> list[str]:
    return [
        f"family {family.name!r}: the numerics {family.numerics!r} are not known; they are {', '.join(RECIPES)}"
        for family in families
        if family.numerics not in RECIPES
    ]


def _unmatched_globs(rows: Sequence[_Row], matched: Mapping[str, list[int]], parent: Parent) -> list[str]:
    used = {place for places in matched.values() for place in places}
    return [
        f"{row.where}: the glob {row.glob!r} matches no tensor of the parent{_hint(row.glob, parent)}"
        for place, row in enumerate(rows)
        if place not in used
    ]


def _hint(glob: str, parent: Parent) -> str:
    close = nearest(glob, parent.tensors)
    return f"; the nearest names are {', '.join(close)}" if close else "; remove it or correct it"


def _ambiguities(owners: Mapping[str, Sequence[str]]) -> Iterable[str]:
    for name, owner in owners.items():
        if not owner:
            yield f"{name}: no family matches it; add it to one, with action 'keep' and a reason if it is to stay"
        elif len(owner) > 1:
            yield f"{name}: the families {' and '.join(map(repr, owner))} both match it; narrow one"


def _counts(families: Sequence[Family], assignments: Sequence[Assignment]) -> list[str]:
    """Families whose number of tensors is another than expected; scales that a conversion consumes don't count."""
    consuming = {family.name for family in families if family.source_block}
    found = Counter(
        each.family
        for each in assignments
        if not (each.family in consuming and isinstance(each.action, Drop))
    )
    return [
        f"family {family.name!r}: expects {family.expect} tensors, the parent has {found[family.name]}; "
        f"correct its globs or its count"
        for family in families
        if family.expect is not None and family.expect != found[family.name]
    ]


def _unfit(assignments: Sequence[Assignment], parent: Parent) -> Iterable[str]:
    families = {each.source.name: each.family for each in assignments}
    for each in assignments:
        reason = None
        if isinstance(each.action, QuantizeBlock):
            reason = _why_unfit(each.source, each.action, parent)
        elif isinstance(each.action, Dequantize | Reblock):
            reason = fp8_source.why_unfit(each, families)
        elif isinstance(each.action, Reconcile) and not each.reads:
            reason = nvfp4_source.WHY_UNFIT
        if reason:
            yield f"{each.source.name} in {each.source.shard}: {reason}"


def _orphans(families: Mapping[str, Family], assignments: Sequence[Assignment]) -> Iterable[str]:
    """Scales in a family that consumes them, whose weight is elsewhere and would be left bare."""
    read = {each.scales.name for each in assignments if each.scales}
    for each in assignments:
        name = each.source.name
        if isinstance(each.action, Drop) and families[each.family].source_block and name not in read:
            yield f"{name}: would be consumed by the family {each.family!r}, which does not hold its weight"


def _why_unfit(ref: TensorRef, action: QuantizeBlock, parent: Parent) -> str | None:
    if ref.dtype not in _FLOATS:
        kind = (
            "already quantized or packed"
            if ref.dtype in ("U8", "I8", "F4") or ref.dtype[:2] == "F8"
            else "no float"
        )
        return f"is {ref.dtype}, {kind}; only {', '.join(sorted(_FLOATS))} can be quantized, keep it"
    if len(ref.shape) != 2 or 0 in ref.shape:
        return f"has shape {list(ref.shape)}; only matrices [rows, columns] can be quantized, keep it"
    scale = ref.name + action.scale_suffix
    if scale in parent.tensors:
        return f"the parent holds {scale} already; keep both, or drop the scale"
    return None


def _uneven(groups: Sequence[Fused], assigned: Mapping[str, Assignment]) -> list[str]:
    """Fused groups of which a member is missing or treated otherwise than the rest; `assigned` may hold more."""
    problems: list[str] = []
    for group in groups:
        members = group.folded()
        for instance, present in fused_instances(group.globs(), assigned).items():
            where = f"fused group {group.name!r} at {', '.join(instance) or 'the top'}"
            if absent := [glob for glob in members if glob not in present]:
                problems.append(
                    f"{where}: {filled(absent[0], instance)} is missing, so the group can't be fused"
                )
            deeds = {_treatment(assigned[name].action) for name in present.values()}
            if len(deeds) > 1:
                problems.append(
                    f"{where}: its members are treated differently "
                    f"({'; '.join(f'{name}: {_deed(assigned[name])}' for name in present.values())}); "
                    f"a runtime fuses them, so give all of them one family"
                )
    return _capped(problems, "uneven fused groups")


def _treatment(action: Action) -> Action:
    """What of an action a runtime that fuses can tell: a tensor under another name is still a copy."""
    return Copy() if isinstance(action, Rename) else action


def _deed(each: Assignment) -> str:
    action = each.action
    return (
        f"{action.numerics} {action.block}"
        if isinstance(action, QuantizeBlock)
        else type(action).__name__.lower()
    )


def _capped(problems: Iterable[str], kind: str) -> list[str]:
    told = list(problems)
    more = len(told) - _SHOWN
    return told if more <= 0 else [*told[:_SHOWN], f"... and {more} more {kind}"]
