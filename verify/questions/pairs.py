"""Which weights of a child are compared with which of its parent: all whose form changed, whichever side has codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.declared import Declaration, declaration
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.laws import REBLOCK, RECAST
from shardmill.verify.formats.matrices import (
    Matrix,
    can_decode,
    matrix_of,
    matrix_of_parts,
    matrix_with_state,
)
from shardmill.verify.formats.schemes import FLOATS, PACKED, Linear, is_scale, quantized, split_name
from shardmill.verify.questions.companions import names_here
from shardmill.verify.questions.coverage import form_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.manifest import Conversion, Manifest
from shardmill.verify.reading.open_files import OpenFiles

INTEGERS = ("int8", "int-pack", "gptq", "awq")


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
    def segments(self) -> NDArray[np.int64]:
        """i64 [rows]: which matrix of a bank, or which part of a fused weight, each row is of; none for a plain one."""
        linear, rows = self.child.linear or self.parent.linear, self.child.shape[0]
        if self.child.parts or self.parent.parts:
            return np.repeat(np.arange(len(self.child.parts)), self.child.parts)
        shape = linear.shape if linear is not None and linear.kind not in BY_ELEMENTS else ()
        high = shape[-2] if len(shape) > 2 and shape[-2] else rows
        return np.arange(rows) // high if high < rows else np.zeros(0, np.int64)

    @property
    def limited(self) -> str:
        """Which limits hold: "fp8", "fp4", "table", "table4", "int8", "int", "int2", "float" or "same"."""
        coded = self.child.linear or self.parent.linear
        if self.same:
            return "same"
        if self.child.linear is None or coded is None:
            return "float"
        kind = coded.kind
        if kind in BY_ELEMENTS:
            return "table" if kind == "nf4" else "table4"
        if kind in INTEGERS:
            return {8: "int8", 2: "int2"}.get(self.integer_bits, "int")
        return "fp4" if kind in PACKED else "fp8"

    @property
    def integer_bits(self) -> int:
        """Of a code, where codes are integers."""
        coded = self.child if self.child.linear is not None else self.parent
        return 8 if coded.linear is not None and coded.linear.kind == "int8" else coded.word_bits


def pairs_of(child: Checkpoint, parent: Checkpoint, everything: bool) -> Iterator[Pair]:
    """Each weight with another form here than in the parent, by the parent's name (before a renaming)."""
    ours, theirs = quantized(child.tensors), quantized(parent.tensors)
    renamed = {new: old for old, new in names_here(child, parent).items()}
    with OpenFiles(child.source) as opened, OpenFiles(parent.source) as opened_there:
        here, there = _Side(child, opened, child.manifest), _Side(parent, opened_there)
        yield from _coded_pairs(here, there, ours, theirs, renamed, everything)
        yield from _float_pairs(here, there, theirs, renamed)


@dataclass(frozen=True, slots=True)
class _Side:
    """A checkpoint with its files open: some forms state their shapes in a tensor of their own."""

    checkpoint: Checkpoint
    opened: OpenFiles
    manifest: Manifest | None = None

    @property
    def declared(self) -> Declaration | None:
        said = self.checkpoint.quantization
        return declaration(said)[0] if said else None

    def matrix(self, linear: Linear | None, declared: Declaration | None) -> Matrix | None:
        """A quantized weight as numbers, or None where the judge can't decode or read it."""
        if linear is None or linear.weight is None or not _readable(self.checkpoint, linear):
            return None
        if linear.kind in BY_ELEMENTS:
            return matrix_with_state(linear, self.opened)
        if linear.kind == "fp8-parts":
            return matrix_of_parts(linear, self.checkpoint.config or {})
        return matrix_of(linear, declared, self.manifest) if can_decode(linear) else None


def _coded_pairs(
    here: _Side,
    there: _Side,
    ours: Mapping[str, Linear],
    theirs: Mapping[str, Linear],
    renamed: Mapping[str, str],
    everything: bool,
) -> Iterator[Pair]:
    child, declared, declared_there = here.checkpoint, here.declared, there.declared
    for linear in ours.values():
        matrix = here.matrix(linear, declared)
        if matrix is None or linear.weight is None:
            continue
        name = renamed.get(linear.float_name, linear.float_name)
        their_linear = theirs.get(split_name(name)[0])
        kept = their_linear is not None and _same_form(linear, their_linear)
        if kept and not everything and not _repaired(child, linear):
            continue
        other = _parents_matrix(there, their_linear, name, declared_there)
        conversion = child.manifest.conversions.get(linear.weight.name) if child.manifest else None
        if other is not None and _transposed(child, conversion, other):
            other = Matrix(other.tensor, transposed=True)
        if other is None or other.shape != matrix.shape:
            continue
        family = conversion.family if conversion is not None else kind_of(linear.module)
        same = conversion is not None and (conversion.numerics == REBLOCK or _claims_all(conversion))
        claimed = conversion is not None and _claims_all(conversion)
        yield Pair(linear.weight.name, family, matrix, other, same, claimed)


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
    there: _Side, linear: Linear | None, name: str, declared: Declaration | None
) -> Matrix | None:
    matrix, parent = there.matrix(linear, declared), there.checkpoint
    if matrix is not None:
        return matrix
    tensor = parent.tensors.get(name) or parent.tensors.get(
        name.removesuffix(".weight")
    )  # stacks have no `.weight`
    if tensor is None or tensor.dtype not in FLOATS or not parent.readable(tensor):
        return None
    return Matrix(tensor)


def _float_pairs(
    here: _Side, there: _Side, theirs: Mapping[str, Linear], renamed: Mapping[str, str]
) -> Iterator[Pair]:
    """Floats that are codes in the parent, or floats of another dtype."""
    child, parent, declared = here.checkpoint, there.checkpoint, there.declared
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
        other = _parents_matrix(there, linear, name, declared)
        matrix = Matrix(tensor)
        if other is not None and other.shape == matrix.shape:
            conversion = child.manifest.conversions.get(tensor.name) if child.manifest else None
            yield Pair(tensor.name, conversion.family if conversion else kind_of(name), matrix, other)


def left_out(child: Checkpoint, parent: Checkpoint, pairs: list[Pair]) -> dict[str, int]:
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
