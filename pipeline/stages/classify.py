"""Stage `classify`: every tensor of the parent gets exactly one family, and with it one action.

The order of the rules never matters: two that match one tensor are an error, as is none. What is not understood
is refused, all problems at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kernels.block_fp8 import RECIPES
from pipeline import fp8_source
from pipeline.errors import PlanError
from pipeline.globs import GlobSet, fused_instances, nearest
from pipeline.job import Checkpoint
from pipeline.profiles import PROFILES
from pipeline.recipe import Family, Fused, Recipe
from pipeline.types import Assignment, Dequantise, Drop, Parent, QuantizeBlock, Reblock, TensorRef

_SHOWN = 5  # problems of one kind that are told in full
_FLOATS = frozenset({"BF16", "F16", "F32"})


def classify(checkpoint: Checkpoint, headers: Parent) -> tuple[Assignment, ...]:
    """One Assignment a tensor, in the parent's order. Raises PlanError with every problem found."""
    recipe = checkpoint.recipe
    families = {family.name: family for family in recipe.family}
    suffix = PROFILES[recipe.output.profile].scale_suffix
    owners = _owners(recipe.family, headers)
    problems = _unmatched_globs(recipe, headers) + _unknown_numerics(recipe.family)
    assignments = []
    for ref in headers.tensors.values():
        owner = owners[ref.name]
        if len(owner) == 1:
            assignments.append(_assigned(ref, families[owner[0]], suffix, headers))
    problems += _capped(_ambiguities(owners), "tensors without exactly one family")
    problems += _counts(recipe.family, assignments)
    problems += _capped(_unfit(assignments, headers), "tensors that cannot be converted")
    problems += _capped(_orphans(families, assignments), "scales that would be consumed")
    problems += _uneven(recipe.fused, {each.source.name: each for each in assignments})
    if problems:
        raise PlanError(problems)
    return tuple(assignments)


def _owners(families: Sequence[Family], parent: Parent) -> dict[str, list[str]]:
    """For each tensor the names of the families that match it."""
    rows = [(glob, family.name) for family in families for glob in family.globs()]
    globs = GlobSet([glob for glob, _ in rows])
    owner_of = [name for _, name in rows]
    return {
        name: list(dict.fromkeys(owner_of[place] for place in globs.matches(name))) for name in parent.tensors
    }


def _assigned(ref: TensorRef, family: Family, scale_suffix: str, parent: Parent) -> Assignment:
    action = family.deed(ref, scale_suffix)
    reads_scales = isinstance(action, Dequantise | Reblock)
    scales = fp8_source.scales_of(ref, parent.tensors) if reads_scales else None
    return Assignment(ref, family.name, action, scales)


def _unknown_numerics(families: Sequence[Family]) -> list[str]:
    return [
        f"family {family.name!r}: the numerics {family.numerics!r} are not known; they are {', '.join(RECIPES)}"
        for family in families
        if family.numerics not in RECIPES
    ]


def _unmatched_globs(recipe: Recipe, parent: Parent) -> list[str]:
    rows = [(f"family {table.name!r}", glob) for table in recipe.family for glob in table.globs()]
    rows += [(f"fused group {table.name!r}", glob) for table in recipe.fused for glob in table.globs()]
    rows += [(f"parallel {table.axis!r}", glob) for table in recipe.parallel for glob in table.globs()]
    globs = GlobSet([glob for _, glob in rows])
    used = {place for name in parent.tensors for place in globs.matches(name)}
    return [
        f"{where}: the glob {glob!r} matches no tensor of the parent{_hint(glob, parent)}"
        for place, (where, glob) in enumerate(rows)
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
        elif isinstance(each.action, Dequantise | Reblock):
            reason = fp8_source.why_unfit(each, families)
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
            "already quantised or packed"
            if ref.dtype in ("U8", "I8", "F4") or ref.dtype[:2] == "F8"
            else "no float"
        )
        return f"is {ref.dtype}, {kind}; only {', '.join(sorted(_FLOATS))} can be quantised, keep it"
    if len(ref.shape) != 2 or 0 in ref.shape:
        return f"has shape {list(ref.shape)}; only matrices [rows, columns] can be quantised, keep it"
    scale = ref.name + action.scale_suffix
    if scale in parent.tensors:
        return f"the parent holds {scale} already; keep both, or drop the scale"
    return None


def _uneven(groups: Sequence[Fused], assigned: Mapping[str, Assignment]) -> list[str]:
    """Fused groups of which a member is missing or treated otherwise than the rest."""
    problems: list[str] = []
    for group in groups:
        members = group.globs()
        for instance, present in fused_instances(members, assigned).items():
            where = f"fused group {group.name!r} at {', '.join(instance) or 'the top'}"
            if absent := [glob for glob in members if glob not in present]:
                problems.append(
                    f"{where}: {_filled(absent[0], instance)} is missing, so the group can't be fused"
                )
            deeds = {assigned[name].action for name in present.values() if name in assigned}
            if len(deeds) > 1:
                problems.append(
                    f"{where}: its members are treated differently "
                    f"({'; '.join(f'{name}: {_deed(assigned[name])}' for name in present.values())}); "
                    f"a runtime fuses them, so give all of them one family"
                )
    return _capped(problems, "uneven fused groups")


def _filled(glob: str, values: Sequence[str]) -> str:
    for value in values:
        glob = glob.replace("**" if "**" in glob else "*", value, 1)
    return glob


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
