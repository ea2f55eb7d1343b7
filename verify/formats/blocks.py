"""Which elements of a weight share a scale: from the manifest, the config, or the shapes, in this order."""

from __future__ import annotations

from shardmill.verify.formats.declared import Declaration
from shardmill.verify.formats.linear import GROUP, Linear, grid_of, implied_block
from shardmill.verify.reading.manifest import Manifest

Block = tuple[int, int]
WHOLE = (
    "fp8-tensor",
    "fp8-channel",
    "fp8-parts",
    "comfy-fp8",
    "mistral-fp8",
    "int8",
)  # no block ends in a row
ONE_SCALE = ("fp8-tensor", "fp8-parts", "comfy-fp8", "mistral-fp8")


def block_of(linear: Linear, declared: Declaration | None, manifest: Manifest | None = None) -> Block:
    """(rows, columns) of one scale's elements, at most the weight's own."""
    rows, cols = _block_of(linear, declared, manifest)
    shape = (*linear.shape, 1, 1)[:2] if len(linear.shape) < 2 else linear.shape[-2:]
    return max(min(rows, shape[0]), 1), max(min(cols, shape[1]), 1)


def _block_of(linear: Linear, declared: Declaration | None, manifest: Manifest | None) -> Block:
    shape, grid = linear.shape, linear.grid
    rows, cols = (*shape, 1, 1)[:2] if len(shape) < 2 else shape[-2:]
    if linear.kind in GROUP:
        return 1, GROUP[linear.kind]
    if manifest is not None and linear.weight is not None and linear.weight.name in manifest.conversions:
        return manifest.conversions[linear.weight.name].block
    if grid is None or linear.kind in ONE_SCALE:
        return rows, cols
    if linear.kind == "fp8-channel":
        return 1, cols
    if linear.kind in ("gptq", "awq"):  # stored [inputs, outputs]: a group is of rows
        return implied_block(rows, grid.shape[0] if grid.shape else 1), 1
    if linear.kind in ("int8", "int-pack"):
        groups = grid.shape[-1] if len(grid.shape) == len(shape) else 1
        return (1 if len(grid.shape) else rows), -(-cols // max(groups, 1))
    said = said_block(linear, declared)
    if said is not None:
        return said
    if len(grid.shape) < 2:
        return rows, cols
    blocks = (grid.shape[0], grid.shape[2]) if linear.kind == "fp8-pbwo" else grid.shape[-2:]
    return implied_block(rows, blocks[0]), implied_block(cols, blocks[1])


def fitting_block(linear: Linear, declared: Declaration | None, manifest: Manifest | None = None) -> Block:
    """`block_of`, or where that does not give the scales' shape, the block that does: for decoding what is there."""
    block, grid, shape = block_of(linear, declared, manifest), linear.grid, linear.shape
    if (
        grid is None
        or len(grid.shape) != len(shape)
        or len(shape) < 2
        or linear.kind not in ("fp8-block", "fp8-grid")
    ):
        return block
    if grid_of(shape, block) == grid.shape:
        return block
    return implied_block(shape[-2], grid.shape[-2]) or 1, implied_block(shape[-1], grid.shape[-1]) or 1


def said_block(linear: Linear, declared: Declaration | None) -> Block | None:
    """The block that the config declares for a module whose scales are a grid; a grid of one block may be [1, 1]."""
    if declared is None or linear.grid is None or len(linear.grid.shape) != 2:
        return None
    entry = (declared.entries or {}).get(linear.module)
    if entry is not None and entry.group:
        return entry.group, entry.group
    return declared.block
