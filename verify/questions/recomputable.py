"""Which weights of a child can be made again from the parent, by which law and in which blocks; and which can't.

A manifest says of every converted weight its numerics and its block. Without one, the numerics that were asked for
are those of FP8 in blocks that were floats. What is not recomputed is named with its reason, never passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

from shardmill.verify.formats.blocks import Block
from shardmill.verify.formats.laws import (
    DECODED,
    KEPT_IN_BLOCKS,
    LAWS,
    NUMERICS,
    OF_A_TENSOR,
    REBLOCK,
    RECAST,
    Law,
)
from shardmill.verify.formats.linear import FLOATS, SECOND, Linear
from shardmill.verify.formats.matrices import Matrix
from shardmill.verify.formats.schemes import is_scale, quantized, split_name
from shardmill.verify.questions.coverage import form_of
from shardmill.verify.questions.pairs import Pair, pairs_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import Conversion
from shardmill.verify.rules.findings import Finding, Report

BLOCK_ELEMENTS_MAX = 1 << 22  # a block is held whole
OF_NUMERICS = (
    "fp8-block",
    "fp8-grid",
    "fp8-tensor",
    "fp8-channel",
)  # that numerics may be asked of; a grid of one block or column looks like the last two
OF_POWERS = ("mxfp4", "gpt-oss")  # a cast from these to NVFP4 keeps codes where it can
UNSAID = "nothing says by which numerics they were made; say it with --numerics"


@dataclass(frozen=True, slots=True)
class Weight:
    """A converted weight: the child's codes or floats, the parent's matrix, and how one was made of the other."""

    child: Matrix
    parent: Matrix
    numerics: str
    block: Block  # of what is compared at once
    law: Law | None  # None: the values, or the codes, are the parent's own
    claims: bool = False  # whether the manifest counts the blocks that decode to the parent's very numbers

    @property
    def tensor(self) -> Tensor:
        return self.child.tensor

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks down and across; none lies in two matrices of a bank."""
        rows, cols = self.child.shape
        return rows // self.bank_rows * -(-self.bank_rows // self.block[0]), -(-cols // self.block[1])

    @property
    def bank_rows(self) -> int:
        """Rows of one matrix."""
        linear = self.child.linear
        shape = linear.shape if linear is not None else self.tensor.shape
        return shape[-2] if len(shape) >= 2 else 1

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    def place(self, number: int) -> tuple[int, int, int, int]:
        """(first row, row after the last, first column, column after the last) of a block."""
        row, col = divmod(number, self.grid[1])
        bank, within = divmod(row, -(-self.bank_rows // self.block[0]))
        first, left = bank * self.bank_rows + within * self.block[0], col * self.block[1]
        last = min(first + self.block[0], (bank + 1) * self.bank_rows)
        return first, last, left, min(left + self.block[1], self.child.shape[1])


def recomputable(
    child: Checkpoint, parent: Checkpoint, numerics: str | None, report: Report
) -> Iterator[Weight]:
    """The weights whose numerics are known and whose origin the parent has; adds what is unknown to `report`."""
    conversions = child.manifest.conversions if child.manifest is not None else {}
    for pair in pairs_of(child, parent, everything=bool(conversions)):
        tensor, linear = pair.child.tensor, pair.child.linear
        conversion = conversions.get(tensor.name)
        if linear is not None and _totals(linear) > 1:
            continue  # no law here makes a bank with a number a matrix; roundtrip and origin decode it
        made_by = conversion.numerics if conversion is not None else numerics
        asked_for = linear is not None and linear.kind in OF_NUMERICS and pair.parent.linear is None
        if made_by is None or (conversion is None and not asked_for):
            continue
        if made_by == RECAST and pair.parent.linear is not None:
            kept = _recast(pair)  # of other forms `not_recomputed` says that they are not
            if kept is not None:
                yield from _within_bounds(kept, report)
            continue
        if made_by not in NUMERICS:
            expected = f"one of {', '.join(sorted(NUMERICS))}"
            report.add(Finding("recipe-unknown", tensor.file, tensor.name, expected, made_by))
            continue
        weight = _weight(pair, made_by, conversion)
        if weight is not None:
            yield from _within_bounds(weight, report)
        else:
            got = f"{made_by}, which makes no {said_kind(pair)}"
            report.add(
                Finding("recipe-unknown", tensor.file, tensor.name, "numerics that make such blocks", got)
            )


def _totals(linear: Linear) -> int:
    """Numbers that scale the block scales."""
    second = linear.scales.get(SECOND.get(linear.kind, ""))
    return prod(second.shape) if second is not None else 1


def said_kind(pair: Pair) -> str:
    linear = pair.child.linear
    if linear is None:
        return f"{pair.child.tensor.dtype} of this origin"
    grid = f" with scales in {linear.grid.dtype} {list(linear.grid.shape)}" if linear.grid is not None else ""
    return f"{linear.kind}{grid}"


def _weight(pair: Pair, numerics: str, conversion: Conversion | None) -> Weight | None:
    """None where the numerics make no such blocks: `not_recomputed` then says so."""
    linear, columns = pair.child.linear, max(pair.child.shape[1], 1)
    claims = conversion is not None and "exact_blocks" in conversion.counts
    if linear is None:
        if numerics not in DECODED:
            return None
        block = conversion.block if conversion is not None and conversion.block[0] > 1 else (1, columns)
        return Weight(pair.child, pair.parent, numerics, block, None, claims)
    if numerics == REBLOCK:
        coded = pair.parent.linear is not None and pair.parent.linear.weight is not None
        return Weight(pair.child, pair.parent, numerics, pair.child.block, None) if coded else None
    law = _law(linear, numerics)
    if law is None or linear.grid is None:
        return None
    if pair.parent.linear is not None and pair.parent.linear.kind in OF_POWERS:
        law = replace(law, total=None)  # of the parent's exponents, and proven by what decodes to the same
    block = (1, columns) if law.by_row else pair.child.block
    weight = Weight(pair.child, pair.parent, numerics, block, law, claims)
    return weight if prod(linear.grid.shape) == weight.blocks or law.by_row else None


def _recast(pair: Pair) -> Weight | None:
    """Block FP8 that was codes: a block keeps their numbers, or is encoded anew by the law of its scales' dtype."""
    linear = pair.child.linear
    if linear is None or linear.grid is None or linear.kind not in KEPT_IN_BLOCKS:
        return None
    law = KEPT_IN_BLOCKS[linear.kind].get(linear.grid.dtype)
    weight = Weight(pair.child, pair.parent, RECAST, pair.child.block, law, True)
    return weight if law is not None and prod(linear.grid.shape) == weight.blocks else None


def _law(linear: Linear, numerics: str) -> Law | None:
    grid = linear.grid
    if grid is None:
        return None
    if linear.kind == "fp8-tensor" and len(grid.shape) < 2:
        return OF_A_TENSOR.get(numerics)
    law = LAWS.get((linear.kind, numerics))
    return law if law is not None and grid.dtype in law.scale_dtypes else None


def _within_bounds(weight: Weight, report: Report) -> Iterator[Weight]:
    rows, cols = weight.child.shape
    if min(weight.block[0], rows) * min(weight.block[1], cols) > BLOCK_ELEMENTS_MAX:
        limit = f"blocks of at most {BLOCK_ELEMENTS_MAX:,} elements"
        got = f"blocks of {list(weight.block)}"
        report.add(Finding("recipe-unknown", weight.tensor.file, weight.tensor.name, limit, got))
    else:
        yield weight


def not_recomputed(child: Checkpoint, parent: Checkpoint, taken: Collection[str]) -> dict[str, list[str]]:
    """Why -> the weights here that are not the parent's own and were not recomputed, by their names."""
    passed: dict[str, list[str]] = {}
    conversions = child.manifest.conversions if child.manifest is not None else {}
    codes = {linear.weight.name: linear for linear in quantized(child.tensors).values() if linear.weight}
    coded_there = {linear.module for linear in quantized(parent.tensors).values() if linear.weight}
    for name, tensor in child.tensors.items():
        linear, conversion, before = codes.get(name), conversions.get(name), parent.tensors.get(name)
        decoded = (
            tensor.dtype in FLOATS
            and not is_scale(name)
            and split_name(name)[0] in coded_there
            and split_name(name)[1] == "weight"
        )
        if name in taken or not (linear or conversion or decoded):
            continue
        same = before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape)
        if same and conversion is None:
            continue  # carried: integrity compares it byte by byte
        form = form_of(tensor, child.tensors, linear)
        if not child.readable(tensor) or (before is not None and not parent.readable(before)):
            why = "a file of theirs cannot be read"
        elif conversion is not None and conversion.numerics == RECAST:
            why = f"{form} by {RECAST}, from codes: roundtrip holds what it claims to the numbers"
        elif conversion is not None:
            why = f"{form} by {conversion.numerics}: the parent has no such weight of that shape"
        elif child.manifest is None and linear is not None and linear.kind in OF_NUMERICS:
            why = UNSAID if split_name(name)[0] not in coded_there else f"{form}: made of codes"
        else:
            why = f"{form}: nothing says how they were made"
        passed.setdefault(why, []).append(name)
    return passed
