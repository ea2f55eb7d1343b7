"""What a child owes its parent: which tensors must be carried byte by byte, which were converted, which are gone.

With a manifest the child declares it (sources, dropped, renamed). Without one, a weight that turned from a float into
codes with a scale counts as converted, and nothing may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardmill.verify.formats.schemes import FLOATS, Linear, split_name
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.stream import FileJob, FileResult, Task
from shardmill.verify.rules.findings import Finding, Report


@dataclass(slots=True)
class Parentage:
    parent: Checkpoint
    twins: dict[str, Tensor] = field(default_factory=dict)  # name here -> the parent's tensor it must equal
    sources: dict[str, str] = field(
        default_factory=dict
    )  # parent's tensor that was changed -> its recorded digest
    findings: list[Finding] = field(default_factory=list)

    def source_jobs(self) -> list[FileJob]:
        """Reads the parent's tensors whose digests the manifest records."""
        jobs = []
        for file, header in self.parent.headers.items():
            tasks = tuple(Task(tensor, True) for tensor in header.tensors if tensor.name in self.sources)
            if tasks and header.sound:
                jobs.append(FileJob(file, self.parent.files[file], False, tasks))
        return jobs

    def source_faults(self, results: dict[str, FileResult]) -> Iterator[Finding]:
        for result in results.values():
            yield from result.findings
            for name, digest in result.digests.items():
                if digest != self.sources[name]:
                    yield Finding("source-changed", result.file, name, self.sources[name], digest)


def parentage(child: Checkpoint, linears: dict[str, Linear], source: Source, report: Report) -> Parentage:
    """Opens the parent and adds to `report` what names, dtypes and shapes alone show."""
    of_parent = Report("integrity")
    parent = open_checkpoint(source, of_parent)
    if of_parent.exit_code:
        worst = of_parent.worst_first()[0]
        got = f"{len(of_parent.findings)} findings, the worst {worst.rule.id} {worst.slug}"
        report.add(Finding("parent-faulty", worst.file, worst.tensor, "a parent without faults", got))
    origin = Parentage(parent)
    manifest = child.manifest
    renamed = manifest.renamed if manifest is not None else {}
    dropped = set(manifest.dropped) if manifest is not None else set()
    if manifest is not None:
        origin.sources = {
            name: digest for shard in manifest.shards.values() for name, digest in shard.sources.items()
        }
    expected = {
        renamed.get(name, name): tensor for name, tensor in parent.tensors.items() if name not in dropped
    }
    report.add(*_lost(child, origin, expected))
    report.add(*_held(child, origin, linears, expected))
    report.add(*_added(child, linears, expected))
    return origin


def _lost(child: Checkpoint, origin: Parentage, expected: dict[str, Tensor]) -> Iterator[Finding]:
    for name, tensor in expected.items():
        if name not in child.tensors and tensor.name not in origin.sources:
            yield Finding("lost-from-parent", tensor.file, name, f"the parent's {tensor}", "no such tensor")
    for name in origin.sources:
        if name not in origin.parent.tensors:
            yield Finding(
                "source-changed", "", name, "a tensor of the parent that was converted", "no such tensor"
            )


def _held(
    child: Checkpoint, origin: Parentage, linears: dict[str, Linear], expected: dict[str, Tensor]
) -> Iterator[Finding]:
    for name, theirs in expected.items():
        ours = child.tensors.get(name)
        if ours is None or theirs.name in origin.sources:
            continue
        if child.manifest is None and _converted(ours, theirs, linears):
            continue
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield Finding("carried-retyped", ours.file, name, str(theirs), str(ours))
        elif child.readable(ours) and origin.parent.readable(theirs):
            origin.twins[name] = theirs


def _converted(ours: Tensor, theirs: Tensor, linears: dict[str, Linear]) -> bool:
    """Whether a float weight became codes with a scale."""
    linear = linears.get(split_name(ours.name)[0])
    return theirs.dtype in FLOATS and linear is not None and linear.weight == ours and linear.grid is not None


def _added(child: Checkpoint, linears: dict[str, Linear], expected: dict[str, Tensor]) -> Iterator[Finding]:
    conversions = child.manifest.conversions if child.manifest is not None else None
    for name, tensor in child.tensors.items():
        if name in expected:
            continue
        linear = linears.get(split_name(name)[0])
        weight = linear.weight.name if linear is not None and linear.weight is not None else ""
        declared = weight in conversions if conversions is not None else weight in expected and weight != name
        if not declared:
            yield Finding(
                "added-undeclared",
                tensor.file,
                name,
                "a tensor of the parent or a converted scale",
                str(tensor),
            )
