"""Which tool made it? The formula that gives every sampled block from the parent, bit for bit, or the best and
its share.

Blocks of every quantized weight are drawn, each known formula is computed on the parent's values, and scale
and codes are compared as bits. A checkpoint whose codes were chosen with data (GPTQ, AWQ, AutoRound) fits no
formula, nor does an altered one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.declared import Declaration, declaration
from shardmill.verify.formats.formulas import FORMULAS, LOWS, PROOFS, Formula, Sample
from shardmill.verify.formats.fused import fused_groups
from shardmill.verify.formats.linear import FLOATS, SECOND, Linear
from shardmill.verify.formats.matrices import (
    Matrix,
    can_decode,
    decoded,
    largest,
    matrix_of,
    totals_of,
    values,
)
from shardmill.verify.formats.opened import scale_values
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.formats.table import FORMS
from shardmill.verify.formats.zero_points import zeros_of
from shardmill.verify.questions.companions import names_here
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.header import DTYPE_BITS
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Finding, Report

WEIGHTS = 64  # that are drawn from, of each form
SAMPLE_ELEMENTS = 1 << 16  # of a weight, in rows of blocks: at least three, at most 64
BLOCKS_OF_A_ROW = 128
ENOUGH_BLOCKS = 48  # to tell that a formula is another
ELEMENTS_MAX = 1 << 22  # of a row of blocks
PROOF_BLOCKS = 24  # of a weight, for the slow proofs
ALTERED_MAX = 20  # that are named of a weight
E4M3_KINDS = (
    "fp8-block",
    "fp8-grid",
    "fp8-tensor",
    "fp8-channel",
    "fp8-pbwo",
    "comfy-fp8",
    "mistral-fp8",
    "mxfp8",
)
WHOLE = ("fp8-tensor", "comfy-fp8", "mistral-fp8")


@dataclass(slots=True)
class Tally:
    """Of one form: blocks seen, and of these the ones that each formula gives."""

    blocks: int = 0
    weights: int = 0
    equal: dict[str, int] = field(default_factory=dict)
    altered: dict[str, list[Finding]] = field(default_factory=dict)  # by formula

    def hopeless(self, name: str) -> bool:
        """Whether a formula has given less than half of enough blocks, so that it is not asked again."""
        return self.blocks >= ENOUGH_BLOCKS and 2 * self.equal.get(name, 0) < self.blocks

    @property
    def best(self) -> list[str]:
        """The formulas that give the most blocks, in the order of the table."""
        most = max(self.equal.values(), default=0)
        return [name for name, count in self.equal.items() if count == most and most]

    @property
    def explained(self) -> bool:
        return bool(self.blocks) and max(self.equal.values(), default=0) == self.blocks


def origin(
    source: Source,
    parent: Source,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    report = Report("origin")
    child = open_checkpoint(source, report)
    theirs = open_parent(parent, child, report, Report("origin"))
    tallies = tallies_of(child, theirs, seed, progress)
    if not tallies:
        report.leaves_out("origin", "no weight here has the floats that it was made from in that parent")
        return report
    report.checks("origin")
    report.facts["seed"] = seed
    for kind in sorted(tallies):
        report.facts[FORMS[kind].title] = said(tallies[kind])
    report.add(*unknown(tallies))
    return report


def unknown(tallies: Mapping[str, Tally]) -> Iterator[Finding]:
    """The forms of which no formula gives every block."""
    for kind, tally in sorted(tallies.items()):
        if not tally.explained:
            most, best = max(tally.equal.values(), default=0), tally.best
            got = f"at most {most:,} of {tally.blocks:,} blocks" + (f" ({best[0]})" if best else "")
            yield Finding(
                "origin-unknown", "", FORMS[kind].title, "a formula that gives every sampled block", got
            )


def said(tally: Tally) -> str:
    """`llm-compressor on BF16: amax / 448 ...; 1,200 of 1,200 blocks of 28 weights`"""
    best = tally.best
    count = (
        f"{max(tally.equal.values(), default=0):,} of {tally.blocks:,} blocks of {tally.weights:,} weights"
    )
    if not best:
        return f"no known formula; 0 of {tally.blocks:,} blocks of {tally.weights:,} weights"
    tools = TOOLS[best[0]]
    others = f"; the same blocks by: {'; '.join(best[1:])}" if len(best) > 1 else ""
    name = f"{best[0]} ({tools})"
    return f"{name}: {count}{others}" if tally.explained else f"no known formula; the best is {name}: {count}"


def tallies_of(
    child: Checkpoint,
    parent: Checkpoint,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    elements: int = SAMPLE_ELEMENTS,
) -> dict[str, Tally]:
    """Kind -> what the formulas give of the blocks drawn with this seed."""
    declared = declaration(child.quantization)[0] if child.quantization else None
    random = np.random.Generator(np.random.PCG64(seed))
    linears = quantized(child.tensors)
    groups = {m: list(members.values()) for _, _, members in fused_groups(linears) for m in members.values()}
    tallies: dict[str, Tally] = {}
    chosen = list(_drawn(child, parent, linears, random))
    before = {new: old for old, new in names_here(child, parent).items()}
    with OpenFiles(child.source) as ours, OpenFiles(parent.source) as theirs:
        for number, linear in enumerate(chosen):
            tally = tallies.setdefault(linear.kind, Tally())
            _count(
                tally,
                linear,
                _Pair(child, parent, before, declared, ours, theirs, linears, groups),
                random,
                elements,
            )
            progress(number + 1, len(chosen))
    return {kind: tally for kind, tally in tallies.items() if tally.blocks}


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both checkpoints, opened."""

    child: Checkpoint
    parent: Checkpoint
    before: Mapping[str, str]  # name here -> the parent's, where they differ
    declared: Declaration | None
    ours: OpenFiles
    theirs: OpenFiles
    linears: Mapping[str, Linear]
    groups: Mapping[str, list[str]]

    def floats(self, linear: Linear) -> Matrix | None:
        """The parent's floats of a module, of the same shape, or None."""
        name = linear.float_name
        tensor = self.parent.tensors.get(self.before.get(name, name))
        if tensor is None or tensor.dtype not in FLOATS or not self.parent.readable(tensor):
            return None
        matrix = matrix_of(linear, self.declared, self.child.manifest)
        shape = (*linear.shape[:-1], matrix.shape[1])
        return Matrix(tensor) if tensor.shape == shape else None


def _drawn(
    child: Checkpoint, parent: Checkpoint, linears: Mapping[str, Linear], random: np.random.Generator
) -> Iterator[Linear]:
    """Up to WEIGHTS weights of each form that can be decoded and whose floats the parent has."""
    by_kind: dict[str, list[Linear]] = {}
    for linear in linears.values():
        tensors = [*linear.scales.values(), *([linear.weight] if linear.weight else [])]
        plain = linear.extras.keys() <= {
            "weight_shape",
            "weight_zero_point",
        }  # no formula knows reordered groups
        if plain and can_decode(linear) and all(child.readable(tensor) for tensor in tensors):
            by_kind.setdefault(linear.kind, []).append(linear)
    for found in by_kind.values():
        for place in np.sort(random.permutation(len(found))[:WEIGHTS]):
            yield found[int(place)]


def _count(tally: Tally, linear: Linear, pair: _Pair, random: np.random.Generator, elements: int) -> None:
    parent = pair.floats(linear)
    if parent is None:
        return
    seen = False
    for first, sample in _samples(linear, parent, pair, random, elements):
        seen = True
        wanted = [
            formula
            for formula in _asked(linear.kind, parent.tensor.dtype)
            if not tally.hopeless(formula.name)
        ]
        tally.blocks += len(sample.values)
        for formula in wanted:
            tally.equal[formula.name] = tally.equal.get(formula.name, 0) + _given(formula, sample, random)
            if linear.kind in E4M3_KINDS and formula.proves is None:
                found = list(_altered(formula, linear, first, sample))
                tally.altered.setdefault(formula.name, []).extend(found[:ALTERED_MAX])
    tally.weights += seen


def _given(formula: Formula, sample: Sample, random: np.random.Generator) -> int:
    """How many blocks the formula gives; of the slow proofs, all if it gives each of some that are drawn."""
    if formula.proves is None or len(sample.values) <= PROOF_BLOCKS:
        return int(formula.equal(sample).sum())
    got = int(formula.equal(_some(sample, random.permutation(len(sample.values))[:PROOF_BLOCKS])).sum())
    return len(sample.values) if got == PROOF_BLOCKS else got


def _altered(formula: Formula, linear: Linear, first: int, sample: Sample) -> Iterator[Finding]:
    assert linear.weight is not None
    for place in np.flatnonzero(formula.altered(sample)):
        got = f"the block from row {first:,}, number {int(place):,} in it, has another scale or other codes"
        yield Finding(
            "block-differs", linear.weight.file, linear.weight.name, f"{formula.name}, as the others", got
        )


def _asked(kind: str, dtype: str) -> Iterator[Formula]:
    for formula in (*FORMULAS, *PROOFS):
        if kind in formula.kinds and not (formula.rounds_low and dtype == "F32"):
            yield formula


def _some(sample: Sample, n: NDArray[np.int64]) -> Sample:
    return sample.part(n)


def _samples(
    linear: Linear, parent: Matrix, pair: _Pair, random: np.random.Generator, elements: int
) -> Iterator[tuple[int, Sample]]:
    matrix = matrix_of(linear, pair.declared, pair.child.manifest)
    height = 1 if linear.kind in WHOLE else matrix.block[0]
    rows, cols = matrix.shape
    amax = _amax(linear, parent, pair) if linear.kind in WHOLE or matrix.block == matrix.shape else None
    if height * cols > ELEMENTS_MAX or not rows // height:
        return
    for place in np.sort(random.permutation(rows // height)[: max(min(elements // (height * cols), 64), 3)]):
        first = int(place) * height
        theirs = values(parent, pair.theirs, first, first + height)
        codes = decoded(matrix, pair.ours, first, first + height)[1]
        if np.isfinite(theirs).all():
            yield first, _blocks(matrix, theirs, codes, first, amax, pair.ours, LOWS[parent.tensor.dtype])


def _blocks(
    matrix: Matrix,
    theirs: NDArray[np.float32],
    codes: NDArray[np.uint8],
    first: int,
    amax: np.float32 | None,
    ours: OpenFiles,
    low: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> Sample:
    """The whole blocks of a row of blocks, a row of the sample each."""
    linear, width = matrix.linear, matrix.block[1]
    assert linear is not None
    count = min(theirs.shape[1] // width, BLOCKS_OF_A_ROW)
    if linear.kind == "int-pack" and matrix.word_bits == 8:
        codes = codes ^ np.uint8(0x80)
    scales = _stored_scales(matrix, first, count, ours)

    def apart(array: NDArray[np.generic]) -> NDArray[np.generic]:
        return array[:, : count * width].reshape(-1, count, width).swapaxes(0, 1).reshape(count, -1)

    floats = np.asarray(apart(theirs), np.float32)
    amaxes = (
        np.abs(floats).max(axis=1, keepdims=True) if amax is None else np.full((count, 1), amax, np.float32)
    )
    total = np.ones((1, 1), np.float32)
    if linear.kind in SECOND:
        total = totals_of(linear, ours, first, first + 1).reshape(1, 1)
    zeros = zeros_of(linear, matrix.word_bits, first, first + 1, ours.bytes)
    stored = (
        (zeros + np.float32(1 << (matrix.word_bits - 1))).reshape(-1, 1)[:count]
        if zeros is not None
        else None
    )
    return Sample(floats, amaxes, scales, np.asarray(apart(codes), np.uint8), total, low, stored)


def _stored_scales(matrix: Matrix, first: int, count: int, ours: OpenFiles) -> NDArray[np.float32]:
    """f32 [count, 1]: the scales of the first blocks of the row of blocks that begins at row `first`."""
    linear = matrix.linear
    assert linear is not None
    assert linear.grid is not None
    grid = linear.grid
    every = scale_values(grid, ours.bytes(grid, 0, grid.bytes)).reshape(-1)
    if len(every) == 1:
        return np.full((count, 1), every[0], np.float32)
    columns = (
        1 if linear.kind == "fp8-channel" else grid.shape[2] if linear.kind == "fp8-pbwo" else grid.shape[-1]
    )
    begin = first // matrix.block[0] * columns
    return every[begin : begin + count].reshape(-1, 1)


def _amax(linear: Linear, parent: Matrix, pair: _Pair) -> np.float32:
    """The largest magnitude of what shares the scale: the weight, or with it the fused module's other members.

    Members share a scale where theirs are the same number, as engines that fuse them need it.
    """
    most = largest(parent, pair.theirs)
    stored = _scale_bytes(linear, pair.ours)
    for module in pair.groups.get(linear.module, ()):
        other = pair.linears[module]
        floats = pair.floats(other) if module != linear.module and other.weight is not None else None
        if floats is not None and _scale_bytes(other, pair.ours) == stored:
            most = max(most, largest(floats, pair.theirs))
    return most


def _scale_bytes(linear: Linear, ours: OpenFiles) -> bytes:
    grid = linear.grid
    return (
        ours.bytes(grid, 0, grid.bytes).tobytes()
        if grid is not None and grid.bytes * 8 == DTYPE_BITS[grid.dtype]
        else b""
    )


TOOLS: Mapping[str, str] = {formula.name: formula.tools for formula in (*FORMULAS, *PROOFS)}


def traits(source: Source) -> Report:
    """What the checkpoint alone shows of its maker: the config's word, and the looks of its scales and codes."""
    report = Report("origin")
    child = open_checkpoint(source, report)
    declared = declaration(child.quantization)[0] if child.quantization else None
    producer = child.quantization.get("producer")
    if declared is not None:
        report.facts["declared"] = f"{declared.method or 'no method'} {declared.algo}".strip() + (
            f", {producer}" if producer else ""
        )
    by_kind: dict[str, list[Linear]] = {}
    for linear in quantized(child.tensors).values():
        if can_decode(linear) and linear.weight is not None and child.readable(linear.weight):
            by_kind.setdefault(linear.kind, []).append(linear)
    with OpenFiles(source) as ours:
        for kind, found in by_kind.items():
            report.facts[FORMS[kind].title] = _trait(
                found[0], matrix_of(found[0], declared, child.manifest), ours
            )
    report.leaves_out("origin", "no --parent given: formulas can't be computed again")
    report.cannot_ask("no --parent was given")
    return report


def _trait(linear: Linear, matrix: Matrix, ours: OpenFiles) -> str:
    assert linear.grid is not None
    grid = linear.grid
    scales = scale_values(grid, ours.bytes(grid, 0, grid.bytes)).reshape(-1)
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    looks = (
        "powers of two"
        if not (bits & 0x7FFFFF).any()
        else "BF16 numbers"
        if not (bits & 0xFFFF).any()
        else "F32 numbers"
    )
    codes = decoded(matrix, ours, 0, min(matrix.shape[0], matrix.block[0]))[1]
    top = FORMS[linear.kind].top
    reached = f"; the largest code is 0x{int((codes & top).max()):02x} of 0x{top:02x}" if top else ""
    return f"scales in {grid.dtype} {list(grid.shape)}, {looks}{reached}"
