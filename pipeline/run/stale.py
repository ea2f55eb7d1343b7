"""Which shards of an output folder are stale, and one sentence why.

What is believed without reading: a file whose size, mtime, inode and ctime are those seen when the manifest was
written. What changed its stat is read, and only its bytes decide: a touched file makes nothing stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.actions import Copy, Drop, Reblock, Rename, converted
from shardmill.pipeline.container.filesystem import stat_or_none
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import ConversionRecord, Manifest, ShardRecord
from shardmill.pipeline.manifest.state import StatCache
from shardmill.pipeline.plan.keys import former_shard_key
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run.digests import tensors_of
from shardmill.pipeline.types import SCALE_SUFFIXES, BlockShape, Header, Parent, Stat

Digests = Mapping[str, str]
_READ = "changed"  # the words for a tensor that goes into others: scales that are consumed, halves that are reconciled


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a shard must be made, and why; `reason` is None where it is up to date."""

    file: str
    reason: str | None
    staged: bool = False  # a build that did not come to publish it has made it; run knows
    stat: Stat | None = None  # of the published file, under which it was found to be up to date


def judge(
    plan: Plan,
    parent: Parent,
    out: Path,
    manifest: Manifest | None,
    seen: StatCache,
    tell: Callable[[str], None],
) -> tuple[Verdict, ...]:
    """One Verdict a shard of the plan. `tell` hears of each file that has to be read to know."""
    headers = {header.shard: header for header in parent.headers}
    verdicts = tuple(
        _verdict(shard, [headers[file] for file in shard.inputs], plan, parent, out, manifest, seen, tell)
        for shard in plan.shards
    )
    if taken_over := [
        shard.file
        for shard, verdict in zip(plan.shards, verdicts, strict=True)
        if manifest and verdict.reason is None and manifest.shards[shard.file].key != shard.key
    ]:
        tell(
            f"taking over {_and_more(taken_over)}: an earlier release built it; its key has another form now, "
            f"its bytes are the planned ones"
        )
    return verdicts


def _verdict(
    shard: ShardPlan,
    sources: Sequence[Header],
    plan: Plan,
    parent: Parent,
    out: Path,
    manifest: Manifest | None,
    seen: StatCache,
    tell: Callable[[str], None],
) -> Verdict:
    stat = stat_or_none(out / shard.file)
    reason = _reason(shard, sources, plan, parent, out, stat, manifest, seen, tell)
    return Verdict(shard.file, reason, stat=None if reason else stat)


def _reason(
    shard: ShardPlan,
    sources: Sequence[Header],
    plan: Plan,
    parent: Parent,
    out: Path,
    stat: Stat | None,
    manifest: Manifest | None,
    seen: StatCache,
    tell: Callable[[str], None],
) -> str | None:
    if manifest is None:
        return "it was not built yet"
    if shard.file not in manifest.shards or shard.file not in manifest.files:
        return "the checkpoint built before does not have it"
    if not _key_proves_it(shard, sources[0], manifest.shards[shard.file]):
        return _what_changed(shard, sources[0], plan, manifest)
    output = out / shard.file
    if stat is None:
        return f"it is missing from {out}"
    for source in sources:
        if seen.parent.get(source.shard) != parent.stats[source.shard]:
            tell(f"reading the parent's {source.shard}: its size or times are not those seen last")
            found = tensors_of(parent.path(source.shard), source, parent.stats[source.shard])
            before = {name: manifest.input_digest(shard.file, name) for name in found}
            if changed := [name for name in found if before[name] not in (found[name], None)]:
                return f"the parent's {source.shard} changed: {_and_more(changed)}"
    if seen.output.get(shard.file) != stat:
        tell(f"reading {output}: its size or times are not those seen last")
        if stat[0] != shard.header.file_bytes:
            return f"it has {stat[0]} bytes in {out} where {shard.header.file_bytes} were built"
        if not _holds(output, shard.header, manifest.shards[shard.file].tensors, stat):
            return f"its bytes in {out} are not those that were built"
    return None


def _holds(path: Path, header: Header, tensors: Digests, stat: Stat) -> bool:
    """Whether the file has the planned header and data of these digests."""
    return _has_header(path, header) and tensors_of(path, header, stat) == tensors


def _has_header(path: Path, header: Header) -> bool:
    try:
        return read_header(path, header.shard).digest == header.digest
    except (CheckpointError, OSError):
        return False


def _key_proves_it(shard: ShardPlan, source: Header, record: ShardRecord) -> bool:
    """Whether the built file's key says that its bytes are the planned ones, in today's form or the first release's.

    The former key named neither the tensors that an action reads beside its own nor their files, but the record does.
    """
    if record.key == shard.key:
        return True
    own = {ref.name for ref in source.tensors}
    read = [piece.scales.name for piece in shard.pieces if piece.scales]
    read += [ref.name for piece in shard.pieces for ref in piece.reads if ref.name not in own]
    return record.key == former_shard_key(source, shard) and record.sources.keys() >= set(read)


def _what_changed(shard: ShardPlan, source: Header, plan: Plan, manifest: Manifest) -> str:
    """Why the shard's key is not the manifest's: the tensors whose actions differ, where there are any."""
    names = [ref.name for ref in source.tensors]
    before, now = _words_before(shard.file, names, manifest), _words(shard, names, plan)
    changed = [name for name in names if before.get(name) != now.get(name)]
    kept = Copy().words()
    if unrecorded := [name for name in changed if _only_source_block_unrecorded(name, plan, manifest)]:
        changed = [name for name in changed if name not in unrecorded]
        if not changed:
            return (
                f"an earlier release built it, whose key left `source_block` out: {_and_more(sorted(unrecorded))}; "
                f"it is made again once"
            )
    if changed:
        shown = [f"{name} ({before.get(name, kept)}, now {now.get(name, kept)})" for name in changed]
        return f"the recipe changed: {_and_more(sorted(shown))}"
    if moved := _other_origins(shard, plan, manifest):
        return f"the recipe takes tensors from elsewhere: {_and_more(moved)}"
    outputs = {ref.name for ref in shard.header.tensors}
    other = outputs.symmetric_difference(manifest.shards[shard.file].tensors)
    if scales := sorted(name for name in other if name.endswith(SCALE_SUFFIXES)):
        return f"the names of its scales changed: {_and_more(scales)}"
    return "the parent's header changed"


def _other_origins(shard: ShardPlan, plan: Plan, manifest: Manifest) -> list[str]:
    """What comes from another checkpoint than before, with both."""
    before = {name: source for source, record in manifest.sources.items() for name in record.tensors}
    now = {name: origin.source for name, origin in plan.origins.items()}
    names = dict.fromkeys(piece.source.name for piece in shard.pieces)
    return [
        f"{name} ({before.get(name, 'the parent')}, now {now.get(name, 'the parent')})"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _words_before(file: str, names: Iterable[str], manifest: Manifest) -> dict[str, str]:
    """Parent tensor -> what its action was, for those of `names` that were not kept."""
    words = dict.fromkeys(manifest.dropped, Drop().words())
    words.update(dict.fromkeys(manifest.shards[file].sources, _READ))
    for name in names:
        if name in manifest.renamed:
            words[name] = Rename(to=manifest.renamed[name]).words()
        elif name in manifest.conversions:
            numerics, block, source_block = _conversion_before(manifest.conversions[name])
            words[name] = converted(numerics, block, source_block)
    return words


def _words(shard: ShardPlan, names: Iterable[str], plan: Plan) -> dict[str, str]:
    """The same, as planned."""
    words = dict.fromkeys(plan.dropped, Drop().words())
    words.update({piece.scales.name: _READ for piece in shard.pieces if piece.scales})
    words.update({piece.source.name: _READ for piece in shard.pieces if piece.action.kind == "repair"})
    words.update(
        {p.source.name: p.action.words() for p in shard.pieces if p.action.kind in ("move", "convert")}
    )
    wanted = set(names)
    return {name: each for name, each in words.items() if name in wanted}


def _conversion_before(record: ConversionRecord) -> tuple[str, BlockShape, BlockShape | None]:
    """numerics, block and source_block as the manifest holds them; format 1 has no source_block."""
    source_block = BlockShape(*record.source_block) if record.source_block else None
    return record.numerics, BlockShape(*record.block), source_block


def _only_source_block_unrecorded(name: str, plan: Plan, manifest: Manifest) -> bool:
    """Whether a weight was reblocked as now, but by a release that did not say from which block."""
    if name not in manifest.conversions or name not in plan.conversions:
        return False
    action = plan.conversions[name][1]
    before = _conversion_before(manifest.conversions[name])
    return isinstance(action, Reblock) and before == (action.numerics, action.block, None)


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
