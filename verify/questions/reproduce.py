"""The recompute proof: blocks drawn at random are made again from the parent and compared bit by bit.

If a fraction f of all blocks were wrong, K random ones would all be right with probability (1 - f)^K: the report says
what that comes to. The figure holds only if the draw came after publication: who knows the seed beforehand can forge
every block that it does not draw. So the seed comes from the system's randomness and is printed, and a given seed only
replays. With every block compared, nothing is left to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.blocks import Block, block_of
from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.encode import RECIPES, decodes_to, encode_block
from shardmill.verify.formats.matrices import OpenFiles, floats
from shardmill.verify.formats.schemes import FLOATS, quantized
from shardmill.verify.formats.table import FORMS
from shardmill.verify.questions.coverage import form_of
from shardmill.verify.questions.origin import Tally, said, tallies_of, unknown
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.seeds import fresh_seed
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report

BLOCKS = 2_000
BLOCK_ELEMENTS_MAX = 1 << 22  # a block is held whole
BLOCK_KINDS = (
    "fp8-block",
    "fp8-grid",
    "fp8-tensor",
    "fp8-channel",
)  # a grid of one block or column looks like the last
SAMPLED_ELEMENTS, ALL_ELEMENTS = 1 << 20, 1 << 40  # of a weight, where formulas are tried
FRACTIONS = (0.1, 0.01, 0.001)


@dataclass(frozen=True, slots=True)
class Weight:
    """A converted weight: its codes and scales here, its floats in the parent, and how it was made."""

    codes: Tensor
    scales: Tensor
    parent: Tensor
    block: Block
    numerics: str

    @property
    def grid(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1]

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(slots=True)
class Count:
    compared: int = 0
    exact: int = 0  # blocks of recover/1 that decode to the parent's bits
    wrong: int = 0
    findings: list[Finding] = field(default_factory=list)


def reproduce(
    source: Source,
    parent: Source,
    blocks: int | None = BLOCKS,
    seed: int | None = None,
    numerics: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """`blocks`: how many, None for all; `seed`: None for one of the system's; `numerics`: where no manifest says it."""
    seed = fresh_seed() if seed is None else seed
    report = Report("reproduce")
    child = open_checkpoint(source, report)
    origin = open_parent(parent, child, report, Report("reproduce"))
    elements = ALL_ELEMENTS if blocks is None else SAMPLED_ELEMENTS
    if (
        child.manifest is None
        and numerics is None
        and (tallies := tallies_of(child, origin, seed, progress, elements))
    ):
        return _by_formula(report, tallies, seed, blocks is None)
    weights = list(converted(child, origin, numerics, report))
    total = sum(weight.blocks for weight in weights)
    passed_over = _passed_over(child, origin, {weight.codes.name for weight in weights})
    for why, names in passed_over.items():
        report.leaves_out(f"{len(names):,} weights", f"{why}, as {names[0]}")
    if not total:
        reason = "no weight here was converted from a float weight of that parent"
        report.leaves_out("blocks", next(iter(passed_over), reason))
        return report
    chosen = _choose(weights, blocks, seed)
    goal = sum(len(places) for places in chosen)
    done = Progress(goal, progress)

    def check(place: int, opened: tuple[OpenFiles, OpenFiles]) -> Count:
        count = _check(weights[place], chosen[place], *opened)
        done.add(count.compared)
        return count

    with_blocks = [place for place in range(len(weights)) if len(chosen[place])]
    with ExitStack() as of_threads:  # each thread holds its own files open, until the last is done

        def open_both() -> tuple[OpenFiles, OpenFiles]:
            return of_threads.enter_context(OpenFiles(source)), of_threads.enter_context(OpenFiles(parent))

        counts = pinned(check, with_blocks, open_both, done=done, remote=source.remote or parent.remote)
    for count in counts:
        report.add(*count.findings)
    by_name = {weights[p].codes.name: count for p, count in zip(with_blocks, counts, strict=True)}
    report.add(*_claims(child, by_name, {weight.codes.name: weight.blocks for weight in weights}))
    report.checks("blocks")
    report.facts.update(_facts(counts, total, seed, sum(map(len, passed_over.values()))))
    return report


def _by_formula(report: Report, tallies: Mapping[str, Tally], seed: int, everything: bool) -> Report:
    """Without a record of how the blocks were made, the formulas of known tools are tried on a sample of them."""
    report.add(*unknown(tallies))
    report.checks("blocks")
    report.facts["seed"] = seed
    for kind in sorted(tallies):
        report.facts[FORMS[kind].title] = said(tallies[kind])
    if everything:
        report.leaves_out(
            "every block", "there is no manifest; give --numerics to compare every block by one recipe"
        )
    return report


def converted(
    child: Checkpoint, parent: Checkpoint, numerics: str | None, report: Report
) -> Iterator[Weight]:
    """The weights in block FP8 here that are floats of the same shape in the parent, and whose numerics are known."""
    manifest = child.manifest
    declared = declaration(child.quantization)[0] if child.quantization else None
    before = {new: old for old, new in (manifest.renamed if manifest else {}).items()}
    for linear in quantized(child.tensors).values():
        scales = linear.grid
        if (
            linear.kind not in BLOCK_KINDS
            or linear.weight is None
            or scales is None
            or len(scales.shape) != 2
        ):
            continue
        name = linear.weight.name
        theirs = parent.tensors.get(before.get(name, name))
        if (
            theirs is None
            or theirs.dtype not in FLOATS
            or theirs.shape != linear.shape
            or len(linear.shape) != 2
        ):
            continue
        if not all((child.readable(linear.weight), child.readable(scales), parent.readable(theirs))):
            continue
        conversion = manifest.conversions.get(name) if manifest is not None else None
        made_by = conversion.numerics if conversion is not None else numerics
        if made_by is None:
            continue  # nobody says how it was made: it is passed over by name
        block = conversion.block if conversion is not None else block_of(linear, declared)
        if made_by not in RECIPES or scales.dtype != "F32":
            got = f"{made_by} with scales in {scales.dtype}"
            expected = f"{' or '.join(RECIPES)} with scales in F32"
            report.add(Finding("recipe-unknown", linear.weight.file, name, expected, got))
        elif min(block[0], linear.shape[0]) * min(block[1], linear.shape[1]) > BLOCK_ELEMENTS_MAX:
            got = f"blocks of {list(block)}"
            limit = f"blocks of at most {BLOCK_ELEMENTS_MAX:,} elements"
            report.add(Finding("recipe-unknown", linear.weight.file, name, limit, got))
        elif scales.shape == (-(-linear.shape[0] // block[0]), -(-linear.shape[1] // block[1])):
            yield Weight(linear.weight, scales, theirs, block, made_by)


def _choose(weights: list[Weight], blocks: int | None, seed: int) -> list[NDArray[np.int64]]:
    """Which blocks of each weight: all, or `blocks` of them drawn without replacement from all weights together."""
    ends = np.cumsum([weight.blocks for weight in weights])
    total = int(ends[-1])
    if blocks is None or blocks >= total:
        return [np.arange(weight.blocks) for weight in weights]
    random = np.random.Generator(np.random.PCG64(seed))
    drawn = np.sort(random.choice(total, size=blocks, replace=False))
    owner = np.searchsorted(ends, drawn, side="right")
    begins = ends - np.array([weight.blocks for weight in weights])
    return [drawn[owner == place] - begins[place] for place in range(len(weights))]


def _check(weight: Weight, places: NDArray[np.int64], ours: OpenFiles, theirs: OpenFiles) -> Count:
    count = Count()
    scales = ours.bytes(weight.scales, 0, weight.scales.bytes).view("<f4").reshape(weight.grid)
    for place in places:
        row, col = divmod(int(place), weight.grid[1])
        source = floats(weight.parent, _cut(weight.parent, weight.block, row, col, theirs))
        codes = _cut(weight.codes, weight.block, row, col, ours)
        count.compared += 1
        said = _compare(weight, source, scales[row, col], codes, count)
        if said:
            count.wrong += 1
            where = f"block [{row}, {col}] of {list(weight.grid)}"
            count.findings.append(
                Finding("block-differs", weight.codes.file, weight.codes.name, said[0], f"{where}: {said[1]}")
            )
    return count


def _compare(
    weight: Weight, source: NDArray[np.float32], scale: np.float32, codes: NDArray[np.uint8], count: Count
) -> tuple[str, str] | None:
    """(expected, got) where a block is not what its numerics make, else None."""
    if not np.isfinite(source).all():
        return "a finite block in the parent", "NaN or infinity"
    if weight.numerics == "recover/1" and weight.parent.dtype == "BF16" and decodes_to(source, scale, codes):
        count.exact += 1
        return None
    want_scale, want_codes = encode_block(source, weight.numerics)
    if np.float32(scale).tobytes() != want_scale.tobytes():
        return f"scale {want_scale!r}", f"scale {scale!r}"
    if np.array_equal(codes, want_codes):
        return None
    r, c = np.argwhere(codes != want_codes)[0]
    return f"code 0x{want_codes[r, c]:02x} at [{r}, {c}]", f"0x{codes[r, c]:02x}"


def _cut(tensor: Tensor, block: Block, row: int, col: int, opened: OpenFiles) -> NDArray[np.uint8]:
    """The bytes of one block: u8 [its rows, bytes of its columns], read row by row."""
    R, C = tensor.shape
    width = tensor.bytes // max(R * C, 1)
    first, last = row * block[0], min((row + 1) * block[0], R)
    begin, end = col * block[1] * width, min((col + 1) * block[1], C) * width
    if begin == 0 and end == C * width:
        return opened.rows(tensor, first, last)
    return np.stack(
        [opened.bytes(tensor, r * C * width + begin, r * C * width + end) for r in range(first, last)]
    )


UNSAID = "nothing says by which numerics they were made; say it with --numerics"


def _passed_over(child: Checkpoint, parent: Checkpoint, taken: Collection[str]) -> dict[str, list[str]]:
    """Why -> the quantized weights here that were not recomputed, the parent's own bytes left out."""
    passed: dict[str, list[str]] = {}
    lost = {linear.module for linear in quantized(parent.tensors).values()}
    for linear in quantized(child.tensors).values():
        weight = linear.weight
        if weight is None or weight.name in taken:
            continue
        before = parent.tensors.get(weight.name)
        if before is not None and (before.dtype, before.shape) == (weight.dtype, weight.shape):
            continue  # carried, or reblocked: integrity and roundtrip compare them
        form = form_of(weight, child.tensors, linear)
        if not child.readable(weight) or (before is not None and not parent.readable(before)):
            why = "a file of theirs cannot be read"
        elif linear.kind not in BLOCK_KINDS or linear.grid is None or linear.grid.dtype != "F32":
            why = f"{form}: no numerics of it are known"
        elif before is None:
            why = (
                f"{form}: the parent has no weight of that name"
                if linear.module not in lost
                else f"{form}: made of codes"
            )
        else:
            why = (
                UNSAID
                if child.manifest is None
                else f"{form}: of a shape or numerics that are not recomputed"
            )
        passed.setdefault(why, []).append(weight.name)
    return passed


def _claims(child: Checkpoint, counts: Mapping[str, Count], blocks: Mapping[str, int]) -> Iterator[Finding]:
    """A claim of lossless blocks is false where more were seen, or more that are not, than it leaves room for."""
    for name, conversion in (child.manifest.conversions if child.manifest else {}).items():
        claimed = conversion.counts.get("exact_blocks")
        if claimed is None or name not in counts:
            continue
        seen = counts[name]
        lossy = seen.compared - seen.exact
        if not seen.exact <= claimed <= blocks[name] - lossy:
            got = f"{claimed:,} claimed of {blocks[name]:,}"
            expected = f"{seen.exact:,} exact blocks of {seen.compared:,} compared"
            yield Finding("claim-false", MANIFEST, name, expected, got)


def _facts(counts: list[Count], total: int, seed: int, passed_over: int) -> dict[str, object]:
    compared, wrong, exact = (
        sum(getattr(c, name) for c in counts) for name in ("compared", "wrong", "exact")
    )
    facts: dict[str, object] = {"blocks": f"{compared:,} of {total:,} compared, {wrong:,} differ"}
    if exact:
        facts["lossless blocks"] = f"{exact:,} of {compared:,} decode to the parent's BF16 bit for bit"
    if compared == total:
        rest = f", but {passed_over:,} weights were not recomputed at all" if passed_over else ""
        facts["unseen"] = f"nothing: every block of these weights was compared{rest}"
    else:
        facts["seed"] = seed
        facts["unseen"] = {
            f"if {f:.1%} of all blocks were wrong": f"none of these with probability {(1 - f) ** compared:.2g}"
            for f in FRACTIONS
        }
    return facts
