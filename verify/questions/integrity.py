"""Is the checkpoint whole, and is it what was published?

Structure (headers, index, files), scales and codes, config entries; with a manifest every file and tensor digest; with
the parent, that nothing was lost and that carried tensors are the parent's byte by byte. One pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from shardmill.verify.formats.encode import RECIPES
from shardmill.verify.formats.look import Plan, Sightings
from shardmill.verify.formats.schemes import Linear, grid_of, pair_faults, quantized
from shardmill.verify.formats.values import float_rules
from shardmill.verify.questions.coverage import count_nested, coverage_of
from shardmill.verify.questions.entries import entry_faults
from shardmill.verify.questions.looks import plans_of, sight_faults
from shardmill.verify.questions.manifest_claims import claims_faults
from shardmill.verify.questions.side_files import side_faults
from shardmill.verify.questions.structure import structure_faults
from shardmill.verify.questions.tied import tied_pair
from shardmill.verify.reading.checkpoint import SUFFIX, Checkpoint, is_plain_path, open_checkpoint
from shardmill.verify.reading.file_pass import FileJob, Task
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import MANIFEST, Manifest
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.stream import FileResult, stream, streaming
from shardmill.verify.rules.findings import Finding, Report

if TYPE_CHECKING:
    from shardmill.verify.questions.parentage import Parentage

SMALL_BYTES_MAX = 4 << 20  # of files whose sha256 a remote place does not state; these are read
# Signatures and provenance are made after the manifest and vouch for it; they can't be listed in it.
AFTER_THE_MANIFEST = ("model.sig", "provenance.intoto.json", "provenance.intoto.jsonl")


class Opened(NamedTuple):
    """A checkpoint with what is judged about it."""

    checkpoint: Checkpoint
    linears: dict[str, Linear]
    plans: dict[str, Plan]
    sightings: Sightings


def integrity(
    source: Source,
    parent: Source | None = None,
    read_data: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """`read_data` False judges headers, and digests that the place states; None reads what lies on this machine.

    `progress` hears of bytes done and bytes in all.
    """
    report = Report("integrity")
    headers_only = read_data is False or (read_data is None and source.remote)
    checkpoint = open_checkpoint(source, report)
    linears = quantized(checkpoint.tensors)
    if headers_only:
        _headers(checkpoint, linears, report)
        _beside(checkpoint, linears, parent, report)
        for topic in ("scales", "codes", "floats"):
            report.leaves_out(topic, "headers only")
        report.coverage = coverage_of(checkpoint, linears, None)
        count_nested(report.coverage, checkpoint, False)
        _stated_digests(checkpoint, report)
    else:
        opened = Opened(checkpoint, linears, plans_of(checkpoint, linears), Sightings())
        _data(opened, parent, report, progress)
    report.fine = _fine(checkpoint, report)
    return report


def _headers(checkpoint: Checkpoint, linears: dict[str, Linear], report: Report) -> None:
    """All that names, dtypes, shapes and the small files show."""
    report.add(
        *structure_faults(checkpoint), *side_faults(checkpoint, report), *pair_faults(linears.values())
    )
    report.add(*entry_faults(checkpoint, linears))
    if checkpoint.config:
        report.checks("config")
    else:
        absent = "config.json" not in checkpoint.files
        report.leaves_out("config", "there is no config.json" if absent else "config.json cannot be used")
    if checkpoint.manifest is not None:
        report.add(*_manifest_faults(checkpoint, checkpoint.manifest))
        report.add(*claims_faults(checkpoint, checkpoint.manifest, linears))
    elif MANIFEST in checkpoint.files:
        report.leaves_out("digests", f"{MANIFEST} cannot be used")
    else:
        report.leaves_out("digests", f"there is no {MANIFEST}")


def _beside(
    checkpoint: Checkpoint, linears: dict[str, Linear], parent: Source | None, report: Report
) -> Parentage | None:
    """What the parent's headers and small files show; None without a parent."""
    if parent is None:
        report.leaves_out("parent", "no --parent given")
        return None
    from shardmill.verify.questions.beside_parent import beside_parent  # a third of what is imported here
    from shardmill.verify.questions.parentage import parentage

    origin = parentage(checkpoint, linears, parent, report)
    report.add(*beside_parent(checkpoint, origin.parent, report))
    return origin


def _manifest_faults(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Finding]:
    """Names and sizes in the manifest against the folder, without data."""
    for path, record in manifest.files.items():
        if not is_plain_path(path):
            yield Finding("index-path", MANIFEST, "", "a plain file name", ascii(path[:200]))
        elif path not in checkpoint.files:
            yield Finding("missing-file", path, "", f"{record.bytes:,} bytes", "no such file")
        elif record.sha256 is None and manifest.hashes_files:
            yield Finding("digest-missing", path, "", "a sha256", "null")
        elif checkpoint.files[path] != record.bytes:
            yield Finding(
                "file-size", path, "", f"{record.bytes:,} bytes", f"{checkpoint.files[path]:,} bytes"
            )
    for path in checkpoint.files:
        if path not in manifest.files and path != MANIFEST and path not in AFTER_THE_MANIFEST:
            yield Finding("stray-file", path, "", f"a file that {MANIFEST} lists")
    for file, header in checkpoint.headers.items():
        listed = manifest.shards[file].tensors if file in manifest.shards else {}
        here = {tensor.name for tensor in header.tensors}
        for name in sorted(here - set(listed)):
            yield Finding("manifest-lacks-tensor", file, name, "a digest in the manifest", "none")
        for name in sorted(set(listed) - here):
            yield Finding("manifest-extra-tensor", file, name, "the tensor that the manifest lists", "none")
    yield from _conversion_faults(checkpoint, manifest)


def _conversion_faults(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Finding]:
    """Each weight that the manifest says was converted is there, in codes, with scales for the recorded blocks.

    A conversion by numerics of another kind (packed codes, codes decoded to floats) is held to its digests alone.
    """
    index = checkpoint.index.weight_map if checkpoint.index is not None else {}
    for name, conversion in manifest.conversions.items():
        weight = checkpoint.tensors.get(name)
        if weight is None and name in index and index[name] not in checkpoint.headers:
            continue  # its file is missing or unreadable, which is a finding of its own
        scale = checkpoint.tensors.get(f"{name}_scale_inv") or checkpoint.tensors.get(f"{name}_scale")
        if weight is None:
            yield Finding("conversion-record", MANIFEST, name, "the converted weight", "no such tensor")
        elif conversion.numerics not in RECIPES:
            continue
        elif weight.dtype != "F8_E4M3" or len(weight.shape) < 2 or scale is None:
            yield Finding(
                "conversion-record", weight.file, name, "F8_E4M3 of two axes and its scales", str(weight)
            )
        elif _sides(scale.shape) != _sides(grid_of(weight.shape, conversion.block)):
            expected = (
                f"{list(grid_of(weight.shape, conversion.block))} for blocks of {list(conversion.block)}"
            )
            yield Finding("conversion-record", scale.file, scale.name, expected, str(list(scale.shape)))


def _sides(shape: tuple[int, ...]) -> list[int]:
    """A shape without its axes of one: some loaders' scales have more of these, or none."""
    return [side for side in shape if side != 1]


def _data(
    opened: Opened, parent: Source | None, report: Report, progress: Callable[[int, int], None]
) -> None:
    """Headers and data. Headers are judged while other processes read the data, where no task comes from judging."""
    checkpoint, linears = opened.checkpoint, opened.linears
    origin = None
    first = parent is not None or any("/" in file and file.endswith(SUFFIX) for file in checkpoint.files)
    if first:
        _headers(checkpoint, linears, report)
        origin = _beside(checkpoint, linears, parent, report)
    jobs = list(_jobs(opened, origin))
    sources = origin.source_jobs() if origin is not None else []
    done = Progress(sum(job.bytes for job in (*jobs, *sources)), progress)
    with streaming(checkpoint.source, jobs, parent, done) as results:
        if not first:
            _headers(checkpoint, linears, report)
            _beside(checkpoint, linears, parent, report)
        report.coverage = coverage_of(checkpoint, linears, _looked_at(checkpoint, jobs))
        count_nested(report.coverage, checkpoint, True)
        found = results()
    _judge(opened, origin, found, report)
    if origin is not None and parent is not None:
        report.add(*origin.source_faults(stream(parent, sources, None, done)))
        report.checks("parent")


def _looked_at(checkpoint: Checkpoint, jobs: Iterable[FileJob]) -> set[str]:
    return {
        task.tensor.name
        for job in jobs
        if job.file in checkpoint.headers
        for task in job.tasks
        if task.watch is not None or task.twin is not None
    }


def _judge(opened: Opened, origin: Parentage | None, results: dict[str, FileResult], report: Report) -> None:
    """What the pass over the data found."""
    checkpoint = opened.checkpoint
    for result in results.values():
        report.add(*result.findings)
        for name, sighting in result.outcomes.items() if result.file in checkpoint.headers else ():
            opened.sightings.add(name, sighting)
        if checkpoint.manifest is not None:
            report.add(*_digest_faults(checkpoint.manifest, result))
        for name, first in result.unequal.items():
            got = f"byte {first:,} of the tensor differs"
            unproven = origin is not None and name in origin.unproven
            slug = "source-not-given" if unproven else "carried-changed"
            report.add(Finding(slug, result.file, name, "the parent's bytes", got))
    report.add(*_tied_faults(opened, results))
    report.add(*sight_faults(checkpoint, opened.linears, opened.sightings))
    report.checks("scales")
    report.checks("codes")
    report.checks("floats")
    _say_digests(checkpoint, report)


def _tied(opened: Opened) -> tuple[Tensor, Tensor] | None:
    checkpoint = opened.checkpoint
    return tied_pair(checkpoint) if checkpoint.config else None


def _tied_faults(opened: Opened, results: dict[str, FileResult]) -> Iterator[Finding]:
    """A tied head that is stored beside its embedding must be its copy."""
    pair = _tied(opened)
    if pair is None:
        return
    head, embedding = pair
    digests = [results[t.file].digests.get(t.name) for t in pair if t.file in results]
    if len(digests) == 2 and None not in digests and digests[0] != digests[1]:
        yield Finding("tied-differs", head.file, head.name, f"the values of {embedding.name}", "other values")


def _say_digests(checkpoint: Checkpoint, report: Report) -> None:
    """A file without a sha256 in the manifest was not compared, whatever else was."""
    if checkpoint.manifest is None:
        return
    bare = [path for path, record in checkpoint.manifest.files.items() if record.sha256 is None]
    report.checks("digests")
    if bare:
        report.leaves_out(f"digests of {len(bare):,} files", f"the manifest holds none, as of {bare[0]}")


def _stated_digests(checkpoint: Checkpoint, report: Report) -> None:
    """The manifest's sha256 against those that the place states (a hub's, of large files); small files are read."""
    manifest, stated = checkpoint.manifest, checkpoint.source.digests
    if manifest is None or not stated:
        report.leaves_out("digests", "headers only")
        return
    small: list[FileJob] = []
    for path, record in manifest.files.items():
        if path not in checkpoint.files or record.sha256 is None:
            continue
        if path in stated and stated[path] != record.sha256:
            report.add(
                Finding("file-digest", path, "", record.sha256, f"{stated[path]}, as the place states")
            )
        elif path not in stated and checkpoint.files[path] == record.bytes <= SMALL_BYTES_MAX:
            small.append(FileJob(path, record.bytes, True, ()))
    for result in stream(checkpoint.source, small).values():
        report.add(*result.findings, *_digest_faults(manifest, result))
    report.checks("digests of files, as the place states them")
    report.leaves_out("digests of tensors", "headers only")


def _jobs(opened: Opened, origin: Parentage | None) -> Iterator[FileJob]:
    checkpoint, manifest = opened.checkpoint, opened.checkpoint.manifest
    twice = {tensor.name for tensor in _tied(opened) or ()}
    for file, size in checkpoint.files.items():
        record = manifest.files.get(file) if manifest is not None else None
        sha256 = record is not None and record.sha256 is not None and record.bytes == size
        tasks: list[Task] = []
        if file in getattr(checkpoint.source, "sparse", ()):
            continue  # a finding already; its zeros would take hours to read
        if file in checkpoint.headers and checkpoint.headers[file].sound:
            listed = manifest.shards[file].tensors if manifest is not None and file in manifest.shards else {}
            twins = origin.twins if origin is not None else {}
            for tensor in checkpoint.headers[file].tensors:
                task = _task(tensor, tensor.name in listed or tensor.name in twice, opened, twins)
                if task is not None:
                    tasks.append(task)
        if file in checkpoint.nested and checkpoint.nested[file].sound:
            laws = float_rules({t.name: t for t in checkpoint.nested[file].tensors}, ())
            for tensor in checkpoint.nested[file].tensors:
                if tensor.name in laws:
                    tasks.append(Task(tensor, False, Plan(tensor, laws[tensor.name])))
        if sha256 or tasks:
            yield FileJob(file, size, sha256, tuple(tasks))


def _task(tensor: Tensor, digest: bool, opened: Opened, twins: dict[str, Tensor]) -> Task | None:
    plan, twin = opened.plans.get(tensor.name), twins.get(tensor.name)
    if plan is not None and plan.tensor != tensor:
        plan = None  # two files have the name, and the other one counts
    return Task(tensor, digest, plan, twin) if digest or plan is not None or twin is not None else None


def _digest_faults(manifest: Manifest, result: FileResult) -> Iterator[Finding]:
    record, shard = manifest.files.get(result.file), manifest.shards.get(result.file)
    if record is not None and record.sha256 is not None and result.sha256 not in ("", record.sha256):
        yield Finding("file-digest", result.file, "", record.sha256, result.sha256)
    for name, digest in result.digests.items():
        if shard is not None and shard.tensors.get(name, digest) != digest:
            yield Finding("tensor-digest", result.file, name, shard.tensors[name], digest)


def _fine(checkpoint: Checkpoint, report: Report) -> list[str]:
    faulty = {finding.file for finding in report.findings if finding.severity != "info"}
    return [
        f"{file}: {len(header.tensors):,} tensors, {checkpoint.files[file]:,} bytes"
        for file, header in checkpoint.headers.items()
        if file not in faulty
    ]
