"""What a child owes its parent: which tensors must be carried byte by byte, which were converted, which are gone.

The tensors themselves decide, so that a manifest can add checks and never remove one: what has the parent's name,
dtype and shape is compared byte by byte whatever the manifest lists as changed. Excused are only a weight that took
another form (`roundtrip` and `reproduce` judge it), the scales of such a weight, a known repair of scales (`roundtrip`
decodes both), and a whole block that the manifest declares as left out; each is listed as excused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardmill.verify.formats.matrices import can_decode
from shardmill.verify.formats.schemes import FLOATS, Linear, quantized, split_name
from shardmill.verify.questions.beside_parent import ties_head
from shardmill.verify.questions.companions import belongs_to, container_of, names_here, native_layout, unfused
from shardmill.verify.questions.foldings import foldable
from shardmill.verify.questions.kin import (
    Kin,
    alike,
    has_origin,
    is_encoded_anew,
    is_in_converted_module,
    is_of_the_trunk,
    is_packed_elsewise,
    is_re_encoded,
    is_repaired,
    is_rounded,
    main_part,
    shape_of,
    split_of,
    weight_of,
)
from shardmill.verify.questions.manifest_claims import claims_beside
from shardmill.verify.questions.renames import claim_faults, rename_faults
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.file_pass import FileJob, Task
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import Manifest
from shardmill.verify.reading.parents import open_parent, source_faults
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.stream import FileResult
from shardmill.verify.rules.findings import Finding, Report

RECOMPUTED = (
    ".inv_freq",
    ".cos_cached",
    ".sin_cached",
    ".position_ids",
    ".masked_bias",
)  # buffers, not weights


@dataclass(slots=True)
class Parentage:
    parent: Checkpoint
    twins: dict[str, Tensor] = field(default_factory=dict)  # name here -> the parent's tensor it must equal
    sources: dict[str, str] = field(default_factory=dict)  # parent's tensor -> its digest in the manifest
    excused: dict[str, list[str]] = field(
        default_factory=dict
    )  # why -> parent's tensors not compared by bytes
    unproven: set[str] = field(
        default_factory=set
    )  # twins that a checkpoint gave which is not here, it is said

    def excuse(self, why: str, name: str) -> None:
        self.excused.setdefault(why, []).append(name)

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
    parent = open_parent(source, child, report, of_parent)
    if of_parent.exit_code:
        worst = of_parent.worst_first()[0]
        got = f"{len(of_parent.findings)} findings, the worst {worst.rule.id} {worst.slug}"
        report.add(Finding("parent-faulty", worst.file, worst.tensor, "a parent without faults", got))
    origin = Parentage(parent)
    manifest = child.manifest
    other = native_layout(child, parent)
    if other:
        report.leaves_out("parent", other)
        return origin
    renamed = names_here(child, parent)
    here = {name: renamed.get(name, name) for name in parent.tensors}
    kin = Kin(
        child, parent, linears, quantized(parent.tensors), here, frozenset(map(container_of, child.tensors)),
        frozenset(_folded(child, parent, linears)),
    )  # fmt: skip
    if manifest is not None:
        shards = manifest.shards.values()
        origin.sources = {name: digest for shard in shards for name, digest in shard.sources.items()}
        report.add(*rename_faults(manifest, parent), *claim_faults(manifest, source, report))
        report.add(*source_faults(manifest), *claims_beside(child, manifest, parent))
        report.add(*_replaced(kin, origin))
    report.add(*_foreign_sources(origin))
    for name, theirs in parent.tensors.items():
        report.add(*_held(kin, origin, name, theirs))
    report.add(*_added(kin))
    if report.count("head-tied"):
        report.leaves_out(
            "lm_head", "the child ties its head to its embedding, the parent has one of its own"
        )
    _say_excused(origin, report)
    return origin


def _folded(child: Checkpoint, parent: Checkpoint, linears: dict[str, Linear]) -> Iterator[str]:
    """Layers with integers that were made from this parent's floats by a tool that leaves no manifest."""
    for linear in linears.values() if child.manifest is None else ():
        before = parent.tensors.get(linear.float_name)
        if foldable(linear.kind) and can_decode(linear) and before is not None and before.dtype in FLOATS:
            yield container_of(linear.module)


def _foreign_sources(origin: Parentage) -> Iterator[Finding]:
    for name in origin.sources:
        if name not in origin.parent.tensors and name not in origin.parent.elsewhere:
            expected = "a tensor of the parent that was converted"
            yield Finding("source-changed", "", name, expected, "no such tensor")


def _held(kin: Kin, origin: Parentage, name: str, theirs: Tensor) -> Iterator[Finding]:
    """One tensor of the parent: a twin to compare, an excuse, or a finding."""
    ours = kin.child.tensors.get(kin.here[name])
    if ours is None:
        yield from _gone(kin, origin, name, theirs)
    elif is_re_encoded(kin, name):
        yield from _converted(kin, origin, name)
    elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        if is_in_converted_module(kin, name):
            yield from _converted(kin, origin, name)
        elif kin.manifest is None and is_rounded(ours, theirs):
            origin.excuse("floats of another dtype: roundtrip compares them", name)
        elif kin.manifest is None and is_packed_elsewise(kin, ours, theirs):
            origin.excuse("codes of a form that is not decoded: not compared", name)
        else:
            yield Finding("carried-retyped", ours.file, ours.name, str(theirs), str(ours))
    elif is_encoded_anew(kin, name) and is_in_converted_module(kin, name):
        yield from _converted(kin, origin, name)
    elif is_repaired(kin, name):
        origin.excuse("repaired: roundtrip compares what both decode to", name)
    elif len(ours.shape) == 1 and ours.dtype in FLOATS and container_of(ours.name) in kin.folded:
        origin.excuse(
            "of a layer of integers: roundtrip holds it to the weights that it may be folded into", name
        )
    elif kin.child.readable(ours) and kin.parent.readable(theirs):
        origin.twins[ours.name] = theirs


def _replaced(kin: Kin, origin: Parentage) -> Iterator[Finding]:
    """What another checkpoint gave that is not here, in place of a tensor that the parent has too.

    The parent's own is compared all the same: who only says so must have its bytes.
    """
    renamed = kin.manifest.renamed if kin.manifest is not None else {}
    for name, theirs in kin.parent.replaced.items():
        ours = kin.child.tensors.get(renamed.get(name, name))
        if ours is None:
            continue
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield Finding("source-not-given", ours.file, ours.name, f"the parent's {theirs}", str(ours))
        elif kin.child.readable(ours) and kin.parent.readable(theirs):
            origin.twins[ours.name] = theirs
            origin.unproven.add(ours.name)


def _gone(kin: Kin, origin: Parentage, name: str, theirs: Tensor) -> Iterator[Finding]:
    manifest = kin.manifest
    if is_in_converted_module(kin, name):
        yield from _converted(kin, origin, name)
    elif manifest is not None and name in manifest.dropped:
        block = container_of(name)
        if (block in kin.containers or is_of_the_trunk(kin, name)) and not name.endswith(RECOMPUTED):
            got = f"left out, and other tensors of {block} are here"
            yield Finding("dropped-in-part", theirs.file, name, "a whole block left out", got)
        origin.excuse("left out, as the manifest declares", name)
    elif (manifest is None or _taken_apart(manifest, name)) and unfused(theirs, kin.child.tensors):
        origin.excuse("a stack that was taken apart: not compared", name)
    elif manifest is None and name.endswith("lm_head.weight") and ties_head(kin.child, kin.parent):
        origin.excuse("a head of its own: not compared", name)
        yield Finding("head-tied", theirs.file, name, f"the parent's {theirs}", "none; config.json ties it")
    else:
        yield Finding("lost-from-parent", theirs.file, name, f"the parent's {theirs}", "no such tensor")


def _taken_apart(manifest: Manifest, name: str) -> bool:
    """Whether the manifest has a conversion of a part of this stack of experts."""
    bank = name.rpartition(".")[0]
    return any(weight.startswith(f"{bank}.0.") for weight in manifest.conversions)


def _converted(kin: Kin, origin: Parentage, name: str) -> Iterator[Finding]:
    """A tensor of a module that has another form here: nothing of it may be missing, and the manifest records it."""
    origin.excuse("converted: roundtrip and reproduce compare it", name)
    module, before = split_of(kin.here[name], kin)[0], split_of(name, kin)[0]
    if name != main_part(kin, before):
        return
    yield from _unrecorded(kin, module)
    ours, theirs = shape_of(kin.child, module, kin.linears), shape_of(kin.parent, before, kin.theirs)
    if ours and theirs and not alike(kin, module, ours, theirs):
        weight = weight_of(kin.child, module, kin.linears.get(module))
        assert weight is not None
        expected = f"the parent's weight {list(theirs)} in another form"
        yield Finding("carried-retyped", weight.file, weight.name, expected, str(list(ours)))


def _unrecorded(kin: Kin, module: str) -> Iterator[Finding]:
    """A weight in another form, of which a child with a manifest does not say how it was made."""
    weight = weight_of(kin.child, module, kin.linears.get(module))
    if kin.manifest is None or weight is None:
        return
    if weight.name not in kin.manifest.conversions:
        expected = "a record of its conversion in the manifest"
        yield Finding("conversion-record", weight.file, weight.name, expected, "none")


def _added(kin: Kin) -> Iterator[Finding]:
    expected = {*kin.here.values(), *_from_elsewhere(kin)}
    conversions = kin.manifest.conversions if kin.manifest is not None else None
    for name, tensor in kin.child.tensors.items():
        if name in expected:
            continue
        module = split_name(name)[0]
        linear = kin.linears.get(module)
        weight = linear.weight.name if linear is not None and linear.weight is not None else ""
        if conversions is not None:
            declared = weight in conversions and has_origin(kin, name, linear)
        else:
            declared = belongs_to(name, kin.parent.tensors, kin.child.tensors)
        if not declared:
            said = "a tensor of the parent or a converted scale"
            yield Finding("added-undeclared", tensor.file, name, said, str(tensor))


def _from_elsewhere(kin: Kin) -> Iterator[str]:
    """What the child calls the tensors of checkpoints that were not given."""
    renamed = kin.manifest.renamed if kin.manifest is not None else {}
    for name in kin.parent.elsewhere:
        yield renamed.get(name, name)


def _say_excused(origin: Parentage, report: Report) -> None:
    if origin.excused:
        report.facts["excused from the parent's bytes"] = {
            why: f"{len(names):,} tensors, the first {names[0]}" for why, names in origin.excused.items()
        }
