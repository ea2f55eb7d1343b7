"""Two checkpoints beside each other: what was carried, re-encoded, changed, lost and added, by family.

Where both have a manifest, its digests decide and no data are read (`integrity` is what holds them to the data). A
tensor of another form is decoded on both sides and its relative error said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.schemes import is_scale, split_name
from shardmill.verify.formats.values import place_of
from shardmill.verify.questions.pairs import pairs_of
from shardmill.verify.questions.roundtrip import loss_of
from shardmill.verify.reading.checkpoint import INDEX_SUFFIX, Checkpoint, open_checkpoint
from shardmill.verify.reading.file_pass import FileJob, Task
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source, read
from shardmill.verify.reading.stream import stream
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report, UnreadableError

ERROR_MAX = 0.2  # of a re-encoded weight; above, it is another weight
CONFIG_LINES_MAX = 200
PIECE_BYTES = 1 << 20


@dataclass(slots=True)
class DiffResult:
    """Names of B's tensors (of A's for the missing) by what became of them."""

    carried: list[str] = field(default_factory=list)
    reencoded: dict[str, float] = field(default_factory=dict)  # -> relative error
    changed: dict[str, int] = field(
        default_factory=dict
    )  # -> first byte that differs, -1 if only digests say so
    retyped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # in both, in a file of A or B that is not sound


def diff(
    a: Source,
    b: Source,
    by_bytes: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """`by_bytes`: read the data even where digests could decide."""
    report = Report("diff")
    of_a = Report("diff")
    new = open_checkpoint(b, report)
    old = open_parent(a, new, report, of_a)
    for fault in of_a.worst_first():
        if fault.severity == "error":
            report.add(
                Finding("parent-faulty", f"{a.where}: {fault.file}", fault.tensor, fault.expected, fault.got)
            )
    what = _sort(old, new, by_bytes, progress)
    report.add(*_findings(old, new, what), *_config_findings(old, new), *_side_findings(old, new, report))
    if what.unread:
        reason = f"a file of A or B is not sound, as of {what.unread[0]}"
        report.leaves_out(f"bytes of {len(what.unread):,} tensors", reason)
    report.facts["families"] = _families(what)
    digests = not by_bytes and old.manifest is not None and new.manifest is not None
    report.checks("names, dtypes, shapes")
    report.checks("bytes, by the manifests' digests" if digests else "bytes")
    return report


def _sort(
    old: Checkpoint, new: Checkpoint, by_bytes: bool, progress: Callable[[int, int], None]
) -> DiffResult:
    what = DiffResult()
    same_form: list[tuple[Tensor, Tensor]] = []
    other_form: set[str] = set()
    for name, theirs in old.tensors.items():
        ours = new.tensors.get(name)
        if ours is None:
            what.missing.append(name)
        elif (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape):
            same_form.append((theirs, ours))
        else:
            other_form.add(name)
    _compare(old, new, same_form, what, by_bytes, progress)
    pairs = [pair for pair in pairs_of(new, old, False) if pair.name in other_form]
    remote = new.source.remote or old.source.remote
    losses = pinned(lambda pair, _: loss_of(pair, new.source, old.source), pairs, lambda: None, remote=remote)
    for loss in losses:
        what.reencoded[loss.name] = loss.error
    what.retyped = sorted(other_form - what.reencoded.keys())
    scales_of = {split_name(name)[0] for name in what.reencoded}
    for name in new.tensors:
        if name in old.elsewhere:
            continue
        if name not in old.tensors and not (is_scale(name) and split_name(name)[0] in scales_of):
            what.added.append(name)
    return what


def _compare(
    old: Checkpoint,
    new: Checkpoint,
    pairs: list[tuple[Tensor, Tensor]],
    what: DiffResult,
    by_bytes: bool,
    progress: Callable[[int, int], None],
) -> None:
    to_read: dict[str, list[Task]] = {}
    for theirs, ours in pairs:
        digests = (_digest(old, theirs), _digest(new, ours))
        if not by_bytes and None not in digests:
            if digests[0] == digests[1]:
                what.carried.append(ours.name)
            else:
                what.changed[ours.name] = -1
        elif not (old.readable(theirs) and new.readable(ours)):
            what.unread.append(ours.name)
        else:
            to_read.setdefault(ours.file, []).append(Task(ours, twin=theirs))
    jobs = [
        FileJob(file, new.files[file], False, tuple(sorted(tasks, key=lambda task: task.tensor.begin)))
        for file, tasks in to_read.items()
    ]
    done = Progress(sum(job.bytes for job in jobs), progress)
    results = stream(new.source, jobs, old.source, done)
    for job in jobs:
        unequal = results[job.file].unequal
        what.changed |= unequal
        what.carried += [task.tensor.name for task in job.tasks if task.tensor.name not in unequal]


def _digest(checkpoint: Checkpoint, tensor: Tensor) -> str | None:
    shard = checkpoint.manifest.shards.get(tensor.file) if checkpoint.manifest is not None else None
    return shard.tensors.get(tensor.name) if shard is not None else None


def _findings(old: Checkpoint, new: Checkpoint, what: DiffResult) -> Iterator[Finding]:
    for name in what.missing:
        yield Finding("diff-missing", old.tensors[name].file, name, str(old.tensors[name]), "none")
    for name in what.added:
        yield Finding("diff-added", new.tensors[name].file, name, "none", str(new.tensors[name]))
    for name, first in sorted(what.changed.items()):
        tensor = new.tensors[name]
        yield Finding("diff-changed", tensor.file, name, "the same bytes", _first(tensor, first))
    for name in what.retyped:
        yield Finding(
            "diff-retyped", new.tensors[name].file, name, str(old.tensors[name]), str(new.tensors[name])
        )
    for name, error in sorted(what.reencoded.items()):
        slug = "diff-reencoded" if error <= ERROR_MAX else "diff-changed"
        got = f"{new.tensors[name]}, relative error {error:.3%}"
        yield Finding(slug, new.tensors[name].file, name, str(old.tensors[name]), got)


def _first(tensor: Tensor, byte: int) -> str:
    if byte < 0:
        return "another digest"
    element = byte * 8 // DTYPE_BITS[tensor.dtype]
    return f"the first difference at byte {byte:,} of the tensor, {place_of(element, tensor.shape)}"


def _families(what: DiffResult) -> dict[str, str]:
    counts: dict[str, dict[str, int]] = {}
    groups = {
        "carried": what.carried,
        "re-encoded": what.reencoded,
        "changed": what.changed,
        "retyped": what.retyped,
        "missing": what.missing,
        "added": what.added,
    }
    for label, names in groups.items():
        for name in names:
            family = counts.setdefault(kind_of(name), {})
            family[label] = family.get(label, 0) + 1
    errors: dict[str, list[float]] = {}
    for name, error in what.reencoded.items():
        errors.setdefault(kind_of(name), []).append(error)
    return {
        family: ", ".join(f"{count:,} {label}" for label, count in counts[family].items())
        + (f" (mean error {sum(errors[family]) / len(errors[family]):.3%})" if family in errors else "")
        for family in sorted(counts)
    }


def _config_findings(old: Checkpoint, new: Checkpoint) -> Iterator[Finding]:
    left = CONFIG_LINES_MAX
    for path, a, b in _differences(old.config, new.config, ""):
        if left:
            yield Finding("diff-config", "config.json", path, _brief(a), _brief(b))
        left = max(left - 1, 0)


def _side_findings(old: Checkpoint, new: Checkpoint, report: Report) -> Iterator[Finding]:
    """Every other file but weights, indexes and manifests, by its bytes; of a remote place by its size."""
    skipped = ("config.json", MANIFEST)
    names = {file for checkpoint in (old, new) for file in checkpoint.files}
    by_size = old.source.remote or new.source.remote
    report.checks("side files by size" if by_size else "side files")
    for file in sorted(names):
        if file in skipped or file in old.headers or file in new.headers or file.endswith(INDEX_SUFFIX):
            continue
        sizes = old.files.get(file), new.files.get(file)
        if sizes[0] != sizes[1]:
            yield Finding("diff-config", file, "", _size(sizes[0]), _size(sizes[1]))
        elif not by_size and not _same_bytes(old, new, file, sizes[0] or 0):
            yield Finding("diff-config", file, "", "the same bytes", f"others, as many ({_size(sizes[0])})")


def _same_bytes(old: Checkpoint, new: Checkpoint, file: str, size: int) -> bool:
    try:
        return all(
            read(old.source, file, begin, min(begin + PIECE_BYTES, size))
            == read(new.source, file, begin, min(begin + PIECE_BYTES, size))
            for begin in range(0, size, PIECE_BYTES)
        )
    except UnreadableError:
        return False


def _differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict) and len(path) < 512:
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(
                a.get(key, "absent"), b.get(key, "absent"), f"{path}.{key}" if path else key
            )
    elif a != b:
        yield path, a, b


def _brief(value: Any) -> str:
    if isinstance(value, (dict, list)) and len(value) > 4:
        return f"{type(value).__name__} of {len(value):,}"
    return repr(value)


def _size(size: int | None) -> str:
    return "absent" if size is None else f"{size:,} bytes"
