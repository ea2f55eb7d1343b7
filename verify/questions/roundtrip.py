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

from shardmill.verify.formats.matrices import (
    column_order,
    decoded,
    rounded_as,
    strips,
    values,
)
from shardmill.verify.questions.companions import native_layout
from shardmill.verify.questions.foldings import Folding, foldings_of
from shardmill.verify.questions.local_errors import MOVED, NAMED_MAX, LocalErrors
from shardmill.verify.questions.local_fits import LocalFits
from shardmill.verify.questions.pairs import Pair, left_out, pairs_of
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report

ROUNDED_DOWN = ("mxfp4", "gpt-oss", "mxfp8")
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
        default_factory=lambda: {
            "fp8": 0.05,
            "fp4": 0.16,
            "table": 0.15,  # in blocks of 64
            "table4": 0.2,
            "int": 0.45,
            "int2": 1.6,
            "int8": 0.3,
            "float": 0.005,
            "same": 1e-4,
        }
    )
    gain: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp8": 0.02,
            "fp4": 0.02,
            "table": 0.03,
            "table4": 0.03,
            "mx": 0.06,
            "int": 0.08,
            "int2": 0.15,
            "int8": 0.02,
            "float": 0.005,
            "same": 1e-4,
        }
    )
    cosine: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp8": 0.985,
            "fp4": 0.985,
            "table": 0.9,
            "table4": 0.9,
            "int": 0.9,
            "int2": 0.4,
            "int8": 0.95,
            "float": 0.985,
            "same": 0.985,
        }
    )
    shift: Mapping[str, float] = field(default_factory=lambda: {"int": 0.1, "int8": 0.01})  # of the mean
    clipped: float = 0.001  # of codes: the largest one, for a weight that lies beyond it
    zeros: float = 0.25  # FP4 has only eight magnitudes, and rounds a fifth of a normal weight to zero
    zeros_of_four: float = 0.5  # INT4 under one scale a row, and columns that AWQ made smaller
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
    shift: float = 0.0  # sum of differences
    largest: float = 0.0
    saturated: int = 0  # codes of the largest value: at least one a block, if the scale is amax / 448
    clipped: int = 0  # of these, for weights that are larger still
    zeros: int = 0
    equal: int = 0  # elements that are the parent's own once rounded to its dtype
    odd: tuple[str, ...] = ()  # rows, columns and blocks that are not the parent's
    segments: tuple[
        tuple[float, float], ...
    ] = ()  # (error, gain) of each matrix of a bank, of each fused part

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
            "shift",
            "saturated",
            "clipped",
            "zeros",
            "equal",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)


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
    for form, count in left_out(child, origin, pairs).items():
        report.leaves_out(f"values of {count:,} weights", f"{form} are not compared")
    foldings = foldings_of(child, origin, pairs)
    pairs = [pair for pair in pairs if pair.name not in foldings.judged]
    report.add(*foldings.findings)
    if not pairs:
        why = native_layout(child, origin) or "no weight of the parent has another form here"
        report.leaves_out("values", why)
        return report
    done = Progress(sum(pair.child.tensor.bytes for pair in pairs), progress)

    def measure(pair: Pair, _: None) -> Loss:
        loss = loss_of(pair, source, parent, foldings.by_weight.get(pair.name))
        done.add(pair.child.tensor.bytes)
        return loss

    largest_first = sorted(pairs, key=lambda pair: -pair.child.tensor.bytes)
    remote = source.remote or parent.remote
    losses = pinned(measure, largest_first, lambda: None, done=done, remote=remote)
    by_name = {loss.name: loss for loss in losses}
    unproven = [pair.name for pair in pairs if (one := foldings.by_weight.get(pair.name)) and one.unproven]
    if unproven:
        why = f"no norm and no weight beside takes a factor a column or a row back, as of {unproven[0]}"
        report.leaves_out(f"such factors of {len(unproven):,} weights", why)
    for pair in pairs:
        report.add(*_faults(pair, by_name[pair.name], limits))
    report.facts["families"] = _families(pairs, by_name, limits)
    report.checks("values")
    return report


def loss_of(pair: Pair, source: Source, parent: Source, folding: Folding | None = None) -> Loss:
    """`folding`: what the weight was multiplied by on purpose."""
    kind = pair.child.linear.kind if pair.child.linear is not None else "float"
    loss = Loss(pair.name, kind)
    limited = pair.limited
    with OpenFiles(source) as ours, OpenFiles(parent) as theirs:
        local, segments = _local(pair, ours), pair.segments
        sums = np.zeros((3, int(segments[-1]) + 1 if len(segments) else 0))
        for first, last in strips(pair.child):
            want = values(pair.parent, theirs, first, last)
            if folding is not None:
                want = want * folding.columns * folding.rows[first:last, None]
            if pair.child.linear is None:
                got = values(pair.child, ours, first, last)
            else:
                got, codes = decoded(pair.child, ours, first, last)
                _add_codes(loss, limited, codes, got, want)
            _add_sums(loss, got, want)
            if len(segments):
                _add_segments(sums, segments[first:last], got, want)
            if local is not None:
                with np.errstate(all="ignore"):
                    local.feed(first, got, want)
            loss.equal += int(np.count_nonzero(rounded_as(pair.parent.tensor, got) == want))
            loss.elements += got.size
    loss.odd = tuple(local.odd()) if local is not None else ()
    away, product, square = sums
    some = square > 0
    rooted = np.sqrt(away[some] / square[some])
    loss.segments = tuple(zip(rooted.tolist(), (product[some] / square[some]).tolist(), strict=True))
    return loss


def _add_segments(
    sums: NDArray[np.float64],
    segments: NDArray[np.int64],
    got: NDArray[np.float32],
    want: NDArray[np.float32],
) -> None:
    """Squared errors, products and the parent's squares, by segment."""
    with np.errstate(all="ignore"):
        for part, products in zip(sums, ((got - want) ** 2, got * want, want * want), strict=True):
            np.add.at(part, segments, products.sum(1, dtype=np.float64))


def _local(pair: Pair, ours: OpenFiles) -> LocalErrors | LocalFits | None:
    """What looks at rows, columns and blocks, by how their codes were made."""
    if pair.limited == "int2" or pair.integer_bits == 3:
        return None  # too coarse for its parts to tell
    if pair.limited.startswith("int"):
        eight = pair.limited == "int8"
        return LocalFits(pair.child.shape, pair.child.block, eight, column_order(pair.child, ours))
    return LocalErrors(pair.child.shape, pair.child.block, pair.limited) if pair.limited in MOVED else None


def _add_sums(loss: Loss, got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    with np.errstate(all="ignore"):
        away = (got - want).astype(np.float64)
        a, b = got.astype(np.float64), want.astype(np.float64)
        # np.vdot would wake BLAS's threads, which fight for the cores of ours.
        loss.difference += float(np.multiply(away, away).sum())
        loss.parent += float(np.multiply(b, b).sum())
        loss.child += float(np.multiply(a, a).sum())
        loss.product += float(np.multiply(a, b).sum())
        loss.shift += float(away.sum())
        loss.largest = max(loss.largest, float(np.abs(away).max(initial=0)))


def _add_codes(
    loss: Loss, limited: str, codes: NDArray[np.uint8], got: NDArray[np.float32], want: NDArray[np.float32]
) -> None:
    """Counts codes at the largest value and codes of zero; integer codes have no sign bit to take off."""
    if limited.startswith(("table", "int")):
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
    limit = limits.error[limited] * _times_of(pair)
    gain = limits.gain["mx" if loss.kind in ROUNDED_DOWN else limited]
    if not loss.error <= limit:  # NaN is not
        yield Finding("roundtrip-error", file, loss.name, f"at most {limit:.1%}", f"{loss.error:.2%}")
    cosine = limits.cosine[limited]
    if not loss.cosine >= cosine:
        yield Finding("roundtrip-cosine", file, loss.name, f"at least {cosine}", f"{loss.cosine:.5f}")
    if abs(loss.gain - 1) > gain and loss.error <= limit:
        got = f"{loss.gain:.4f} times"
        yield Finding("roundtrip-gain", file, loss.name, f"within {gain:.1%} of the parent's size", got)
    if loss.parent and abs(shift := loss.shift / sqrt(loss.parent * share)) > limits.shift.get(limited, 1.0):
        got = f"{shift:+.3f} of it"
        yield Finding("roundtrip-gain", file, loss.name, "the parent's mean, within its size", got)
    if pair.claimed and loss.difference:
        got = f"relative error {loss.error:.2g}"
        yield Finding("claim-false", file, loss.name, "every block exact, as the manifest says", got)
    yield from _odd_segments(pair, loss, limit, gain)
    if loss.odd:
        expected = "each row, column and block within its rounding"
        yield Finding("roundtrip-local", file, loss.name, expected, ", ".join(loss.odd))
    if loss.clipped / share > limits.clipped:
        got = f"{loss.clipped / share:.1%} of codes"
        yield Finding("clipped-codes", file, loss.name, f"at most {limits.clipped:.1%}", got)
    zeros = limits.zeros_of_four if limited in ("int", "int2") else limits.zeros
    if loss.zeros / share > zeros:
        got = f"{loss.zeros / share:.1%} of codes"
        yield Finding("vanished-codes", file, loss.name, f"at most {zeros:.0%} rounded to zero", got)


def _odd_segments(pair: Pair, loss: Loss, error: float, gain: float) -> Iterator[Finding]:
    """Single experts or parts that a sound whole hides."""
    odd = [
        f"number {n} (error {lost:.1%}, {size:.4f} times)"
        for n, (lost, size) in enumerate(loss.segments)
        if not lost <= error or abs(size - 1) > gain
    ]
    if odd:
        expected = "each matrix of the bank, or each fused part, within the bounds of a weight"
        more = [f"{len(odd) - NAMED_MAX:,} more"] if len(odd) > NAMED_MAX else []
        got = ", ".join([*odd[:NAMED_MAX], *more])
        yield Finding("roundtrip-local", pair.child.tensor.file, loss.name, expected, got)


def _times_of(pair: Pair) -> float:
    """How much more a table of sixteen numbers loses in blocks larger than 64."""
    coded = pair.child if pair.child.linear is not None else pair.parent
    return max(coded.state.block / 64, 1.0) ** 0.25 if coded.state is not None else 1.0


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
