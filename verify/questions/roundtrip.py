"""Decodes a child and compares it with its parent, weight by weight: how much was lost?

For each weight whose form changed: relative error ||child - parent|| / ||parent||, cosine, largest error, the share of
codes at the largest value and of codes that are zero where the parent's weight is not. Sums are f64 over strips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from shardmill.verify.formats.blocks import block_of
from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.matrices import (
    Matrix,
    OpenFiles,
    can_decode,
    decoded,
    rounded_as,
    strips,
    values,
)
from shardmill.verify.formats.schemes import FLOATS, PACKED, Linear, quantized, split_name
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report

BEYOND = 7 / 6  # the largest code of E2M1, 6, is nearest up to 7; of E4M3, 448, up to 464


@dataclass(frozen=True, slots=True)
class Limits:
    """What a weight may lose. Fresh weights in block FP8 lose about 2.65 %, in NVFP4 about 9.5 %."""

    error: Mapping[str, float] = field(default_factory=lambda: {"fp8": 0.05, "fp4": 0.16})
    cosine: float = 0.985
    clipped: float = 0.001  # of codes: the largest one, for a weight that lies beyond it
    zeros: float = 0.25  # FP4 has only eight magnitudes, and rounds a fifth of a normal weight to zero
    native: float = 0.005  # below, the parent's weight was made from FP8 codes


@dataclass(slots=True)
class Loss:
    """Sums over one weight, or over the weights of a family."""

    name: str
    kind: str
    elements: int = 0
    difference: float = 0.0  # sum of squares
    parent: float = 0.0
    child: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    saturated: int = 0  # codes of the largest value: at least one a block, if the scale is amax / 448
    clipped: int = 0  # of these, for weights that are larger still
    zeros: int = 0
    equal: int = 0  # elements that are the parent's own once rounded to its dtype

    @property
    def error(self) -> float:
        return (
            sqrt(self.difference / self.parent)
            if self.parent
            else (0.0 if not self.difference else float("inf"))
        )

    @property
    def cosine(self) -> float:
        norm = sqrt(self.parent) * sqrt(self.child)
        return self.product / norm if norm else (1.0 if self.parent == self.child else 0.0)

    def add(self, other: Loss) -> None:
        for name in (
            "elements",
            "difference",
            "parent",
            "child",
            "product",
            "saturated",
            "clipped",
            "zeros",
            "equal",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight of the child and the parent's that it was made from."""

    name: str
    family: str
    child: Matrix
    parent: Matrix


def roundtrip(
    source: Source,
    parent: Source,
    limits: Limits,
    everything: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """`everything`: also the weights that have the parent's own form, such as packed experts."""
    report = Report("roundtrip")
    child = open_checkpoint(source, report)
    origin = open_checkpoint(parent, Report("roundtrip"))
    pairs = list(pairs_of(child, origin, everything))
    if not pairs:
        report.leaves_out("values", "no weight of the parent has another form here")
        return report
    done = Progress(sum(pair.child.tensor.bytes for pair in pairs), progress)

    def measure(pair: Pair, _: None) -> Loss:
        loss = loss_of(pair, source, parent)
        done.add(pair.child.tensor.bytes)
        return loss

    largest_first = sorted(pairs, key=lambda pair: -pair.child.tensor.bytes)
    remote = source.remote or parent.remote
    losses = pinned(measure, largest_first, lambda: None, done=done, remote=remote)
    by_name = {loss.name: loss for loss in losses}
    for pair in pairs:
        report.add(*_faults(pair, by_name[pair.name], limits))
    report.facts["families"] = _families(pairs, by_name, limits)
    report.checks("values")
    return report


def pairs_of(child: Checkpoint, parent: Checkpoint, everything: bool) -> Iterator[Pair]:
    """The child's quantized weights with the parent's tensors of the same name (or the name before a renaming)."""
    ours, theirs = quantized(child.tensors), quantized(parent.tensors)
    renamed = {new: old for old, new in (child.manifest.renamed if child.manifest else {}).items()}
    declared = declaration(child.quantization)[0] if child.quantization else None
    declared_there = declaration(parent.quantization)[0] if parent.quantization else None
    for linear in ours.values():
        if not can_decode(linear) or linear.weight is None or not _readable(child, linear):
            continue
        here = (
            f"{linear.module}.weight" if linear.weight.name.endswith(".weight_packed") else linear.weight.name
        )
        name = renamed.get(here, here)
        their_linear = theirs.get(split_name(name)[0])
        if their_linear is not None and can_decode(their_linear) and their_linear.weight is not None:
            if not everything or their_linear.shape != linear.shape or not _readable(parent, their_linear):
                continue
            block = block_of(their_linear, declared_there)
            other = Matrix(their_linear.weight, their_linear, block)
        elif name in parent.tensors and parent.tensors[name].dtype in FLOATS:
            if parent.tensors[name].shape != linear.shape or not parent.readable(parent.tensors[name]):
                continue
            other = Matrix(parent.tensors[name])
        else:
            continue
        conversion = child.manifest.conversions.get(linear.weight.name) if child.manifest else None
        family = conversion.family if conversion is not None else kind_of(linear.module)
        matrix = Matrix(linear.weight, linear, block_of(linear, declared, child.manifest))
        yield Pair(linear.weight.name, family, matrix, other)


def _readable(checkpoint: Checkpoint, linear: Linear) -> bool:
    tensors = [*linear.scales.values(), *([linear.weight] if linear.weight else [])]
    return all(checkpoint.readable(tensor) for tensor in tensors)


def loss_of(pair: Pair, source: Source, parent: Source) -> Loss:
    assert pair.child.linear is not None
    loss = Loss(pair.name, pair.child.linear.kind)
    top = 0x7 if pair.child.linear.kind in PACKED else 0x7E
    with OpenFiles(source) as ours, OpenFiles(parent) as theirs:
        for first, last in strips(pair.child):
            got, codes = decoded(pair.child, ours, first, last)
            want = values(pair.parent, theirs, first, last)
            with np.errstate(all="ignore"):
                away = (got - want).astype(np.float64)
                a, b = got.astype(np.float64), want.astype(np.float64)
                # np.vdot would wake BLAS's threads, which fight for the cores of ours.
                loss.difference += float(np.multiply(away, away).sum())
                loss.parent += float(np.multiply(b, b).sum())
                loss.child += float(np.multiply(a, a).sum())
                loss.product += float(np.multiply(a, b).sum())
                loss.largest = max(loss.largest, float(np.abs(away).max(initial=0)))
            magnitude = codes & top if top == 0x7 else codes & 0x7F
            at_top = magnitude == top
            loss.saturated += int(np.count_nonzero(at_top))
            loss.clipped += int(np.count_nonzero(at_top & (np.abs(want) > BEYOND * np.abs(got))))
            loss.zeros += int(np.count_nonzero((magnitude == 0) & (want != 0)))
            loss.equal += int(np.count_nonzero(rounded_as(pair.parent.tensor, got) == want))
            loss.elements += got.size
    return loss


def _faults(pair: Pair, loss: Loss, limits: Limits) -> Iterator[Finding]:
    file, share = pair.child.tensor.file, max(loss.elements, 1)
    limit = limits.error["fp4" if loss.kind in PACKED else "fp8"]
    if not loss.error <= limit:  # NaN is not
        yield Finding("roundtrip-error", file, loss.name, f"at most {limit:.1%}", f"{loss.error:.2%}")
    if not loss.cosine >= limits.cosine:
        yield Finding("roundtrip-cosine", file, loss.name, f"at least {limits.cosine}", f"{loss.cosine:.5f}")
    if loss.clipped / share > limits.clipped:
        got = f"{loss.clipped / share:.1%} of codes"
        yield Finding("clipped-codes", file, loss.name, f"at most {limits.clipped:.1%}", got)
    if loss.zeros / share > limits.zeros:
        got = f"{loss.zeros / share:.1%} of codes"
        yield Finding("vanished-codes", file, loss.name, f"at most {limits.zeros:.0%} rounded to zero", got)


def _families(pairs: list[Pair], losses: Mapping[str, Loss], limits: Limits) -> dict[str, str]:
    families: dict[str, Loss] = {}
    members: dict[str, list[Loss]] = {}
    for pair in pairs:
        loss = losses[pair.name]
        families.setdefault(pair.family, Loss(pair.family, loss.kind)).add(loss)
        members.setdefault(pair.family, []).append(loss)
    return {name: _sentence(families[name], members[name], limits) for name in sorted(families)}


def _sentence(family: Loss, members: list[Loss], limits: Limits) -> str:
    share = max(family.elements, 1)
    native = sum(loss.error < limits.native for loss in members)
    said = (
        f"{len(members)} weights, error {family.error:.3%} (worst {max(loss.error for loss in members):.3%}), "
        f"cosine {min(loss.cosine for loss in members):.6f} or more, largest {family.largest:.3g}, "
        f"saturated {family.saturated / share:.3%}, zeros {family.zeros / share:.3%}"
    )
    if native:
        said += f"; {native} are native FP8 copies, {family.equal / share:.3%} equal once rounded to the parent's dtype"
    return said
