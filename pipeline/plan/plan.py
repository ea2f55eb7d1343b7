"""The plan: assignments -> every output file, whole but for its data. Pure: no file, clock, environment or chance.

Each shard is rewritten in place: same file name, a weight's scale in the weight's file. What need not change is
passed on whole, so that an unchanged file keeps its name, bytes and digest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmill.pipeline.container.header import lay_out
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.profiles.child import Child
from shardmill.pipeline.plan.readme import child_readme
from shardmill.pipeline.recipe.globs import GlobSet, fused_instances
from shardmill.pipeline.recipe.read import Parallel, Recipe
from shardmill.pipeline.types import (
    Assignment,
    BlockShape,
    Conversion,
    Copy,
    Drop,
    FamilySummary,
    Header,
    LoadsAt,
    Parent,
    Part,
    Piece,
    Plan,
    Reconcile,
    Rename,
    ShardPlan,
    TensorRef,
    ToBlocks,
    tensor_bytes,
)

TENSOR_PARALLEL_TOLD = (1, 2, 4, 8)


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
        each.source.name: (each.family, each.action)
        for each in assignments
        if isinstance(each.action, Conversion)
    }
    loads = tuple(_loads(recipe, assignments))
    _refuse_unloadable(recipe, loads)
    outputs = {ref.name: ref for shard in shards for ref in shard.header.tensors}
    child = Child(recipe, parent.config, outputs, {name: deed for name, (_, deed) in converted.items()})
    profile = PROFILES[recipe.output.profile]
    if problems := list(profile.problems(child)):
        raise PlanError(problems)
    config, entries = profile.declare(child)
    config_text = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    families = _families(recipe, assignments)
    key = key_of(
        {
            "recipe": recipe.name,
            "parent": [recipe.parent.repository, recipe.parent.revision],
            "shards": [shard.key for shard in shards],
            "config": key_of(config_text.decode()),
            "carried": list(parent.carried),
        }
    )
    readme = child_readme(
        recipe, families, key, [shard.file for shard in shards if shard.rewritten], len(shards)
    )
    return Plan(
        recipe=recipe.name,
        repository=recipe.parent.repository,
        revision=recipe.parent.revision,
        shards=shards,
        weight_map={name: ref.shard for name, ref in sorted(outputs.items())},
        config=config_text,
        config_entries=entries,
        readme=readme,
        conversions=converted,
        dropped=_dropped(assignments, outputs),
        renamed={
            each.source.name: each.action.name for each in assignments if isinstance(each.action, Rename)
        },
        repairs=tuple({"repair": "input_scales/1", "file": file} for file in sorted(parent.replaced)),
        carried=parent.carried,
        single=parent.single,
        families=families,
        loads=loads,
        key=key,
    )


def _refuse_collisions(assignments: Iterable[Assignment]) -> None:
    """Two tensors of the parent must not come out under one name."""
    maker: dict[str, str] = {}
    problems = []
    for each in assignments:
        for name, *_ in each.action.outputs(each.source):
            if name in maker:
                problems.append(
                    f"{name}: would be made twice, from {maker[name]} and from {each.source.name}"
                )
            maker[name] = each.source.name
    if problems:
        raise PlanError(problems)


def _dropped(assignments: Iterable[Assignment], outputs: Mapping[str, TensorRef]) -> tuple[str, ...]:
    """Parent tensors that the child lacks. Scales that were replaced by others of the same name are not among them."""
    gone = (each.source.name for each in assignments if isinstance(each.action, Drop))
    return tuple(sorted(name for name in gone if name not in outputs))


def _shard(header: Header, assignments: Sequence[Assignment]) -> ShardPlan | None:
    """The plan of one output file; None where nothing of the parent's file is left."""
    rewritten = any(not isinstance(each.action, Copy) for each in assignments)
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
            header.metadata,
        )
        if rewritten
        else header
    )
    pieces = tuple(_piece(ref, *outputs[ref.name][:2]) for ref in layout.tensors)
    read = [ref for each in assignments for ref in (each.scales, *each.reads) if ref]
    inputs = {header.shard: None, **{ref.shard: None for ref in read}}
    return ShardPlan(
        header.shard, layout, pieces, tuple(inputs), rewritten, _shard_key(header, layout, assignments)
    )


def _piece(ref: TensorRef, each: Assignment, part: Part) -> Piece:
    return Piece(ref, each.source, part, each.action, each.scales, each.reads)


def _shard_key(source: Header, output: Header, assignments: Sequence[Assignment]) -> str:
    """Digest of all that can change the file's bytes, but for the parent's data."""
    deeds: dict[str, list[Any]] = {
        each.source.name: [each.action.numerics, each.action.block.rows, each.action.block.cols]
        for each in assignments
        if isinstance(each.action, Conversion)
    }
    deeds.update(
        (each.source.name, [each.action.numerics])
        for each in assignments
        if isinstance(each.action, Reconcile)
    )
    deeds.update(
        (each.source.name, [each.action.name]) for each in assignments if isinstance(each.action, Rename)
    )
    return key_of([output.shard, output.digest, source.digest, source.file_bytes, deeds])


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


def _loads(recipe: Recipe, assignments: Iterable[Assignment]) -> Iterable[LoadsAt]:
    """For each tensor-parallel size whether the blocks divide what a rank gets."""
    quantized = {
        each.source.name: (each.source, each.action)
        for each in assignments
        if isinstance(each.action, ToBlocks)
    }
    axes = _axes(recipe, quantized)
    inner = _inner_members(recipe, quantized)
    for size in sorted({*TENSOR_PARALLEL_TOLD, *recipe.output.tensor_parallel}):
        reasons = (
            _why_not_at(size, ref, action.block, axes.get(name), name in inner)
            for name, (ref, action) in quantized.items()
        )
        yield LoadsAt(size, next((reason for reason in reasons if reason), None))


def _axes(recipe: Recipe, names: Iterable[str]) -> dict[str, Parallel]:
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
    size: int, ref: TensorRef, block: BlockShape, dealt: Parallel | None, inner: bool
) -> str | None:
    """Why a rank's share of a weight [R, C] can't be cut at whole blocks; vLLM's `validate_fp8_block_shape`."""
    split = {"rows": (ref.shape[0], block.rows), "columns": (ref.shape[1], block.cols)}
    for side in ("rows", "columns"):
        length, step = split[side]
        ranks = min(size, dealt.shares or size) if dealt and dealt.axis == side else 1
        must_divide = ranks > 1 or (side == "rows" and inner)
        if length % ranks:
            return f"{ref.name}: {length} {side} can't be dealt out over {ranks} ranks"
        if must_divide and (length // ranks) % step:
            return f"{ref.name}: {length // ranks} {side} a rank, not a multiple of the block's {step}"
    return None


def _refuse_unloadable(recipe: Recipe, loads: Iterable[LoadsAt]) -> None:
    problems = [
        f"the result must load at tensor-parallel size {at.tensor_parallel} ([output] tensor_parallel), "
        f"but can't: {at.reason}; choose a smaller block, or drop that size"
        for at in loads
        if at.tensor_parallel in recipe.output.tensor_parallel and at.reason
    ]
    if problems:
        raise PlanError(problems)


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
        "left": dict(parent.left),
        "key": plan.key,
    }
