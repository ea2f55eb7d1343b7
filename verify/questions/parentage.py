"""What a child owes its parent: which tensors must be carried byte by byte, which were converted, which are gone.

The tensors themselves decide, so that a manifest can add checks and never remove one: what has the parent's name,
dtype and shape is compared byte by byte whatever the manifest lists as changed. Excused are only a weight that took
another form (`roundtrip` and `reproduce` judge it), the scales of such a weight, a known repair of scales (`roundtrip`
decodes both), and a whole block that the manifest declares as left out; each is listed as excused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from shardmill.verify.formats.laws import NUMERICS, REBLOCK, RECONCILE
from shardmill.verify.formats.linear import INTEGER_SHAPES
from shardmill.verify.formats.matrices import can_decode
from shardmill.verify.formats.schemes import FLOATS, SCALE_DTYPES, WEIGHTS, Linear, quantized, split_name
from shardmill.verify.questions.beside_parent import ties_head
from shardmill.verify.questions.companions import belongs_to, container_of, names_here, native_layout, unfused
from shardmill.verify.questions.foldings import foldable
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

REPAIRS = (RECONCILE,)  # that change scales in place
REPAIRED_LEAVES = ("weight_scale", "weight_scale_2")


_ENDS = re.compile(r"(?<![^.])(norm|ln_f|final_layernorm|embed_tokens|wte)\.weight$")


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


@dataclass(frozen=True, slots=True)
class Kin:
    """Child and parent side by side: quantized modules of both, and where the parent's names went."""

    child: Checkpoint
    parent: Checkpoint
    linears: dict[str, Linear]
    theirs: dict[str, Linear]
    here: dict[str, str]  # parent's name -> name here
    containers: frozenset[str]  # of the child's tensors
    folded: frozenset[str]  # layers whose norms roundtrip holds to the weights that took factors from them

    @property
    def manifest(self) -> Manifest | None:
        return self.child.manifest


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
    elif _re_encoded(kin, name):
        yield from _converted(kin, origin, name)
    elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        if _in_converted_module(kin, name):
            yield from _converted(kin, origin, name)
        elif kin.manifest is None and _rounded(ours, theirs):
            origin.excuse("floats of another dtype: roundtrip compares them", name)
        elif kin.manifest is None and _packed_elsewise(kin, ours, theirs):
            origin.excuse("codes of a form that is not decoded: not compared", name)
        else:
            yield Finding("carried-retyped", ours.file, ours.name, str(theirs), str(ours))
    elif _encoded_anew(kin, name) and _in_converted_module(kin, name):
        yield from _converted(kin, origin, name)
    elif _repaired(kin, name):
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


RECOMPUTED = (
    ".inv_freq",
    ".cos_cached",
    ".sin_cached",
    ".position_ids",
    ".masked_bias",
)  # buffers, not weights


def _gone(kin: Kin, origin: Parentage, name: str, theirs: Tensor) -> Iterator[Finding]:
    manifest = kin.manifest
    if _in_converted_module(kin, name):
        yield from _converted(kin, origin, name)
    elif manifest is not None and name in manifest.dropped:
        block = container_of(name)
        if (block in kin.containers or _of_the_trunk(kin, name)) and not name.endswith(RECOMPUTED):
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


def _of_the_trunk(kin: Kin, name: str) -> bool:
    """Whether a tensor is the embedding or the last norm of a stack of layers that is here."""
    front = _ENDS.sub("", name)
    return front != name and any(container.startswith(front) for container in kin.containers)


def _taken_apart(manifest: Manifest, name: str) -> bool:
    """Whether the manifest has a conversion of a part of this stack of experts."""
    bank = name.rpartition(".")[0]
    return any(weight.startswith(f"{bank}.0.") for weight in manifest.conversions)


def _re_encoded(kin: Kin, name: str) -> bool:
    """Whether a part of the parent's codes has new bytes by the manifest, though it may keep its dtype and shape."""
    if kin.manifest is None or not _in_converted_module(kin, name):
        return False
    linear = kin.linears.get(_split(kin.here[name], kin)[0])
    weight = linear.weight if linear is not None else None
    conversion = kin.manifest.conversions.get(weight.name) if weight is not None else None
    return conversion is not None and conversion.numerics in NUMERICS - {REBLOCK, RECONCILE}


def _converted(kin: Kin, origin: Parentage, name: str) -> Iterator[Finding]:
    """A tensor of a module that has another form here: nothing of it may be missing, and the manifest records it."""
    origin.excuse("converted: roundtrip and reproduce compare it", name)
    module, before = _split(kin.here[name], kin)[0], _split(name, kin)[0]
    if name != _main(kin, before):
        return
    yield from _unrecorded(kin, module)
    ours, theirs = _shape(kin.child, module, kin.linears), _shape(kin.parent, before, kin.theirs)
    if ours and theirs and not _alike(kin, module, ours, theirs):
        weight = _weight(kin.child, module, kin.linears.get(module))
        assert weight is not None
        expected = f"the parent's weight {list(theirs)} in another form"
        yield Finding("carried-retyped", weight.file, weight.name, expected, str(list(ours)))


def _shape(checkpoint: Checkpoint, module: str, linears: dict[str, Linear]) -> tuple[int, ...]:
    """The shape of a weight decoded; () where headers alone do not show it."""
    linear = linears.get(module)
    if linear is not None and linear.weight is not None:
        return () if linear.kind in INTEGER_SHAPES else linear.shape
    weight = _weight(checkpoint, module, None)
    return weight.shape if weight is not None and weight.dtype in FLOATS else ()


def _alike(kin: Kin, module: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two shapes are one weight's. A tool without a manifest may store it turned, or as another matrix."""
    if kin.manifest is None:
        return prod(ours) == prod(theirs)
    weight = _weight(kin.child, module, kin.linears.get(module))
    conversion = kin.manifest.conversions.get(weight.name) if weight is not None else None
    turned = conversion is not None and conversion.family in kin.manifest.transposed
    return ours == theirs or (turned and ours == (*theirs[:-2], *reversed(theirs[-2:])))


def _unrecorded(kin: Kin, module: str) -> Iterator[Finding]:
    """A weight in another form, of which a child with a manifest does not say how it was made."""
    weight = _weight(kin.child, module, kin.linears.get(module))
    if kin.manifest is None or weight is None:
        return
    if weight.name not in kin.manifest.conversions:
        expected = "a record of its conversion in the manifest"
        yield Finding("conversion-record", weight.file, weight.name, expected, "none")


def _main(kin: Kin, module: str) -> str:
    weight = _weight(kin.parent, module, kin.theirs.get(module))
    return weight.name if weight is not None else ""


def _in_converted_module(kin: Kin, name: str) -> bool:
    """Whether a parent's tensor is the weight, or a scale, of a module that has another form here."""
    module, leaf = _split(kin.here[name], kin)
    before_module = _split(name, kin)[0]
    if leaf not in WEIGHTS and leaf not in SCALE_DTYPES and module not in kin.theirs:
        return False
    ours, theirs = kin.linears.get(module), kin.theirs.get(before_module)
    if ours is None and theirs is None:
        return False
    weight = _weight(kin.child, module, ours)
    before = _weight(kin.parent, before_module, theirs)
    if weight is None or before is None:
        return False
    return leaf != "bias" and _form(weight, ours) != _form(before, theirs)


def _split(name: str, kin: Kin) -> tuple[str, str]:
    """(module, leaf); a stack of experts has the module's own name."""
    return (name, "weight") if name in kin.linears or name in kin.theirs else split_name(name)


def _weight(checkpoint: Checkpoint, module: str, linear: Linear | None) -> Tensor | None:
    if linear is not None and linear.weight is not None:
        return linear.weight
    return checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors.get(module)


def _form(weight: Tensor, linear: Linear | None) -> tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]:
    scales = linear.scales if linear is not None and linear.weight is not None else {}
    kept = (
        (leaf, scale.dtype, scale.shape)
        for leaf, scale in sorted(scales.items())
        if leaf.startswith(("weight", "scale"))
    )
    return weight.dtype, tuple(kept)


def _rounded(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype in FLOATS and theirs.dtype in FLOATS and ours.shape == theirs.shape


def _packed_elsewise(kin: Kin, ours: Tensor, theirs: Tensor) -> bool:
    """Whether floats became bitsandbytes' codes: bytes beside a table of their own."""
    tables = (f"{ours.name}.absmax", f"{ours.name}.quant_map", f"{split_name(ours.name)[0]}.SCB")
    return (
        theirs.dtype in FLOATS
        and ours.dtype in ("U8", "I8")
        and any(table in kin.child.tensors for table in tables)
    )


def _encoded_anew(kin: Kin, name: str) -> bool:
    """Whether the manifest says that the codes of a tensor's module were written anew from the parent's codes.

    Of a module that was reblocked the codes stay, so they are compared byte by byte.
    """
    linear = kin.linears.get(split_name(kin.here[name])[0])
    if kin.manifest is None or linear is None or linear.weight is None:
        return False
    conversion = kin.manifest.conversions.get(linear.weight.name)
    return conversion is not None and conversion.numerics != "reblock/1"


def _repaired(kin: Kin, name: str) -> bool:
    """Whether the manifest names a known repair of this very scale, of a packed module that has both its scales."""
    module, leaf = split_name(name)
    if kin.manifest is None or leaf not in REPAIRED_LEAVES or module not in kin.theirs:
        return False
    if kin.theirs[module].kind != "nvfp4":
        return False
    tensors = {f"{module}.{leaf}" for leaf in REPAIRED_LEAVES}
    return any(row.get("repair") in REPAIRS and row.get("tensor") in tensors for row in kin.manifest.repairs)


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
            declared = weight in conversions and _has_origin(kin, name, linear)
        else:
            declared = belongs_to(name, kin.parent.tensors, kin.child.tensors)
        if not declared:
            said = "a tensor of the parent or a converted scale"
            yield Finding("added-undeclared", tensor.file, name, said, str(tensor))


def _has_origin(kin: Kin, name: str, linear: Linear | None) -> bool:
    """Whether the parent has what a converted weight can be of: itself under any name, or the stack that it was in."""
    if linear is None or linear.weight is None:
        return False
    before = {new: old for old, new in (kin.manifest.renamed if kin.manifest is not None else {}).items()}
    olds = {before.get(each, each) for each in (linear.float_name, linear.weight.name, name)}
    theirs = kin.parent.tensors
    if any(old in theirs or old in kin.parent.elsewhere or split_name(old)[0] in kin.theirs for old in olds):
        return True
    bank = linear.module.partition(".experts.")[0]
    return belongs_to(name, theirs, kin.child.tensors) or any(
        module.startswith(f"{bank}.experts") for module in kin.theirs if ".experts." in linear.module
    )


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
