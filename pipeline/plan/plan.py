"""The plan: assignments -> every output file, whole but for its data. Pure: no file, clock, environment or chance.

Each shard is rewritten in place: same file name, a weight's scale in the weight's file. What need not change is
passed on whole, so that an unchanged file keeps its name, bytes and digest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmill.pipeline.actions import Conversion, Part
from shardmill.pipeline.container.header import lay_out
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.plan.keys import shard_key
from shardmill.pipeline.plan.nothing import nothing_done
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.profiles.child import Child
from shardmill.pipeline.plan.profiles.follow import follow
from shardmill.pipeline.plan.profiles.truth import one_truth
from shardmill.pipeline.plan.profiles.unread import refuse_unread
from shardmill.pipeline.plan.readme import child_readme
from shardmill.pipeline.plan.tensor_parallel import loads_at, refuse_unloadable
from shardmill.pipeline.plan.types import Assignment, Piece, Plan, ShardPlan
from shardmill.pipeline.recipe.tables import Recipe, standard_stages
from shardmill.pipeline.types import FamilySummary, Header, Parent, TensorRef, tensor_bytes

_LIBRARY_METADATA = {
    "format": "pt"
}  # of a rewritten file that states no format: transformers 4 refuses it without


def make_plan(recipe: Recipe, parent: Parent, assignments: Sequence[Assignment]) -> Plan:
    """The Plan for `parent`, whose tensors are `assignments`. Raises PlanError where the result could not load."""
    _refuse_collisions(assignments)
    by_shard: dict[str, list[Assignment]] = defaultdict(list)
    for each in assignments:
        by_shard[each.source.shard].append(each)
    shards = tuple(
        shard for header in parent.headers if (shard := _shard(header, by_shard[header.shard])) is not None
    )
    converted = {
        name: (each.family, each.action)
        for each in assignments
        if isinstance(each.action, Conversion)
        for name in each.action.mains(each.source)
    }
    units = {
        name: each.action.unit(each.source)
        for each in assignments
        if isinstance(each.action, Conversion)
        for name in each.action.mains(each.source)
    }
    loads = tuple(loads_at(recipe, assignments))
    refuse_unloadable(recipe, loads)
    outputs = {ref.name: ref for shard in shards for ref in shard.header.tensors}
    followed = follow(parent.config, _renamed(assignments), parent.tensors, outputs)
    child = Child(recipe, followed, outputs, {name: action for name, (_, action) in converted.items()})
    profile = PROFILES[recipe.output.profile]
    if problems := [*profile.problems(child), *nothing_done(recipe, parent, assignments)]:
        raise PlanError(problems)
    refuse_unread(child, profile.name, profile.loaders)
    config, entries = profile.declare(child)
    config = one_truth(config, child, parent.tensors)
    config_text = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    beside = profile.beside(config)
    families = _families(recipe, assignments)
    rewritten = [shard.file for shard in shards if shard.rewritten]
    without_key = child_readme(recipe, parent, families, "", rewritten, len(shards))
    key = key_of(
        {
            "recipe": recipe.name,
            "parent": [recipe.parent.repository, recipe.parent.revision],
            "shards": [shard.key for shard in shards],
            "config": key_of(config_text.decode()),
            **({"beside": {name: key_of(data.decode()) for name, data in beside.items()}} if beside else {}),
            "readme": key_of(without_key.decode()),
            "carried": list(parent.carried),
            **_own_stages(recipe),
        }
    )
    return Plan(
        recipe=recipe.name,
        repository=recipe.parent.repository,
        revision=recipe.parent.revision,
        shards=shards,
        weight_map={name: ref.shard for name, ref in sorted(outputs.items())},
        config=config_text,
        config_entries=entries,
        beside=beside,
        readme=child_readme(recipe, parent, families, key, rewritten, len(shards)),
        conversions=converted,
        units={name: (unit.rows, unit.cols) for name, unit in units.items()},
        dropped=_dropped(assignments, outputs),
        renamed=_renamed(assignments),
        repairs=tuple({"repair": "input_scales/1", "file": file} for file in sorted(parent.replaced)),
        carried=parent.carried,
        single=parent.single,
        families=families,
        loads=loads,
        key=key,
    )


def _own_stages(recipe: Recipe) -> dict[str, Any]:
    """The order of the stages, where the recipe gives another than the standard one."""
    needs = {name: sorted(table.needs) for name, table in recipe.stages.items()}
    standard = standard_stages(family.action for family in recipe.family)
    usual = {name: sorted(table["needs"]) for name, table in standard.items()}
    return {} if needs == usual else {"stages": needs}


def _refuse_collisions(assignments: Iterable[Assignment]) -> None:
    """Two tensors of the parent must not come out under one name."""
    maker: dict[str, str] = {}
    problems = []
    for each in assignments:
        for name, *_ in each.action.outputs(each.source):
            if name == "__metadata__" or not name:
                problems.append(
                    f"{each.source.name}: would be named {name!r}, which no library reads; choose another"
                )
            if name in maker:
                problems.append(
                    f"{name}: would be made twice, from {maker[name]} and from {each.source.name}"
                )
            maker[name] = each.source.name
    if problems:
        raise PlanError(problems)


def _dropped(assignments: Iterable[Assignment], outputs: Mapping[str, TensorRef]) -> tuple[str, ...]:
    """Parent tensors that the child lacks. Scales that were replaced by others of the same name are not among them."""
    gone = (each.source.name for each in assignments if each.action.kind == "drop")
    return tuple(sorted(name for name in gone if name not in outputs))


def _renamed(assignments: Iterable[Assignment]) -> dict[str, str]:
    """Parent tensor -> output tensor, of those that move, and of weights whose codes bear another name."""
    moved = {}
    for each in assignments:
        if each.action.kind in ("move", "convert"):
            name = each.action.outputs(each.source)[0][0]
            if name != each.source.name:
                moved[each.source.name] = name
    return moved


def _shard(header: Header, assignments: Sequence[Assignment]) -> ShardPlan | None:
    """The plan of one output file; None where nothing of the parent's file is left."""
    rewritten = any(each.action.kind != "copy" for each in assignments)
    outputs = {
        name: (each, part, dtype, shape)
        for each in assignments
        for name, dtype, shape, part in each.action.outputs(each.source)
    }
    if not outputs:
        return None
    layout = (
        lay_out(
            ((name, dtype, shape) for name, (_, _, dtype, shape) in outputs.items()),
            header.shard,
            {**_LIBRARY_METADATA, **header.metadata},
        )
        if rewritten
        else header
    )
    pieces = tuple(_piece(ref, *outputs[ref.name][:2]) for ref in layout.tensors)
    read = [ref for each in assignments for ref in (each.scales, *each.reads) if ref]
    inputs = {header.shard: None, **{ref.shard: None for ref in read}}
    key = shard_key(header, layout, assignments)
    return ShardPlan(header.shard, layout, pieces, tuple(inputs), rewritten, key)


def _piece(ref: TensorRef, each: Assignment, part: Part) -> Piece:
    return Piece(ref, each.source, part, each.action, each.scales, each.reads)


def _families(recipe: Recipe, assignments: Iterable[Assignment]) -> tuple[FamilySummary, ...]:
    members: dict[str, list[Assignment]] = defaultdict(list)
    for each in assignments:
        members[each.family].append(each)
    return tuple(
        FamilySummary(
            name=family.name,
            action=family.action,
            reason=family.reason,
            tensors=len(members[family.name]),
            bytes_before=sum(each.source.bytes for each in members[family.name]),
            bytes_after=_bytes_of(members[family.name], ("bytes", "codes", "values")),
            scale_bytes=_bytes_of(members[family.name], ("scales",)),
            block=family.block,
        )
        for family in recipe.family
    )


def _bytes_of(assignments: Iterable[Assignment], parts: tuple[str, ...]) -> int:
    return sum(
        tensor_bytes(dtype, shape)
        for each in assignments
        for _, dtype, shape, part in each.action.outputs(each.source)
        if part in parts
    )


def plan_json(plan: Plan, parent: Parent) -> dict[str, Any]:
    """The plan as `shardmill plan --json` prints it; the same for the same recipe and headers."""
    return {
        "parent": {
            "files": len(parent.headers),
            "tensors": len(parent.tensors),
            "tensor_bytes": parent.tensor_bytes,
            "file_bytes": parent.file_bytes,
        },
        "output": {
            "files": len(plan.shards),
            "tensors": plan.tensors,
            "tensor_bytes": plan.tensor_bytes,
            "file_bytes": plan.file_bytes,
        },
        "converted": len(plan.conversions),
        "families": {
            family.name: {
                "action": family.action,
                "tensors": family.tensors,
                "bytes_before": family.bytes_before,
                "bytes_after": family.bytes_after,
                "scale_bytes": family.scale_bytes,
                "block": list(family.block) if family.block else None,
                "reason": family.reason,
            }
            for family in plan.families
        },
        "files_rewritten": [shard.file for shard in plan.shards if shard.rewritten],
        "config_entries": plan.config_entries,
        "loads_at": {str(at.tensor_parallel): at.reason or "yes" for at in plan.loads},
        "dropped": list(plan.dropped),
        "side_files": {
            "passed_on": {name: parent.stats[name][0] for name in parent.carried},
            "left": {
                name: {"bytes": each.bytes, "reason": each.reason} for name, each in parent.left.items()
            },
        },
        "key": plan.key,
    }
