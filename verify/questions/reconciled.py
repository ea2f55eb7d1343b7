"""The repair reconcile/1, made again: both halves of an NVFP4 expert share the larger of their two global scales.

The larger `weight_scale_2` of gate and up becomes that of both; the block scales of the half that had the smaller one
become the E4M3 numbers nearest to scale * (own / larger), one f32 division and one f32 product. Codes stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardmill.kernels.formats import E4M3_VALUES
from shardmill.verify.formats.encode import nearest
from shardmill.verify.formats.fused import fused_groups
from shardmill.verify.formats.laws import RECONCILE
from shardmill.verify.formats.linear import U8, Linear
from shardmill.verify.formats.opened import scalar
from shardmill.verify.formats.schemes import quantized, split_name
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.rules.findings import Finding


@dataclass(frozen=True, slots=True)
class Repair:
    """One half: its scales here and in the parent, and the other half's global scale in the parent."""

    ours: Linear
    theirs: Linear
    partner: Tensor


def repairs_of(child: Checkpoint, parent: Checkpoint) -> tuple[list[Repair], list[str]]:
    """The repairs of the manifest that can be made again, and the tensors of those that can't."""
    named = [
        str(row.get("tensor", ""))
        for row in (child.manifest.repairs if child.manifest is not None else ())
        if row.get("repair") == RECONCILE
    ]
    if not named:
        return [], []
    ours, theirs = quantized(child.tensors), quantized(parent.tensors)
    partners = dict(_partners(theirs))
    found: list[Repair] = []
    lost: list[str] = []
    for name in named:
        module = split_name(name)[0]
        partner = theirs[partners[module]].scales.get("weight_scale_2") if module in partners else None
        here, there = ours.get(module), theirs.get(module)
        if here is None or there is None or partner is None or not _alike(child, parent, here, there):
            lost.append(name)
        else:
            found.append(Repair(here, there, partner))
    return found, lost


def _partners(linears: Mapping[str, Linear]) -> Iterator[tuple[str, str]]:
    for _, group, members in fused_groups(linears):
        if len(members) == 2 and len(group.members) == 2:
            first, second = members.values()
            yield first, second
            yield second, first


def _alike(child: Checkpoint, parent: Checkpoint, ours: Linear, theirs: Linear) -> bool:
    for leaf in ("weight_scale", "weight_scale_2"):
        a, b = ours.scales.get(leaf), theirs.scales.get(leaf)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if not (child.readable(a) and parent.readable(b)):
            return False
    return ours.kind == theirs.kind == "nvfp4"


def repair_faults(repair: Repair, ours: OpenFiles, theirs: OpenFiles) -> Iterator[Finding]:
    """Where the scales here are not what the repair makes of the parent's."""
    own, other = (
        float(scalar(t, theirs)[0]) for t in (repair.theirs.scales["weight_scale_2"], repair.partner)
    )
    larger = np.float32(max(own, other))
    total, grid = repair.ours.scales["weight_scale_2"], repair.ours.scales["weight_scale"]
    stored = scalar(total, ours)[0]
    if stored.tobytes() != larger.tobytes():
        yield Finding("block-differs", total.file, total.name, f"{larger!r} by {RECONCILE}", repr(stored))
    before = repair.theirs.scales["weight_scale"]
    wanted = _rescaled(theirs.bytes(before, 0, before.bytes), np.float32(own), larger)
    got = ours.bytes(grid, 0, grid.bytes)
    if not np.array_equal(got, wanted):
        first = int(np.flatnonzero(got != wanted)[0])
        expected = f"0x{wanted[first]:02x} at {first:,} by {RECONCILE}"
        yield Finding("block-differs", grid.file, grid.name, expected, f"0x{got[first]:02x}")


def _rescaled(scales: U8, own: np.float32, larger: np.float32) -> U8:
    if own == larger:
        return scales
    with np.errstate(all="ignore"):
        values = E4M3_VALUES[scales] * np.float32(own / larger)
    return np.where(np.isfinite(values), nearest(np.nan_to_num(values).astype(np.float64)), scales).astype(
        np.uint8
    )
