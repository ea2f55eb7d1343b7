"""The checkpoints that a child was made from, beside each other: the parent, and others that gave some tensors.

A child's manifest says which tensors another checkpoint gave. Where that one is given too, its tensors take their
place among the parent's, under the names that the manifest says; so every question asks one parent. Where it isn't,
these tensors are no parent's here: they are left out by name, and so are the parent's own that they replace.

The repair `input_scales` takes a file of the parent's from elsewhere. Who has that file gives its folder as the source
`input_scales`, and the child's scales are held to it; the manifest alone excuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import MANIFEST, Manifest, SourceRecord
from shardmill.verify.reading.source import Reader, Source
from shardmill.verify.rules.findings import Finding, Report

ADOPTED, ADOPTION = "input_scales", "input_scales/1"  # the source's name, and the repair's in a manifest
ADOPTABLE = ("input_scale", "input_global_scale")


class Parents:
    """The parent's place, and further ones by the names that the recipe gives them; their files are `name:file`."""

    def __init__(self, parent: Source, others: Mapping[str, Source]) -> None:
        self.parent, self.others = parent, dict(others)
        self.where, self.listed = parent.where, parent.listed
        self.remote = any(each.remote for each in (parent, *others.values()))

    @property
    def digests(self) -> Mapping[str, str]:
        return self.parent.digests

    @property
    def transferred(self) -> int:
        return sum(each.transferred for each in (self.parent, *self.others.values()))

    def files(self) -> dict[str, int]:
        return self.parent.files()

    def findings(self) -> list[Finding]:
        return self.parent.findings()

    def open(self, file: str) -> AbstractContextManager[Reader]:
        name, colon, rest = file.partition(":")
        return self.others[name].open(rest) if colon and name in self.others else self.parent.open(file)


def own_place(source: Source) -> Source:
    """The parent's own place."""
    return source.parent if isinstance(source, Parents) else source


def open_parent(source: Source, child: Checkpoint, report: Report, of_parent: Report) -> Checkpoint:
    """The parent of `child` as one checkpoint. What is wrong with its files goes to `of_parent`.

    What comes from a checkpoint that was not given is left out of `report`, and in the checkpoint's `elsewhere`.
    """
    parent = open_checkpoint(own_place(source), of_parent)
    others = source.others if isinstance(source, Parents) else {}
    records = child.manifest.sources if child.manifest is not None else {}
    adopted = _adopted_files(child.manifest) if ADOPTED in others and ADOPTED not in records else set[str]()
    for file in adopted:
        parent.source = source
        _adopt(parent, file, open_checkpoint(others[ADOPTED], Report(of_parent.question)))
    for name in sorted(set(others) - set(records) - ({ADOPTED} if adopted else set[str]())):
        said = (
            "the manifest names no such source" if child.manifest is not None else f"there is no {MANIFEST}"
        )
        report.leaves_out(f"source {name}", said)
    if not records:
        return parent
    parent.source = source
    for name, record in records.items():
        own = _without(parent, record)
        if name in others:
            report.add(*_join(parent, name, record, open_checkpoint(others[name], of_parent)))
        else:
            parent.elsewhere |= record.tensors.keys()
            parent.replaced |= own
            report.leaves_out(
                f"{len(record.tensors):,} tensors of source {name}", f"no --source {name}=DIR was given"
            )
    return parent


def _adopted_files(manifest: Manifest | None) -> set[str]:
    """Files of the parent that a repair took from a place of its own, which the manifest does not publish."""
    rows = manifest.repairs if manifest is not None else ()
    return {str(row.get("file", "")) for row in rows if row.get("repair") == ADOPTION}


def _adopt(parent: Checkpoint, file: str, other: Checkpoint) -> None:
    """Puts the input scales that were given in place of the parent's in one file; nothing else can be adopted."""
    header = parent.headers.get(file)
    placed: dict[str, Tensor] = {}
    for tensor in header.tensors if header is not None else ():
        theirs = other.tensors.get(tensor.name)
        if theirs is None or tensor.name.rpartition(".")[2] not in ADOPTABLE:
            continue
        if (theirs.dtype, theirs.shape) == (tensor.dtype, tensor.shape):
            placed[tensor.name] = theirs._replace(file=f"{ADOPTED}:{theirs.file}")
    if header is None or not placed:
        return
    kept = tuple(tensor for tensor in header.tensors if tensor.name not in placed)
    parent.headers[file] = header._replace(tensors=kept)
    parent.tensors |= placed
    for there in {tensor.file.partition(":")[2] for tensor in placed.values()}:
        inside = sorted(t for t in placed.values() if t.file.partition(":")[2] == there)
        inside.sort(key=lambda tensor: tensor.begin)
        parent.headers[f"{ADOPTED}:{there}"] = other.headers[there]._replace(tensors=tuple(inside))
        parent.files = {**parent.files, f"{ADOPTED}:{there}": other.files[there]}


def _without(parent: Checkpoint, record: SourceRecord) -> dict[str, Tensor]:
    """Takes the parent's own tensors of these names away, as the child has others in their place; returns them."""
    gone = {name: parent.tensors.pop(name) for name in list(parent.tensors) if name in record.tensors}
    for file in {tensor.file for tensor in gone.values()}:
        header = parent.headers[file]
        kept = tuple(tensor for tensor in header.tensors if tensor.name not in gone)
        parent.headers[file] = header._replace(tensors=kept)
    return gone


def _join(parent: Checkpoint, source: str, record: SourceRecord, other: Checkpoint) -> Iterator[Finding]:
    """Puts the tensors that `other` gave among the parent's, each in a file `source:file`."""
    by_file: dict[str, list[Tensor]] = {}
    for name, own in record.tensors.items():
        theirs = other.tensors.get(own)
        if theirs is None:
            yield Finding(
                "source-changed", MANIFEST, name, f"a tensor {own} of source {source}", "no such tensor"
            )
            continue
        placed = theirs._replace(name=name, file=f"{source}:{theirs.file}")
        parent.tensors[name] = placed
        by_file.setdefault(theirs.file, []).append(placed)
    for file, tensors in by_file.items():
        inside = tuple(sorted(tensors, key=lambda tensor: tensor.begin))
        parent.headers[f"{source}:{file}"] = other.headers[file]._replace(tensors=inside)
        parent.files = {**parent.files, f"{source}:{file}": other.files[file]}


def source_faults(manifest: Manifest) -> Iterator[Finding]:
    """Names that a source's tensors got: their own, or those with one other front for all of the source."""
    owner: dict[str, str] = {}
    for source, record in manifest.sources.items():
        for name in record.tensors:
            if name in owner:
                said = f"source {owner[name]} and source {source}"
                yield Finding("rename-exchanges", MANIFEST, name, "one source for each tensor", said)
            owner[name] = source
        moved = {name: own for name, own in record.tensors.items() if name != own}
        if moved and (wrong := _of_another_front(moved)):
            expected = f"the names of source {source} with one other front for all"
            yield Finding("rename-exchanges", MANIFEST, wrong, expected, moved[wrong])


def _of_another_front(moved: Mapping[str, str]) -> str | None:
    """The first name that is not made like the others: by putting one text in place of another at the front."""
    front = max(len(own) - _alike(name, own) for name, own in moved.items())
    first, first_own = next(iter(moved.items()))
    longer = len(first) - len(first_own)
    old, new = first_own[:front], first[: front + longer]
    for name, own in moved.items():
        if not (own.startswith(old) and name == new + own[len(old) :]):
            return name
    return None


def _alike(one: str, other: str) -> int:
    """How many letters at their ends are the same."""
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
