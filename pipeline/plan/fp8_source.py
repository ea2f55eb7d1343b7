"""A parent's block-FP8 weights: which tensor holds a weight's scales, and whether the two fit each other.

A weight F8_E4M3 [R, C] has its scales beside it, named like it with a suffix, one for each block: F32, or BF16 as
some quantizers write them. A scale multiplies a code back to a weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.pipeline.types import (
    SCALE_SUFFIXES,
    Assignment,
    BlockShape,
    Dequantize,
    FromBlocks,
    Reblock,
    TensorRef,
)

CODES_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16")


def scales_of(weight: TensorRef, tensors: Mapping[str, TensorRef]) -> TensorRef | None:
    """The tensor that holds the scales of `weight`, by name; None where there is none."""
    names = (weight.name + suffix for suffix in SCALE_SUFFIXES)
    return next((tensors[name] for name in names if name in tensors), None)


def source_block(action: FromBlocks) -> BlockShape:
    """The parent's block that `action` starts from."""
    return action.source_block if isinstance(action, Reblock) else action.block


def why_unfit(each: Assignment, families: Mapping[str, str]) -> str | None:
    """Why the codes and scales of an assignment that starts from block FP8 can't be read; None if they can.

    families: parent tensor -> its family. The scales must belong to the weight's own family, which consumes them.
    """
    weight, scales, action = each.source, each.scales, each.action
    assert isinstance(action, Dequantize | Reblock)
    if weight.dtype != CODES_DTYPE or len(weight.shape) != 2 or 0 in weight.shape:
        return f"is {weight.dtype} {list(weight.shape)}; only matrices of {CODES_DTYPE} codes can be decoded, keep it"
    if scales is None:
        return f"has no scales beside it ({' or '.join(weight.name + suffix for suffix in SCALE_SUFFIXES)})"
    grid = source_block(action).grid(weight.shape)
    if scales.shape != grid or scales.dtype not in SCALE_DTYPES:
        return (
            f"its scales {scales.name} are {scales.dtype} {list(scales.shape)}; blocks of {source_block(action)} "
            f"need {' or '.join(SCALE_DTYPES)} {list(grid)}; correct `source_block`"
        )
    if families.get(scales.name) != each.family:
        return (
            f"its scales {scales.name} are not in its family {each.family!r}; add them to the family's globs"
        )
    return None
