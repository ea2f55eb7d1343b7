"""Which shards of an output folder are stale, and one sentence why.

What is believed without reading: a file whose size, mtime, inode and ctime are those seen when the manifest was
written. What changed its stat is read, and only its bytes decide: a touched file makes nothing stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.pipeline.container.header import file_stat, read_header
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import MANIFEST_FORMAT, Manifest
from shardmill.pipeline.manifest.store import StatCache
from shardmill.pipeline.run.digests import tensors_of
from shardmill.pipeline.types import Header, Parent, Plan, Reconcile, ShardPlan

Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a shard must be made, and why; `reason` is None where it is up to date."""

    file: str
    reason: str | None
    staged: bool = False  # a build that did not come to publish it has made it; run knows


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
    return tuple(
        Verdict(
            shard.file,
            _reason(shard, [headers[file] for file in shard.inputs], plan, parent, out, manifest, seen, tell),
        )
        for shard in plan.shards
    )


def _reason(
    shard: ShardPlan,
    sources: Sequence[Header],
    plan: Plan,
    parent: Parent,
    out: Path,
    manifest: Manifest | None,
    seen: StatCache,
    tell: Callable[[str], None],
) -> str | None:
    if manifest is None:
        return "it was not built yet"
    if shard.file not in manifest.shards:
        return "the checkpoint built before does not have it"
    output = out / shard.file
    if manifest.shards[shard.file].key != shard.key and not _is_passed_on(shard, output, manifest):
        return _what_changed(shard, sources[0], plan, manifest)
    if not output.exists():
        return f"it is missing from {out}"
    for source in sources:
        if _stat(seen.parent, source.shard) != parent.stats[source.shard]:
            tell(f"reading the parent's {source.shard}: its size or times are not those seen last")
            found = tensors_of(parent.path(source.shard), source)
            before = {name: manifest.input_digest(shard.file, name) for name in found}
            if changed := [name for name in found if before[name] not in (found[name], None)]:
                return f"the parent's {source.shard} changed: {_and_more(changed)}"
    if _stat(seen.output, shard.file) != file_stat(output):
        tell(f"reading {output}: its size or times are not those seen last")
        if output.stat().st_size != shard.header.file_bytes:
            return f"it has {output.stat().st_size} bytes in {out} where {shard.header.file_bytes} were built"
        if not _holds(output, shard.header, manifest.shards[shard.file].tensors):
            return f"its bytes in {out} are not those that were built"
    return None


def _stat(seen: Mapping[str, Iterable[int]], file: str) -> tuple[int, ...] | None:
    return tuple(seen[file]) if file in seen else None


def _holds(path: Path, header: Header, tensors: Digests) -> bool:
    """Whether the file has the planned header and data of these digests."""
    return _has_header(path, header) and tensors_of(path, header) == tensors


def _has_header(path: Path, header: Header) -> bool:
    try:
        return read_header(path, header.shard).digest == header.digest
    except (CheckpointError, OSError):
        return False


def _is_passed_on(shard: ShardPlan, output: Path, manifest: Manifest) -> bool:
    """Whether the shard was the parent's own file, and is to be it again: then no key but its bytes decide."""
    record = manifest.shards[shard.file]
    return not record.rewritten and not shard.rewritten and _has_header(output, shard.header)


def _what_changed(shard: ShardPlan, source: Header, plan: Plan, manifest: Manifest) -> str:
    """Why the shard's key is another than the manifest's: the tensors that are treated differently, where there are."""
    names = [ref.name for ref in source.tensors]
    before, now = _deeds_before(shard.file, names, manifest), _deeds(shard, names, plan)
    changed = [
        f"{name} ({before.get(name, 'kept')}, now {now.get(name, 'kept')})"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if changed:
        return f"the recipe changed: {_and_more(sorted(changed))}"
    if manifest.format != MANIFEST_FORMAT:
        return f"an earlier version built it, whose keys covered less of an action ({manifest.format})"
    return "the parent's header changed"


def _deeds_before(file: str, names: Iterable[str], manifest: Manifest) -> dict[str, str]:
    """Parent tensor -> what was done with it, for those of `names` that were not kept."""
    deeds = dict.fromkeys(manifest.dropped, "dropped")
    deeds.update(dict.fromkeys(manifest.shards[file].sources, "changed"))
    for name in names:
        if name in manifest.renamed:
            deeds[name] = f"renamed {manifest.renamed[name]}"
        elif name in manifest.conversions:
            record = manifest.conversions[name]
            deeds[name] = f"{record.numerics} {record.block[0]}x{record.block[1]}"
    return deeds


def _deeds(shard: ShardPlan, names: Iterable[str], plan: Plan) -> dict[str, str]:
    """The same, as planned."""
    deeds = dict.fromkeys(plan.dropped, "dropped")
    deeds.update({piece.scales.name: "changed" for piece in shard.pieces if piece.scales})
    deeds.update({p.source.name: "changed" for p in shard.pieces if isinstance(p.action, Reconcile)})
    for name in names:
        if name in plan.renamed:
            deeds[name] = f"renamed {plan.renamed[name]}"
        elif name in plan.conversions:
            _, action = plan.conversions[name]
            deeds[name] = f"{action.numerics} {action.block.rows}x{action.block.cols}"
    return deeds


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
