"""Stage `classify`: every tensor of the parent gets exactly one family, and with it one action.

The order of the rules never matters: two that match one tensor are an error, as is none. What is not understood
is refused, all problems at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardmill.kernels.block_fp8 import RECIPES
from shardmill.pipeline.actions import ACTIONS, Action, Copy
from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.plan.mismatch import mismatch
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.types import Assignment, changed
from shardmill.pipeline.recipe.globs import GlobSet, filled, fused_instances, nearest
from shardmill.pipeline.recipe.tables import Family, Fused, Parallel, Recipe
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.stages.origins import mixed_origins
from shardmill.pipeline.stages.pairs import torn_pairs
from shardmill.pipeline.types import Parent, TensorRef

_COPY, _FAMILY = Copy(), attrgetter("family")
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
    places = GlobSet([row.glob for row in rows]).places(parent.tensors)
    # What follows from the globs that match a name is found once for all names that they don't tell apart.
    lists = {id(at): at for at in places}
    kinds = {key: _kind(rows, at) for key, at in lists.items()}
    if sentence := mismatch(recipe, parent, {name for kind in kinds.values() for name in kind.families}):
        raise PlanError([sentence])
    problems = _capped(_unmatched_globs(rows, lists.values(), parent), "globs that match nothing")
    problems += _unknown_numerics(recipe.family)
    kept = {name for name, family in families.items() if family.action == Copy.name}
    assigned = {
        ref.name: Assignment(ref, family, _COPY)
        if family in kept
        else _assigned(ref, family, choosers[family](ref), parent.tensors)
        for ref, at in zip(parent.tensors.values(), places, strict=True)
        if (family := kinds[id(at)].family)
    }
    assignments = tuple(assigned.values())
    differing = changed(assignments)
    odd = {key for key, kind in kinds.items() if kind.family is None or len(kind.tables) > 1}
    of_odd = {name: kinds[id(at)] for name, at in zip(parent.tensors, places, strict=True) if id(at) in odd}
    problems += _capped(_ambiguities(of_odd), "tensors without exactly one family")
    problems += _counts(recipe.family, assignments, differing)
    problems += _capped(_split_twice(of_odd), "weights that two [[parallel]] tables match")
    problems += _capped(_unfit(differing, assigned, parent), "tensors that cannot be converted")
    problems += _capped(torn_pairs(assignments, parent.tensors), "tensors without what they belong to")
    problems += _capped(mixed_origins(assignments, recipe.fused, parent), "weights of two checkpoints")
    problems += _capped(_orphans(families, differing), "scales that would be consumed")
    fused = {key for key, kind in kinds.items() if kind.is_fused}
    members = [name for name, at in zip(parent.tensors, places, strict=True) if id(at) in fused]
    problems += _uneven(recipe.fused, {name: assigned[name] for name in members if name in assigned})
    if problems:
        raise PlanError(problems)
    if not any(each.action.surveys for each in differing):
        return assignments
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
        yield each._replace(reads=(*each.reads, *more)) if more else each


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


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows that match a tensor's name say of it."""

    family: str | None  # where exactly one matches
    families: tuple[str, ...]
    tables: tuple[Parallel, ...]
    is_fused: bool


def _kind(rows: Sequence[_Row], at: Sequence[int]) -> _Kind:
    found = [rows[place] for place in at]
    families = tuple(dict.fromkeys(row.family for row in found if row.family))
    tables = {id(row.parallel): row.parallel for row in found if row.parallel}
    is_fused = any(row.family is None and row.parallel is None for row in found)
    return _Kind(families[0] if len(families) == 1 else None, families, tuple(tables.values()), is_fused)


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


def _unmatched_globs(rows: Sequence[_Row], matched: Iterable[Sequence[int]], parent: Parent) -> list[str]:
    used = {place for places in matched for place in places}
    return [
        f"{row.where}: the glob {row.glob!r} matches no tensor of the parent{_hint(row.glob, parent)}"
        for place, row in enumerate(rows)
        if place not in used
    ]


def _hint(glob: str, parent: Parent) -> str:
    close = nearest(glob, parent.tensors)
    return f"; the nearest names are {', '.join(close)}" if close else "; remove it or correct it"


def _ambiguities(kinds: Mapping[str, _Kind]) -> Iterable[str]:
    for name, kind in kinds.items():
        if not kind.families:
            yield f"{name}: no family matches it; add it to one, with action 'keep' and a reason if it is to stay"
        elif kind.family is None:
            both = " and ".join(map(repr, kind.families))
            yield f"{name}: the families {both} both match it; narrow one"


def _split_twice(kinds: Mapping[str, _Kind]) -> Iterable[str]:
    """Weights that two [[parallel]] tables match: which of them holds must not depend on their order."""
    for name, kind in kinds.items():
        if len(kind.tables) > 1:
            sides = " and ".join(repr(table.axis) for table in kind.tables)
            yield f"{name}: two [[parallel]] tables match it ({sides}); narrow one"


def _counts(
    families: Sequence[Family], assignments: Sequence[Assignment], differing: Sequence[Assignment]
) -> list[str]:
    """Families whose number of tensors is another than expected; scales that a conversion consumes don't count."""
    consuming = {family.name for family in families if ACTIONS[family.action].consumes_scales}
    found = Counter(map(_FAMILY, assignments))
    found -= Counter(
        each.family for each in differing if each.action.kind == "drop" and each.family in consuming
    )
    return [
        f"family {family.name!r}: expects {family.expect} tensors, the parent has {found[family.name]}; "
        f"correct its globs or its count"
        for family in families
        if family.expect is not None and family.expect != found[family.name]
    ]


def _unfit(
    differing: Iterable[Assignment], assigned: Mapping[str, Assignment], parent: Parent
) -> Iterable[str]:
    """differing: those of `assigned`, by the parent's tensors, that don't copy; a copy fits whatever there is."""
    for each in differing:
        reason = (
            each.action.why_unfit(each.source, parent.tensors)
            or _why_scales_stay(each, assigned)
            or _why_scales_collide(each, assigned)
        )
        if reason:
            yield f"{each.source.name} in {each.source.shard}: {reason}"


def _why_scales_stay(each: Assignment, assigned: Mapping[str, Assignment]) -> str | None:
    """Scales that an action consumes must belong to the weight's own family."""
    if each.scales is None:
        return None
    other = assigned.get(each.scales.name)
    if other and other.family == each.family:
        return None
    return (
        f"its scales {each.scales.name} are not in its family {each.family!r}; add them to the family's globs"
    )


def _why_scales_collide(each: Assignment, assigned: Mapping[str, Assignment]) -> str | None:
    """New scales must not get the name of a tensor that the parent has and the child keeps."""
    for name, _, _, part in each.action.outputs(each.source) if each.action.encodes else ():
        if part == "scales" and name in assigned and assigned[name].action.kind == "copy":
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
