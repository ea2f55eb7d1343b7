"""The draft of a recipe: decisions put into TOML, planned at once, so that what is written is known to fit."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.module import is_further_part
from shardmill.pipeline.init.decide import Aim, Decision, axes_of, deals_kv, decide, fused, kv_heads, undone
from shardmill.pipeline.init.look import UNKNOWN, text_config
from shardmill.pipeline.init.names import by_pattern, globs_for, numbers
from shardmill.pipeline.init.vocabulary import NATIVE_FP8, Group, family_name
from shardmill.pipeline.init.write import (
    AliasText,
    FamilyText,
    FusedText,
    ParallelText,
    RecipeText,
    recipe_toml,
)
from shardmill.pipeline.plan.nothing import holds_already, why_nothing
from shardmill.pipeline.plan.plan import make_plan
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.profiles.child import FLOATS
from shardmill.pipeline.plan.profiles.modelopt import METHODS
from shardmill.pipeline.plan.profiles.truth import stated
from shardmill.pipeline.plan.profiles.unread import TRANSFORMERS, UnreadError
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.recipe.globs import fold
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.stages.classify import classify
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import BlockShape, Parent

_NATIVE_BLOCK = BlockShape(128, 128)


@dataclass(frozen=True, slots=True)
class RecipeDraft:
    """A recipe's text, the plan that it gives, and what a person should look at."""

    text: str
    plan: Plan
    unknown: tuple[str, ...]  # globs of what was kept because it is not known
    profile: str
    unread: str = (
        ""  # why not every loader of the profile can read the result: plan refuses until one is named
    )

    @property
    def share(self) -> float:
        """The part of the parent's tensor bytes that converts, 0 to 1."""
        converting = [family for family in self.plan.families if family.action not in ("keep", "drop")]
        whole = sum(family.bytes_before for family in self.plan.families)
        return sum(family.bytes_before for family in converting) / whole if whole else 0.0


def default_profile(parent: Parent, aim: Aim = "fp8") -> str:
    """The profile that suits a parent: its own where it is ModelOpt's, else the one most loaders read."""
    if aim not in ("fp8", "bf16"):
        spellings = formats()[aim].spellings if aim in formats() else ()
        return next((each.profile for each in reversed(spellings) if each.entry), "compressed-tensors")
    return "modelopt-mixed" if stated(parent.config).get("quant_method") in METHODS else "fp8"


def draft(
    parent: Parent,
    name: str,
    profile: str,
    aim: Aim = "fp8",
    repository: str | None = None,
    revision: str | None = None,
    must_convert: bool = False,
    lossless: bool = False,
) -> RecipeDraft:
    """The RecipeDraft for `parent`. Raises PlanError where even the draft doesn't fit, which is a fault of ours, and
    with `must_convert` where no weight would convert.
    """
    decisions = decide(parent, profile, aim, lossless)
    if must_convert:
        _refuse_nothing(decisions, parent, aim)
    patterns = by_pattern(parent.tensors)
    native = NATIVE_FP8.get(str(parent.config.get("model_type")), ())
    families = _families(decisions, patterns, native, profile, lossless)
    converting = [
        weight
        for weight, decision in decisions.items()
        if decision.block or (decision.to and not decision.source)
    ]
    recipe = RecipeText(
        name=name,
        model=str(parent.config.get("model_type") or "a model"),
        repository=repository,
        revision=revision,
        profile=profile,
        families=families,
        fused=_fused(parent),
        parallel=_parallel(parent, converting, patterns),
        aliases=_aliases(parent) if profile == "modelopt-mixed" else (),
    )
    plan, unread = _planned_for(parent, recipe)
    recipe = replace(
        recipe, loaders=tuple(each for each in PROFILES[profile].loaders if unread and each != TRANSFORMERS)
    )
    recipe = replace(recipe, unread=unread)
    sizes = tuple(at.tensor_parallel for at in plan.loads if at.reason is None)
    unknown = [glob for family in families if family.reason == UNKNOWN.reason for glob in family.match]
    return RecipeDraft(recipe_toml(recipe, sizes, plan), plan, tuple(unknown), profile, unread)


def _planned_for(parent: Parent, recipe: RecipeText) -> tuple[Plan, str]:
    """The plan, and why not every loader of the profile can read it; "" where all can."""
    try:
        return _planned(parent, recipe_toml(recipe, (1,), None)), ""
    except UnreadError as error:
        others = tuple(each for each in PROFILES[recipe.profile].loaders if each != TRANSFORMERS)
        return _planned(parent, recipe_toml(replace(recipe, loaders=others), (1,), None)), error.reason


def _refuse_nothing(decisions: Mapping[str, Decision], parent: Parent, aim: Aim) -> None:
    """Raises PlanError where no weight converts and the parent is not in the wanted format already."""
    if any(decision.converts for decision in decisions.values()) or holds_already(aim, parent.tensors):
        return
    sizes: dict[Decision, int] = defaultdict(int)
    for name, decision in decisions.items():
        sizes[decision] += parent.tensors[name].bytes
    largest, size = max(sizes.items(), key=lambda item: item[1], default=(Decision("nothing"), 0))
    sentence = f"{parent.folder}: 0 weights would convert to {aim}: {why_nothing(parent.tensors)}; "
    if aim != "bf16" and undone(parent, parent.tensors):
        raise PlanError([sentence + "`--to bf16` reads it: build that first, then draft from its result"])
    sentence += (
        f"the largest part is {largest.family!r} ({size:,} bytes): {largest.reason}; no recipe is written, write one "
        f"by hand to convert what init does not know"
    )
    raise PlanError([sentence])


def _planned(parent: Parent, text: str) -> Plan:
    recipe = Recipe.model_validate(tomllib.loads(text))
    return make_plan(recipe, parent, classify(Checkpoint(recipe, parent.folder), parent))


def _families(
    decisions: Mapping[str, Decision],
    patterns: Mapping[str, list[str]],
    native: Collection[str],
    profile: str,
    lossless: bool,
) -> tuple[FamilyText, ...]:
    """What converts first; a name that two decisions share gets a number. `native`: families that were block FP8."""
    members: dict[Decision, list[str]] = defaultdict(list)
    for tensor, decision in decisions.items():
        members[decision].append(tensor)
    seen: dict[str, int] = defaultdict(int)
    families = []
    for decision, tensors in sorted(members.items(), key=lambda item: item[0].reason is not None):
        called = family_name(decision.family, tensors)
        seen[called] += 1
        number = f" {seen[called]}" if seen[called] > 1 else ""
        families.append(
            FamilyText(
                name=called + number,
                match=tuple(globs_for(tensors, patterns)),
                block=(decision.block.rows, decision.block.cols) if decision.block else None,
                source_block=(decision.source_block.rows, decision.source_block.cols)
                if decision.source_block
                else None,
                expect=_weights(decision, tensors),
                to=decision.to,
                source=decision.source,
                drop=decision.drop,
                transposed=decision.transposed,
                unstack=decision.unstack,
                lossless=lossless and bool(decision.source),
                reason=decision.reason,
                **_numerics(decision, decision.family in native, profile),
            )
        )
    return tuple(families)


def _numerics(decision: Decision, native: bool, profile: str) -> dict[str, str]:
    """The law that a family is given, where it is not the format's first, and why."""
    fresh = not decision.source and (decision.to or decision.block)  # codes are chosen, none are kept
    spelling = formats()[decision.to or "fp8-block"].spelling(profile) if fresh else None
    if spelling and spelling.drafted:
        return {"numerics": spelling.drafted}
    if native and decision.block == _NATIVE_BLOCK:
        return {"numerics": "recover/1", "why_numerics": "the published base is block FP8"}
    return {}


def _weights(decision: Decision, tensors: Iterable[str]) -> int:
    """How many weights a family holds: scales and other further parts are not counted."""
    if decision.source:
        form = formats()[decision.source]
        return sum(not is_further_part(tensor, form) for tensor in tensors)
    if decision.to:
        return len(list(tensors))
    return sum(tensor.endswith(".weight") for tensor in tensors)


def _fused(parent: Parent) -> tuple[FusedText, ...]:
    """One table for each kind of place; where only some layers have the group, they are listed.

    Groups that are kept are listed as well: a profile that lists what is unquantized lists them by their fused names.
    """
    places: dict[tuple[Group, str], list[str]] = defaultdict(list)
    floats = (name for name, ref in parent.tensors.items() if ref.dtype in FLOATS)
    for instance in fused(parent, floats):
        if not instance.missing:
            places[(instance.group, fold(instance.home))].append(instance.home)
    homes = by_pattern(
        dict.fromkeys(weight.rpartition(".")[0].rpartition(".")[0] for weight in parent.tensors)
    )
    return tuple(
        FusedText(group.name, f"{glob}.{_members(group)}.weight", group.runtime_names)
        for (group, pattern), at in places.items()
        for glob in globs_for(at, {pattern: _with_a_member(homes[pattern], group, parent)})
    )


def _with_a_member(homes: Iterable[str], group: Group, parent: Parent) -> list[str]:
    """Places where a glob for the group's members would match something."""
    tensors = parent.tensors
    return [home for home in homes if any(f"{home}.{member}.weight" in tensors for member in group.members)]


def _members(group: Group) -> str:
    """`{q,k,v}_proj`, in the runtime's order."""
    end = "_proj" if all(member.endswith("_proj") for member in group.members) else ""
    return "{" + ",".join(member.removesuffix(end) for member in group.members) + "}" + end


def _parallel(
    parent: Parent, converting: list[str], patterns: Mapping[str, list[str]]
) -> tuple[ParallelText, ...]:
    kv = kv_heads(parent)
    split: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for weight, axis in axes_of(converting).items():
        split[(axis, kv if axis == "rows" and deals_kv(weight) else None)].append(weight)
    return tuple(
        ParallelText(axis, shares, tuple(globs_for(weights, patterns)))
        for (axis, shares), weights in sorted(
            split.items(), key=lambda item: (item[0][0] != "rows", item[0][1] or 0)
        )
    )


def _aliases(parent: Parent) -> tuple[AliasText, ...]:
    """A draft model's layers, which lie behind the last of the model; vLLM builds them as `model.layers.N`."""
    layers = text_config(parent.config).get("num_hidden_layers")
    prefixes = {
        f"{head}.layers.{numbers(name)[0]}."
        for name in parent.tensors
        if (head := name.partition(".layers.")[0]) not in ("model", name) and isinstance(layers, int)
        if fold(name).startswith(f"{head}.layers.*.") and numbers(name)[0] >= layers
    }
    return tuple(
        AliasText(prefix, "model.layers." + prefix.partition(".layers.")[2]) for prefix in sorted(prefixes)
    )
