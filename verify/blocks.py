"""Which elements of a weight share a scale: from the manifest, the config, or the shapes, in this order."""

from __future__ import annotations

from verify.declared import Declaration
from verify.manifest import Manifest
from verify.schemes import GROUP, Linear, implied_block

Block = tuple[int, int]


def block_of(linear: Linear, declared: Declaration | None, manifest: Manifest | None = None) -> Block:
    """(rows, columns) of one scale's elements; a scale for the whole weight gives its whole shape."""
    shape = linear.shape
    rows, cols = (*shape, 1, 1)[:2] if len(shape) < 2 else shape[-2:]
    grid = linear.grid
    if linear.kind in GROUP:
        return 1, GROUP[linear.kind]
    if grid is None or linear.kind in ("fp8-tensor", "comfy-fp8"):
        return max(rows, 1), max(cols, 1)
    if linear.kind == "fp8-channel":
        return 1, max(cols, 1)
    if manifest is not None and linear.weight is not None and linear.weight.name in manifest.conversions:
        return manifest.conversions[linear.weight.name].block
    entry = (declared.entries or {}).get(linear.module) if declared is not None else None
    if entry is not None and entry.group:
        return entry.group, entry.group
    if declared is not None and declared.block is not None:
        return declared.block
    blocks = (grid.shape[0], grid.shape[2]) if linear.kind == "fp8-pbwo" else grid.shape[-2:]
    return max(implied_block(rows, blocks[0]), 1), max(implied_block(cols, blocks[1]), 1)
