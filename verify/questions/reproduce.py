"""The recompute proof: blocks drawn at random are made again from the parent and compared bit by bit.

If a fraction f of all blocks were wrong, K random ones would all be right with probability (1 - f)^K: the report says
what that comes to. The figure holds only if the draw came after publication: who knows the seed beforehand can forge
every block that it does not draw. So the seed comes from the system's randomness and is printed, and a given seed only
replays. With every block compared, nothing is left to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.fused import fused_groups
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.formats.table import FORMS
from shardmill.verify.questions.origin import Tally, said, tallies_of, unknown
from shardmill.verify.questions.recomputable import Weight, not_recomputed, recomputable
from shardmill.verify.questions.recomputed import Count, recompute, recompute_total
from shardmill.verify.questions.reconciled import repair_faults, repairs_of
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.progress import Progress
from shardmill.verify.reading.seeds import fresh_seed
from shardmill.verify.reading.source import Source
from shardmill.verify.reading.threads import pinned
from shardmill.verify.rules.findings import Finding, Report

BLOCKS = 2_000
TOTALS = 64  # numbers of a whole weight, and repairs, that a sample makes again
SAMPLED_ELEMENTS, ALL_ELEMENTS = 1 << 20, 1 << 40  # of a weight, where formulas are tried
FRACTIONS = (0.1, 0.01, 0.001)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is made again: blocks of each weight, and of which weights the number that the whole weight shares."""

    weights: list[Weight]
    blocks: list[NDArray[np.int64]]
    totals: frozenset[int]  # places of weights
    fused: Mapping[str, list[Weight]]  # module -> the weights that its engine module fuses, itself among them

    def check(self, place: int, ours: OpenFiles, theirs: OpenFiles) -> Count:
        weight = self.weights[place]
        count = recompute(weight, self.blocks[place], ours, theirs)
        if place in self.totals and weight.child.linear is not None:
            fused = self.fused.get(weight.child.linear.module, [weight])
            recompute_total(weight, fused, ours, theirs, count)
        return count


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
    if child.manifest is None and numerics is None:
        tallies = tallies_of(child, origin, seed, progress, elements)
        if tallies:
            return _by_formula(report, child, origin, tallies, seed, blocks is None)
    weights = list(recomputable(child, origin, numerics, report))
    left_out = not_recomputed(child, origin, {weight.tensor.name for weight in weights})
    _leave_out(report, left_out)
    repaired = _repairs(child, origin, blocks is None, seed, report)
    if not weights and not repaired:
        reason = "no weight here was converted from a weight of that parent"
        report.leaves_out("blocks", next(iter(left_out), reason))
        return report
    drawn = _draw(weights, blocks, seed)
    counts = _counts(drawn, source, parent, progress)
    for count in counts.values():
        report.add(*count.findings)
    by_name = {weights[place].tensor.name: count for place, count in counts.items()}
    report.add(*_claims(child, by_name, {weight.tensor.name: weight.blocks for weight in weights}))
    report.checks("blocks")
    total = sum(weight.blocks for weight in weights)
    report.facts.update(_facts(list(counts.values()), total, sum(map(len, left_out.values()))))
    if blocks is not None:
        report.facts["seed"] = seed
    return report


def _leave_out(report: Report, left_out: Mapping[str, list[str]]) -> None:
    for why, names in left_out.items():
        report.leaves_out(f"{len(names):,} tensors, not recomputed", f"{why}, as {names[0]}")


def _counts(
    drawn: Drawn, source: Source, parent: Source, progress: Callable[[int, int], None]
) -> dict[int, Count]:
    """Place of a weight -> what its drawn blocks came to."""
    done = Progress(sum(map(len, drawn.blocks)), progress)
    places = [place for place in range(len(drawn.weights)) if len(drawn.blocks[place])]

    def check(place: int, opened: tuple[OpenFiles, OpenFiles]) -> Count:
        count = drawn.check(place, *opened)
        done.add(count.compared)
        return count

    with ExitStack() as of_threads:  # each thread holds its own files open, until the last is done

        def open_both() -> tuple[OpenFiles, OpenFiles]:
            return of_threads.enter_context(OpenFiles(source)), of_threads.enter_context(OpenFiles(parent))

        counts = pinned(check, places, open_both, done=done, remote=source.remote or parent.remote)
    return dict(zip(places, counts, strict=True))


def _repairs(child: Checkpoint, parent: Checkpoint, everything: bool, seed: int, report: Report) -> bool:
    """Makes the manifest's repairs of scales again, all or TOTALS of them; whether there were any."""
    repairs, lost = repairs_of(child, parent)
    if lost:
        what = f"{len(lost):,} repaired scales, not recomputed"
        report.leaves_out(what, f"no such pair of halves in the parent, as {lost[0]}")
    random = np.random.Generator(np.random.PCG64(seed))
    chosen = range(len(repairs)) if everything else np.sort(random.permutation(len(repairs))[:TOTALS])
    wrong = 0
    with OpenFiles(child.source) as ours, OpenFiles(parent.source) as theirs:
        for place in chosen:
            found = list(repair_faults(repairs[int(place)], ours, theirs))
            wrong += bool(found)
            report.add(*found)
    if repairs:
        report.facts["repairs"] = f"{len(chosen):,} of {len(repairs):,} made again, {wrong:,} differ"
    return bool(repairs)


def _by_formula(
    report: Report,
    child: Checkpoint,
    parent: Checkpoint,
    tallies: Mapping[str, Tally],
    seed: int,
    everything: bool,
) -> Report:
    """Without a record of how the blocks were made, the formulas of known tools are tried on a sample of them."""
    report.add(*unknown(tallies))
    report.checks("blocks")
    report.facts["seed"] = seed
    for kind in sorted(tallies):
        report.facts[FORMS[kind].title] = said(tallies[kind])
    tried = {
        linear.weight.name
        for linear in quantized(child.tensors).values()
        if linear.weight is not None and linear.kind in tallies
    }
    _leave_out(report, not_recomputed(child, parent, tried))
    if everything:
        report.leaves_out(
            "every block", "there is no manifest; give --numerics to compare every block by one recipe"
        )
    return report


def _draw(weights: list[Weight], blocks: int | None, seed: int) -> Drawn:
    """All blocks, or `blocks` of them drawn without replacement from all weights together."""
    random = np.random.Generator(np.random.PCG64(seed))
    chosen = _choose(weights, blocks, random)
    with_total = [
        place
        for place, weight in enumerate(weights)
        if weight.law is not None and weight.law.total is not None and len(chosen[place])
    ]
    totals = with_total if blocks is None else random.permutation(with_total)[:TOTALS]
    return Drawn(weights, chosen, frozenset(map(int, totals)), _fused(weights))


def _fused(weights: list[Weight]) -> dict[str, list[Weight]]:
    by_module = {weight.child.linear.module: weight for weight in weights if weight.child.linear is not None}
    groups = (list(members.values()) for _, _, members in fused_groups(by_module))
    return {module: [by_module[one] for one in group] for group in groups for module in group}


def _choose(
    weights: list[Weight], blocks: int | None, random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Which blocks of each weight."""
    ends = np.cumsum([weight.blocks for weight in weights])
    total = int(ends[-1]) if len(ends) else 0
    if blocks is None or blocks >= total:
        return [np.arange(weight.blocks) for weight in weights]
    drawn = np.sort(random.choice(total, size=blocks, replace=False))
    owner = np.searchsorted(ends, drawn, side="right")
    begins = ends - np.array([weight.blocks for weight in weights])
    return [drawn[owner == place] - begins[place] for place in range(len(weights))]


def _claims(child: Checkpoint, counts: Mapping[str, Count], blocks: Mapping[str, int]) -> Iterator[Finding]:
    """A claim of lossless blocks is false where more were seen, or more that are not, than it leaves room for."""
    for name, conversion in (child.manifest.conversions if child.manifest else {}).items():
        claimed = conversion.counts.get("exact_blocks")
        if (
            claimed is None
            or name not in counts
            or conversion.counts.get("blocks", blocks[name]) != blocks[name]
        ):
            continue  # not said, not looked at, or counted by other blocks
        seen = counts[name]
        lossy = seen.compared - seen.exact
        if not seen.exact <= claimed <= blocks[name] - lossy:
            got = f"{claimed:,} claimed of {blocks[name]:,}"
            expected = f"{seen.exact:,} exact blocks of {seen.compared:,} compared"
            yield Finding("claim-false", MANIFEST, name, expected, got)


def _facts(counts: list[Count], total: int, passed_over: int) -> dict[str, object]:
    compared, wrong, exact = (
        sum(getattr(count, name) for count in counts) for name in ("compared", "wrong", "exact")
    )
    facts: dict[str, object] = {"blocks": f"{compared:,} of {total:,} compared, {wrong:,} differ"}
    totals = sum(count.totals for count in counts)
    if totals:
        facts["numbers of a whole weight"] = f"{totals:,} made again"
    if exact:
        facts["lossless blocks"] = f"{exact:,} of {compared:,} decode to the parent's numbers bit for bit"
    if compared == total:
        rest = f", but {passed_over:,} weights were not recomputed at all" if passed_over else ""
        facts["unseen"] = f"nothing: every block of these weights was compared{rest}"
    else:
        facts["unseen"] = {
            f"if {f:.1%} of all blocks were wrong": f"none of these with probability {(1 - f) ** compared:.2g}"
            for f in FRACTIONS
        }
    return facts
