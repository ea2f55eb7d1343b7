"""The plan: assignments -> every output file, whole but for its data. Pure: no file, clock, environment or chance.

Each shard is rewritten in place: same file name, a weight's scale in the weight's file. What need not change is
passed on whole, so that an unchanged file keeps its name, bytes and digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardmill.pipeline.actions import Conversion
from shardmill.pipeline.container.header import lay_out
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.manifest.digest import key_of
from shardmill.pipeline.plan.homes import homes
from shardmill.pipeline.plan.indented import indented
from shardmill.pipeline.plan.keys import shard_key
from shardmill.pipeline.plan.nothing import nothing_done
from shardmill.pipeline.plan.profiles import PROFILES
from shardmill.pipeline.plan.profiles.child import Child
from shardmill.pipeline.plan.profiles.follow import follow
from shardmill.pipeline.plan.profiles.truth import one_truth
from shardmill.pipeline.plan.profiles.unread import refuse_unread
from shardmill.pipeline.plan.readme import child_readme
from shardmill.pipeline.plan.tensor_parallel import loads_at, refuse_unloadable
from shardmill.pipeline.plan.types import Assignment, Piece, Plan, ShardPlan, changed
from shardmill.pipeline.recipe.tables import Family, Recipe, standard_stages
from shardmill.pipeline.types import FamilySummary, Header, Parent, Shape, TensorRef, tensor_bytes

_NO_NAMES = ("__metadata__", "")
_LIBRARY_METADATA = {
    "format": "pt"
}  # of a rewritten file that states no format: transformers 4 refuses it without


def make_plan(recipe: Recipe, parent: Parent, assignments: Sequence[Assignment]) -> Plan:
    """The Plan for `parent`, whose tensors are `assignments`. Raises PlanError where the result could not load."""
    differing = changed(assignments)
    _refuse_collisions(parent.tensors, differing)
    shards = tuple(_shards(parent, assignments))
    converted = {
        name: (each.family, each.action)
        for each in differing
        if isinstance(each.action, Conversion)
        for name in each.action.mains(each.source)
    }
    units = {
        name: each.action.unit(each.source)
        for each in differing
        if isinstance(each.action, Conversion)
        for name in each.action.mains(each.source)
    }
    loads = tuple(loads_at(recipe, differing))
    refuse_unloadable(recipe, loads)
    outputs = {ref.name: ref for shard in shards for ref in shard.header.tensors}
    renamed = _renamed(differing)
    followed = follow(parent.config, renamed, parent.tensors, outputs)
    child = Child(recipe, followed, outputs, {name: action for name, (_, action) in converted.items()})
    profile = PROFILES[recipe.output.profile]
    if problems := [*profile.problems(child), *nothing_done(recipe, parent, assignments)]:
        raise PlanError(problems)
    refuse_unread(child, profile.name, profile.loaders)
    config, entries = profile.declare(child)
    config = one_truth(config, child, parent.tensors)
    config_text = (indented(config) + "\n").encode()
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
            **({"sources": sources} if (sources := _sources(recipe)) else {}),
        }
    )
    return Plan(
        recipe=recipe.name,
        repository=recipe.parent.repository,
        revision=recipe.parent.revision,
        shards=shards,
        config=config_text,
        config_entries=entries,
        beside=beside,
        readme=child_readme(recipe, parent, families, key, rewritten, len(shards)),
        conversions=converted,
        units={name: (unit.rows, unit.cols) for name, unit in units.items()},
        dropped=_dropped(differing, outputs),
        renamed=renamed,
        repairs=tuple({"repair": "input_scales/1", "file": file} for file in sorted(parent.replaced)),
        carried=parent.carried,
        single=parent.single,
        families=families,
        loads=loads,
        key=key,
        sources={name: (said[0], said[1]) for name, said in _sources(recipe).items()},
        origins=parent.origins,
    )


def _sources(recipe: Recipe) -> dict[str, list[str | None]]:
    """Source -> its repository and revision."""
    return {table.name: [table.repository, table.revision] for table in recipe.source}


def _own_stages(recipe: Recipe) -> dict[str, Any]:
    """The order of the stages, where the recipe gives another than the standard one."""
    needs = {name: sorted(table.needs) for name, table in recipe.stages.items()}
    standard = standard_stages((family.action for family in recipe.family), bool(recipe.source))
    usual = {name: sorted(table["needs"]) for name, table in standard.items()}
    return {} if needs == usual else {"stages": needs}


def _refuse_collisions(tensors: Mapping[str, TensorRef], differing: Iterable[Assignment]) -> None:
    """Two of the parent's `tensors` must not come out under one name. differing: what becomes of those not copied."""
    made = [(name, each.source.name) for each in differing for name, *_ in each.action.outputs(each.source)]
    gone = {each.source.name for each in differing}
    unnamed = [(name, name) for name in _NO_NAMES if name in tensors and name not in gone]
    problems = [
        f"{source}: would be named {name!r}, which no library reads; choose another"
        for name, source in (*made, *unnamed)
        if name in _NO_NAMES
    ]
    maker: dict[str, str] = {}
    for name, source in made:
        if name in maker or (name in tensors and name not in gone):
            problems.append(f"{name}: would be made twice, from {maker.get(name, name)} and from {source}")
        maker[name] = source
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


def _shards(parent: Parent, assignments: Sequence[Assignment]) -> Iterator[ShardPlan]:
    """The output files: the parent's in its order, but for those of which nothing is left, then further ones."""
    headers = {header.shard: header for header in parent.headers}
    others = {file: headers[file] for file in parent.others}
    moved = homes(parent)
    by_file: dict[str, list[Assignment]] = {header.shard: [] for header in parent.own_headers}
    for each in assignments:
        source = each.source
        by_file.setdefault(moved.get(source.name, source.shard), []).append(each)
    own = len(parent.own_headers)
    for file in [*list(by_file)[:own], *sorted(list(by_file)[own:])]:
        if (shard := _shard(file, headers.get(file), by_file[file], others)) is not None:
            yield shard


def _shard(
    file: str, header: Header | None, assignments: Sequence[Assignment], others: Mapping[str, Header]
) -> ShardPlan | None:
    """The plan of one output file; None where nothing is in it. header: of the parent's file of that name."""
    if header and all(each.action.kind == "copy" and each.source.shard == file for each in assignments):
        return _passed_on(header, assignments) if assignments else None
    outputs = {
        name: (each, part, dtype, shape)
        for each in assignments
        for name, dtype, shape, part in each.action.outputs(each.source)
    }
    if not outputs:
        return None
    read = {each.source.shard for each in assignments}
    read |= {ref.shard for each in changed(assignments) for ref in (each.scales, *each.reads) if ref}
    layout = _layout(file, header, {name: (dtype, shape) for name, (_, _, dtype, shape) in outputs.items()})
    pieces = tuple(
        Piece(ref, each.source, part, each.action, each.scales, each.reads)
        for ref in layout.tensors
        for each, part, _, _ in (outputs[ref.name],)
    )
    inputs = tuple(dict.fromkeys([*([file] if header else []), *sorted(read)]))
    first = header or others[inputs[0]]
    key = shard_key(first, layout, assignments, {name: others[name] for name in inputs if name in others})
    return ShardPlan(file, layout, pieces, inputs, True, key)


def _passed_on(header: Header, assignments: Sequence[Assignment]) -> ShardPlan:
    """The plan of a file that the child gets from the parent as it is."""
    return ShardPlan(header.shard, header, (), (header.shard,), False, shard_key(header, header, assignments))


def _layout(file: str, header: Header | None, named: Mapping[str, tuple[str, Shape]]) -> Header:
    metadata = {**_LIBRARY_METADATA, **(header.metadata if header else {})}
    return lay_out(((name, dtype, shape) for name, (dtype, shape) in named.items()), file, metadata)


def _families(recipe: Recipe, assignments: Iterable[Assignment]) -> tuple[FamilySummary, ...]:
    members: dict[str, list[Assignment]] = {family.name: [] for family in recipe.family}
    for each in assignments:
        members[each.family].append(each)
    return tuple(_summary(family, members[family.name]) for family in recipe.family)


def _summary(family: Family, members: Sequence[Assignment]) -> FamilySummary:
    differing = changed(members)
    before = sum(each.source.bytes for each in members)
    kept = before - sum(each.source.bytes for each in differing)
    made = [output for each in differing for output in each.action.outputs(each.source)]
    scale_bytes = sum(tensor_bytes(dtype, shape) for _, dtype, shape, part in made if part == "scales")
    return FamilySummary(
        name=family.name,
        action=family.action,
        reason=family.reason,
        tensors=len(members),
        bytes_before=before,
        bytes_after=kept + sum(tensor_bytes(dtype, shape) for _, dtype, shape, _ in made) - scale_bytes,
        scale_bytes=scale_bytes,
        block=family.block,
    )
