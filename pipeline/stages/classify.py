"""Stage `classify`: every tensor of the parent gets exactly one family, and with it one action.

The order of the rules never matters: two that match one tensor are an error, as is none. What is not understood
is refused, all problems at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardmill.kernels.block_fp8 import RECIPES
from shardmill.pipeline.actions import ACTIONS, Action
from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.plan.alike import alike
from shardmill.pipeline.plan.mismatch import mismatch
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.types import Assignment
from shardmill.pipeline.recipe.globs import GlobSet, filled, fused_instances, nearest
from shardmill.pipeline.recipe.tables import Family, Fused, Parallel, Recipe
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.stages.origins import mixed_origins
from shardmill.pipeline.stages.pairs import torn_pairs
from shardmill.pipeline.types import Parent, TensorRef

_SHOWN = 5  # problems of one kind that are listed


def classify(checkpoint: Checkpoint, parent: Parent) -> tuple[Assignment, ...]:
    """One Assignment a tensor, in the parent's order. Raises PlanError with every problem found."""
    recipe = checkpoint.recipe
    families = {family.name: family for family in recipe.family}
    profile = PROFILES.get(recipe.output.profile)
    if profile is None:
        choices = ", ".join(sorted(PROFILES))
        said = f"{recipe.output.profile!r} is no profile; choose from {choices}"
        raise RecipeError([recipe.problem_at(("output", "profile"), said)])
    choosers = {name: family.chooser(profile.scale_suffix, profile.name) for name, family in families.items()}
    rows = _rows(recipe)
    globs = GlobSet([row.glob for row in rows])
    matched = {name: globs.matches(name) for name in parent.tensors}
    owner_of = [row.family for row in rows]
    # Names that a set of globs can't tell apart have one list of places, so their families are found once.
    found = {
        id(at): list(dict.fromkeys(filter(None, map(owner_of.__getitem__, at)))) for at in matched.values()
    }
    owners = {name: found[id(at)] for name, at in matched.items()}
    if sentence := mismatch(recipe, parent, owners):
        raise PlanError([sentence])
    problems = _capped(
        _unmatched_globs(rows, matched, parent), "globs that match nothing"
    ) + _unknown_numerics(recipe.family)
    assignments = []
    for ref in parent.tensors.values():
        owner = owners[ref.name]
        if len(owner) == 1:
            assignments.append(_assigned(ref, owner[0], choosers[owner[0]](ref), parent.tensors))
    problems += _capped(_ambiguities(owners), "tensors without exactly one family")
    problems += _counts(recipe.family, assignments)
    problems += _capped(_split_twice(rows, matched), "weights that two [[parallel]] tables match")
    problems += _capped(alike(_unfit(assignments, parent)), "reasons not to convert")
    problems += _capped(torn_pairs(assignments, parent.tensors), "tensors without what they belong to")
    problems += _capped(mixed_origins(assignments, recipe.fused, parent), "weights of two checkpoints")
    problems += _capped(_orphans(families, assignments), "scales that would be consumed")
    groups = {place for place, owner in enumerate(owner_of) if owner is None}
    grouped = {name for name, at in matched.items() if not groups.isdisjoint(at)}
    problems += _uneven(
        recipe.fused, {each.source.name: each for each in assignments if each.source.name in grouped}
    )
    if problems:
        raise PlanError(problems)
    if not any(action.surveys for action in {id(each.action): each.action for each in assignments}.values()):
        return tuple(assignments)
    return tuple(_with_partners(assignments, recipe.fused))


def _with_partners(assignments: Sequence[Assignment], groups: Sequence[Fused]) -> Iterable[Assignment]:
    """Weights of a format that is surveyed read their fused group: one number must hold for all of it."""
    surveyed = {each.source.name: each for each in assignments if each.action.surveys}
    partners: dict[str, list[TensorRef]] = {}
    for group in groups if surveyed else ():
        for present in fused_instances(group.globs(), surveyed).values():
            for name in present.values():
                others = [surveyed[other] for other in present.values() if other != name]
                partners[name] = [ref for other in others for ref in (other.source, *other.reads)]
    for each in assignments:
        more = partners.get(each.source.name, [])
        yield replace(each, reads=(*each.reads, *more)) if more else each


@dataclass(frozen=True, slots=True)
class _Row:
    """A glob of the recipe, what it belongs to, and the family or the [[parallel]] table of its tensors, if any."""

    where: str
    glob: str
    family: str | None = None
    parallel: Parallel | None = None


def _rows(recipe: Recipe) -> list[_Row]:
    rows = [
        _Row(f"family {table.name!r}", glob, table.name) for table in recipe.family for glob in table.globs()
    ]
    rows += [_Row(f"fused group {table.name!r}", glob) for table in recipe.fused for glob in table.globs()]
    return rows + [
        _Row(f"parallel {table.axis!r}", glob, parallel=table)
        for table in recipe.parallel
        for glob in table.globs()
    ]


def _assigned(ref: TensorRef, family: str, action: Action, tensors: Mapping[str, TensorRef]) -> Assignment:
    if action.kind == "copy":
        return Assignment(ref, family, action)
    return Assignment(ref, family, action, action.scales(ref, tensors), action.reads(ref, tensors))


def _unknown_numerics(families: Sequence[Family]) -> list[str]:
    return [
        f"family {family.name!r}: the numerics {family.numerics!r} are not known; choose from {', '.join(RECIPES)}"
        for family in families
        if ACTIONS[family.action].encodes and family.numerics not in (None, *RECIPES)
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


def _split_twice(rows: Sequence[_Row], matched: Mapping[str, list[int]]) -> Iterable[str]:
    """Weights that two [[parallel]] tables match: which of them holds must not depend on their order."""
    tables = [row.parallel for row in rows]
    for name, places in matched.items():
        if len(places) < 2:
            continue
        found = {id(table): table for place in places if (table := tables[place])}
        if len(found) > 1:
            sides = " and ".join(repr(table.axis) for table in found.values())
            yield f"{name}: two [[parallel]] tables match it ({sides}); narrow one"


def _counts(families: Sequence[Family], assignments: Sequence[Assignment]) -> list[str]:
    """Families whose number of tensors is another than expected; scales that a conversion consumes don't count."""
    consuming = {family.name for family in families if ACTIONS[family.action].consumes_scales}
    found = Counter(
        each.family for each in assignments if not (each.family in consuming and each.action.kind == "drop")
    )
    return [
        f"family {family.name!r}: expects {family.expect} tensors, the parent has {found[family.name]}; "
        f"correct its globs or its count"
        for family in families
        if family.expect is not None and family.expect != found[family.name]
    ]


def _unfit(assignments: Sequence[Assignment], parent: Parent) -> Iterable[tuple[str, str]]:
    """(tensor, reason) of each that its action does not fit."""
    families = {each.source.name: each.family for each in assignments}
    actions = {each.source.name: each.action for each in assignments}
    for each in assignments:
        if each.action.kind == "copy":
            continue  # it fits whatever there is
        reason = (
            each.action.why_unfit(each.source, parent.tensors)
            or _why_scales_stay(each, families)
            or _why_scales_collide(each, actions)
        )
        if reason:
            yield f"{each.source.name} in {each.source.shard}", reason


def _why_scales_stay(each: Assignment, families: Mapping[str, str]) -> str | None:
    """Scales that an action consumes must belong to the weight's own family. families: parent tensor -> its family."""
    if each.scales is None or families.get(each.scales.name) == each.family:
        return None
    return (
        f"its scales {each.scales.name} are not in its family {each.family!r}; add them to the family's globs"
    )


def _why_scales_collide(each: Assignment, actions: Mapping[str, Action]) -> str | None:
    """New scales must not get the name of a tensor that the parent has and the child keeps."""
    for name, _, _, part in each.action.outputs(each.source) if each.action.encodes else ():
        if part == "scales" and name in actions and actions[name].kind == "copy":
            return f"the parent holds {name} already; keep both, or drop the scale"
    return None


def _orphans(families: Mapping[str, Family], assignments: Sequence[Assignment]) -> Iterable[str]:
    """Scales in a family that consumes them, whose weight is elsewhere and would be left without."""
    read = {each.scales.name for each in assignments if each.scales}
    read |= {ref.name for each in assignments for ref in each.reads}
    consuming = {name for name, family in families.items() if ACTIONS[family.action].consumes_scales}
    for each in assignments:
        name = each.source.name
        if each.action.kind == "drop" and each.family in consuming and name not in read:
            yield f"{name}: would be consumed by the family {each.family!r}, which does not hold its weight"


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
            actions = {name: assigned[name].action for name in present.values()}
            if len({action.as_fused() for action in actions.values()}) > 1:
                problems.append(
                    f"{where}: its members get different actions "
                    f"({'; '.join(f'{name}: {action.words()}' for name, action in actions.items())}); "
                    f"a runtime fuses them, so give all of them one family"
                )
    return _capped(problems, "uneven fused groups")


def _capped(problems: Iterable[str], kind: str) -> list[str]:
    found = list(problems)
    more = len(found) - _SHOWN
    return found if more <= 0 else [*found[:_SHOWN], f"... and {more} more {kind}"]
