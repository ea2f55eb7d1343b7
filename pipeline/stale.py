"""Which shards of an output folder are stale, and one sentence why.

What is believed without reading: a file whose size, mtime, inode and ctime are those seen when the manifest was
written. What changed its stat is read, and only its bytes decide: a touched file makes nothing stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.container import file_stat, read_header
from pipeline.errors import CheckpointError
from pipeline.manifest.digest import TensorSplitter
from pipeline.manifest.records import Manifest
from pipeline.manifest.store import Seen
from pipeline.shardio import CHUNK_BYTES, Buffers, Source
from pipeline.types import Header, Parent, Plan, ShardPlan

Digests = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a shard must be made, and why; `reason` is None where it is up to date."""

    file: str
    reason: str | None


def judge(
    plan: Plan, parent: Parent, out: Path, manifest: Manifest | None, seen: Seen, tell: Callable[[str], None]
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
    seen: Seen,
    tell: Callable[[str], None],
) -> str | None:
    if manifest is None:
        return "it was not built yet"
    if shard.file not in manifest.shards:
        return "the checkpoint built before does not have it"
    if manifest.shards[shard.file].key != shard.key:
        return _what_changed(shard, plan, manifest)
    output = out / shard.file
    if not output.exists():
        return f"it is missing from {out}"
    for source in sources:
        if _stat(seen.parent, source.shard) != parent.stats[source.shard]:
            tell(f"reading the parent's {source.shard}: its stat is not the one seen last")
            found = _digests(parent.path(source.shard), source)
            before = {name: manifest.input_digest(shard.file, name) for name in found}
            if changed := [name for name in found if before[name] not in (found[name], None)]:
                return f"the parent's {source.shard} changed: {_and_more(changed)}"
    if _stat(seen.output, shard.file) != file_stat(output):
        tell(f"reading {output}: its stat is not the one seen last")
        if output.stat().st_size != shard.header.file_bytes:
            return f"it has {output.stat().st_size} bytes in {out} where {shard.header.file_bytes} were built"
        if not _holds(output, shard.header, manifest.shards[shard.file].tensors):
            return f"its bytes in {out} are not those that were built"
    return None


def _stat(seen: Mapping[str, Iterable[int]], file: str) -> tuple[int, ...] | None:
    return tuple(seen[file]) if file in seen else None


def _digests(path: Path, header: Header) -> Digests:
    """Tensor name -> digest of its data as the file holds them now."""
    splitter = TensorSplitter([(ref.name, ref.bytes) for ref in header.tensors])
    with Source(path, file_stat(path)) as source:
        buffer = Buffers().get("chunk", CHUNK_BYTES)
        for _, chunk in source.chunks(buffer, header.data_begin, header.file_bytes):
            splitter.update(chunk)
    return splitter.digests()


def _holds(path: Path, header: Header, tensors: Digests) -> bool:
    """Whether the file has the planned header and data of these digests."""
    try:
        same_header = read_header(path, header.shard).digest == header.digest
    except CheckpointError:
        return False
    return same_header and _digests(path, header) == tensors


def _what_changed(shard: ShardPlan, plan: Plan, manifest: Manifest) -> str:
    """Why the shard's key is another than the manifest's: the weights that are treated differently, where there are."""
    changed = []
    for name in {piece.source.name for piece in shard.pieces}:
        now, before = _deed(plan, name), manifest.conversions.get(name)
        was = f"{before['recipe']} {before['block'][0]}x{before['block'][1]}" if before else "kept"
        if now != was:
            changed.append(f"{name} ({was}, now {now})")
    return f"the recipe changed: {_and_more(sorted(changed))}" if changed else "the parent's header changed"


def _deed(plan: Plan, name: str) -> str:
    if name not in plan.conversions:
        return "kept"
    action = plan.conversions[name][1]
    return f"{action.numerics} {action.block.rows}x{action.block.cols}"


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
