"""Decodes a child and compares it with its parent, weight by weight: how much was lost?

For each weight whose form changed, whichever side has the codes: relative error ||child - parent|| / ||parent||,
cosine, largest error, the share of codes at the largest value and of codes that are zero where the parent's weight is
not. Sums are f64 over strips. Rows, columns and blocks are held to the parent one by one (`local_errors`).
What was not compared is counted by its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.declared import Declaration, declaration
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.laws import REBLOCK, RECAST
from shardmill.verify.formats.matrices import (
    Matrix,
    can_decode,
    decoded,
    matrix_of,
    rounded_as,
    strips,
    values,
)
from shardmill.verify.formats.schemes import FLOATS, PACKED, Linear, is_scale, quantized, split_name
from shardmill.verify.questions.companions import names_here, native_layout
from shardmill.verify.questions.coverage import form_of
from shardmill.verify.questions.local_errors import MOVED, LocalErrors
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.manifest import Conversion
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report

ROUNDED_DOWN = ("mxfp4", "gpt-oss", "mxfp8")
INTEGERS = ("int8", "int-pack", "gptq", "awq")
BEYOND = 7 / 6  # the largest code of E2M1, 6, is nearest up to 7; of E4M3, 448, up to 464


@dataclass(frozen=True, slots=True)
class Limits:
    """What a weight may lose. Fresh weights in block FP8 lose about 2.65 %, in NVFP4 about 9.5 %, in INT4 12 %.

    Integers may lose more: GPTQ chooses codes by the outputs of data, not by the weights (19.6 % measured, where
    rounding to the nearest loses 12 %). FP8 that a tool decoded and encoded again loses 4.5 % and moves by up to 1.5 %.

    `gain` is how far the projection on the parent's weight may be from 1: rounding is as often up as down, but powers
    of two that are rounded down clip the largest weights of a block.
    """

    error: Mapping[str, float] = field(
        default_factory=lambda: {"fp8": 0.05, "fp4": 0.16, "int": 0.3, "float": 0.005, "same": 1e-4}
    )
    gain: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp8": 0.02,
            "fp4": 0.02,
            "mx": 0.06,
            "int": 0.02,
            "float": 0.005,
            "same": 1e-4,
        }
    )
    cosine: float = 0.985
    integers: float = 0.95  # cosine of integer codes
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
    odd: tuple[str, ...] = ()  # rows, columns and blocks that are not the parent's

    @property
    def error(self) -> float:
        return (
            sqrt(self.difference / self.parent)
            if self.parent
            else (0.0 if not self.difference else float("inf"))
        )

    @property
    def gain(self) -> float:
        """<child, parent> / <parent, parent>"""
        return self.product / self.parent if self.parent else 1.0

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
    same: bool = False  # both must decode to the same values: codes were kept, their scales written anew
    claimed: bool = False  # the manifest says that every block is exact

    @property
    def limited(self) -> str:
        """Which limits hold: "fp8", "fp4", "int", "float" or "same"."""
        coded = self.child.linear or self.parent.linear
        if self.same:
            return "same"
        if self.child.linear is None or coded is None:
            return "float"
        kind = coded.kind
        return "fp4" if kind in PACKED else "int" if kind in INTEGERS else "fp8"


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
    origin = open_parent(parent, child, report, Report("roundtrip"))
    pairs = list(pairs_of(child, origin, everything))
    for form, count in _left_out(child, origin, pairs).items():
        report.leaves_out(f"values of {count:,} weights", f"{form} are not compared")
    if not pairs:
        why = native_layout(child, origin) or "no weight of the parent has another form here"
        report.leaves_out("values", why)
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
    """Each weight with another form here than in the parent, by the parent's name (before a renaming)."""
    ours, theirs = quantized(child.tensors), quantized(parent.tensors)
    renamed = {new: old for old, new in names_here(child, parent).items()}
    declared = declaration(child.quantization)[0] if child.quantization else None
    declared_there = declaration(parent.quantization)[0] if parent.quantization else None
    for linear in ours.values():
        if not can_decode(linear) or linear.weight is None or not _readable(child, linear):
            continue
        name = renamed.get(linear.float_name, linear.float_name)
        their_linear = theirs.get(split_name(name)[0])
        kept = their_linear is not None and _same_form(linear, their_linear)
        if kept and not everything and not _repaired(child, linear):
            continue
        other = _parents_matrix(parent, their_linear, name, declared_there)
        matrix = matrix_of(linear, declared, child.manifest)
        conversion = child.manifest.conversions.get(linear.weight.name) if child.manifest else None
        if other is not None and _transposed(child, conversion, other):
            other = Matrix(other.tensor, transposed=True)
        if other is None or other.shape != matrix.shape:
            continue
        family = conversion.family if conversion is not None else kind_of(linear.module)
        same = conversion is not None and (conversion.numerics == REBLOCK or _claims_all(conversion))
        claimed = conversion is not None and _claims_all(conversion)
        yield Pair(linear.weight.name, family, matrix, other, same, claimed)
    yield from _float_pairs(child, parent, theirs, renamed, declared_there)


def _transposed(child: Checkpoint, conversion: Conversion | None, parent: Matrix) -> bool:
    """Whether the parent's floats have rows for columns, which a square weight's shape does not show."""
    manifest = child.manifest
    said = manifest is not None and conversion is not None and conversion.family in manifest.transposed
    return said and parent.linear is None and len(parent.tensor.shape) >= 2


def _claims_all(conversion: Conversion) -> bool:
    """Whether the manifest says that every block of a weight made of codes decodes to the parent's numbers."""
    blocks = conversion.counts.get("blocks", 0)
    return conversion.numerics == RECAST and conversion.counts.get("exact_blocks") == blocks > 0


def _same_form(linear: Linear, other: Linear) -> bool:
    """Whether a weight has the parent's own form; then its bytes are held to the parent's by `integrity`."""

    def shapes(of: Linear) -> list[tuple[str, str, tuple[int, ...]]]:
        grid = [of.weight, of.grid]
        return [(split_name(t.name)[1], t.dtype, t.shape) for t in grid if t is not None]

    return shapes(linear) == shapes(other)


def _repaired(child: Checkpoint, linear: Linear) -> bool:
    scales = {scale.name for scale in linear.scales.values()}
    return child.manifest is not None and any(row.get("tensor") in scales for row in child.manifest.repairs)


def _parents_matrix(
    parent: Checkpoint, linear: Linear | None, name: str, declared: Declaration | None
) -> Matrix | None:
    if linear is not None and linear.weight is not None and can_decode(linear):
        return matrix_of(linear, declared) if _readable(parent, linear) else None
    tensor = parent.tensors.get(name)
    if tensor is None or tensor.dtype not in FLOATS or not parent.readable(tensor):
        return None
    return Matrix(tensor)


def _float_pairs(
    child: Checkpoint,
    parent: Checkpoint,
    theirs: Mapping[str, Linear],
    renamed: Mapping[str, str],
    declared: Declaration | None,
) -> Iterator[Pair]:
    """Floats that are codes in the parent, or floats of another dtype."""
    for tensor in child.tensors.values():
        name = renamed.get(tensor.name, tensor.name)
        if (
            tensor.dtype not in FLOATS
            or not tensor.shape
            or not child.readable(tensor)
            or is_scale(tensor.name)
        ):
            continue
        linear = theirs.get(split_name(name)[0]) if split_name(name)[1] != "bias" else None
        before = parent.tensors.get(name)
        if before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape):
            continue
        other = _parents_matrix(parent, linear, name, declared)
        matrix = Matrix(tensor)
        if other is not None and other.shape == matrix.shape:
            conversion = child.manifest.conversions.get(tensor.name) if child.manifest else None
            yield Pair(tensor.name, conversion.family if conversion else kind_of(name), matrix, other)


def _left_out(child: Checkpoint, parent: Checkpoint, pairs: list[Pair]) -> dict[str, int]:
    """Form -> how many quantized weights here were not compared, though the parent has other bytes for them."""
    paired = {pair.name for pair in pairs}
    theirs = quantized(parent.tensors)
    left: dict[str, int] = {}
    for linear in quantized(child.tensors).values():
        weight = linear.weight
        if weight is None or weight.name in paired:
            continue
        before = theirs.get(linear.module)
        if before is not None and _same_form(linear, before):
            continue
        form = form_of(weight, child.tensors, linear)
        left[form] = left.get(form, 0) + 1
    return left


def _readable(checkpoint: Checkpoint, linear: Linear) -> bool:
    weights = [linear.weight] if linear.weight else []
    tensors = [*linear.scales.values(), *linear.extras.values(), *weights]
    return all(checkpoint.readable(tensor) for tensor in tensors)


def loss_of(pair: Pair, source: Source, parent: Source) -> Loss:
    kind = pair.child.linear.kind if pair.child.linear is not None else "float"
    loss = Loss(pair.name, kind)
    limited = pair.limited
    local = LocalErrors(pair.child.shape, pair.child.block, limited) if limited in MOVED else None
    with OpenFiles(source) as ours, OpenFiles(parent) as theirs:
        for first, last in strips(pair.child):
            want = values(pair.parent, theirs, first, last)
            if pair.child.linear is None:
                got = values(pair.child, ours, first, last)
            else:
                got, codes = decoded(pair.child, ours, first, last)
                _add_codes(loss, limited, codes, got, want)
            _add_sums(loss, got, want)
            if local is not None:
                with np.errstate(all="ignore"):
                    local.feed(first, got, want)
            loss.equal += int(np.count_nonzero(rounded_as(pair.parent.tensor, got) == want))
            loss.elements += got.size
    loss.odd = tuple(local.odd()) if local is not None else ()
    return loss


def _add_sums(loss: Loss, got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    with np.errstate(all="ignore"):
        away = (got - want).astype(np.float64)
        a, b = got.astype(np.float64), want.astype(np.float64)
        # np.vdot would wake BLAS's threads, which fight for the cores of ours.
        loss.difference += float(np.multiply(away, away).sum())
        loss.parent += float(np.multiply(b, b).sum())
        loss.child += float(np.multiply(a, a).sum())
        loss.product += float(np.multiply(a, b).sum())
        loss.largest = max(loss.largest, float(np.abs(away).max(initial=0)))


def _add_codes(
    loss: Loss, limited: str, codes: NDArray[np.uint8], got: NDArray[np.float32], want: NDArray[np.float32]
) -> None:
    """Counts codes at the largest value and codes of zero; integer codes have no sign bit to take off."""
    if limited == "int":
        loss.zeros += int(np.count_nonzero((got == 0) & (want != 0)))
        return
    mask, top = (0x7, 0x7) if limited == "fp4" else (0x7F, 0x7E)
    magnitude = codes & mask
    at_top = magnitude == top
    loss.saturated += int(np.count_nonzero(at_top))
    if (
        loss.kind not in ROUNDED_DOWN
    ):  # powers of two below amax / 6, as the MX standard has them, clip by design
        loss.clipped += int(np.count_nonzero(at_top & (np.abs(want) > BEYOND * np.abs(got))))
    loss.zeros += int(np.count_nonzero((magnitude == 0) & (want != 0)))


def _faults(pair: Pair, loss: Loss, limits: Limits) -> Iterator[Finding]:
    file, share = pair.child.tensor.file, max(loss.elements, 1)
    limited = pair.limited
    limit = limits.error[limited]
    gain = limits.gain["mx" if loss.kind in ROUNDED_DOWN else limited]
    if not loss.error <= limit:  # NaN is not
        yield Finding("roundtrip-error", file, loss.name, f"at most {limit:.1%}", f"{loss.error:.2%}")
    cosine = limits.integers if limited == "int" else limits.cosine
    if not loss.cosine >= cosine:
        yield Finding("roundtrip-cosine", file, loss.name, f"at least {cosine}", f"{loss.cosine:.5f}")
    if abs(loss.gain - 1) > gain and loss.error <= limit:
        got = f"{loss.gain:.4f} times"
        yield Finding("roundtrip-gain", file, loss.name, f"within {gain:.1%} of the parent's size", got)
    if pair.claimed and loss.difference:
        got = f"relative error {loss.error:.2g}"
        yield Finding("claim-false", file, loss.name, "every block exact, as the manifest says", got)
    if loss.odd:
        expected = "each row, column and block within its rounding"
        yield Finding("roundtrip-local", file, loss.name, expected, ", ".join(loss.odd))
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
