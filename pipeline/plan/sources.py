"""What a parent's quantized weights are made of: which tensors hold their scales, and whether they fit each other.

Block FP8: a weight F8_E4M3 [R, C] has its scales beside it, named like it with a suffix, one for each block: F32, or
BF16 as some quantizers write them. A scale multiplies a code back to a weight.

NVFP4: a Linear is `weight` U8 (two E2M1 codes a byte), `weight_scale` E4M3 (one for 16 columns) and `weight_scale_2`
F32, the global scale; a weight is the product of the three. Runtimes fuse an expert's gate and up into one w13.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.pipeline.types import SCALE_SUFFIXES, BlockShape, TensorRef

CODES_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16")

GLOBAL_SUFFIX, BLOCK_SUFFIX = ".weight_scale_2", ".weight_scale"
_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
NO_NVFP4_HALF = (
    "needs its weight and its partner's (gate's or up's) global scale beside it to be reconciled: only a "
    f"{GLOBAL_SUFFIX} or {BLOCK_SUFFIX} of an NVFP4 gate or up has both; keep it"
)


def scales_of(weight: TensorRef, tensors: Mapping[str, TensorRef]) -> TensorRef | None:
    """The tensor that holds the scales of `weight`, by name; None where there is none."""
    names = (weight.name + suffix for suffix in SCALE_SUFFIXES)
    return next((tensors[name] for name in names if name in tensors), None)


def why_not_block_fp8(weight: TensorRef, block: BlockShape, tensors: Mapping[str, TensorRef]) -> str | None:
    """Why `weight` can't be read as codes with one scale for each `block`; None where it can."""
    if weight.dtype != CODES_DTYPE or len(weight.shape) != 2 or 0 in weight.shape:
        return f"is {weight.dtype} {list(weight.shape)}; only matrices of {CODES_DTYPE} codes can be decoded, keep it"
    scales = scales_of(weight, tensors)
    if scales is None:
        return f"has no scales beside it ({' or '.join(weight.name + suffix for suffix in SCALE_SUFFIXES)})"
    grid = block.grid(weight.shape)
    if scales.shape != grid or scales.dtype not in SCALE_DTYPES:
        return (
            f"its scales {scales.name} are {scales.dtype} {list(scales.shape)}; blocks of {block} "
            f"need {' or '.join(SCALE_DTYPES)} {list(grid)}; correct `source_block`"
        )
    return None


def scales_beside(weight: TensorRef, tensors: Mapping[str, TensorRef]) -> tuple[TensorRef, ...]:
    """The scales without which the codes of `weight` mean nothing; none where it holds no codes."""
    if not weight.dtype.startswith(("F8_", "U8", "I8", "F4", "I32")):
        return ()
    names = (weight.name + suffix for suffix in (*SCALE_SUFFIXES, "_scale_2"))
    return tuple(tensors[name] for name in names if name in tensors)


def pair_of(scale: TensorRef, tensors: Mapping[str, TensorRef]) -> tuple[TensorRef, ...]:
    """The global and block scales of both halves that `scale` is one of: they are reconciled together or not at all."""
    suffix = next((suffix for suffix in (GLOBAL_SUFFIX, BLOCK_SUFFIX) if scale.name.endswith(suffix)), "")
    parent, _, half = scale.name.removesuffix(suffix).rpartition(".")
    names = (
        f"{parent}.{each}{end}"
        for each in (half, _OTHER_HALF.get(half, ""))
        for end in (GLOBAL_SUFFIX, BLOCK_SUFFIX)
    )
    return tuple(tensors[name] for name in names if name in tensors)


def halves(scale: TensorRef, tensors: Mapping[str, TensorRef]) -> tuple[TensorRef, ...]:
    """What reconciling `scale` reads: its own half's global scale, the other half's, its own codes.

    Empty where `scale` is not a scale of a half, or one of the three is missing or of another kind.
    """
    suffix = next((suffix for suffix in (GLOBAL_SUFFIX, BLOCK_SUFFIX) if scale.name.endswith(suffix)), "")
    parent, _, half = scale.name.removesuffix(suffix).rpartition(".")
    names = (
        f"{parent}.{half}{GLOBAL_SUFFIX}",
        f"{parent}.{_OTHER_HALF.get(half, '')}{GLOBAL_SUFFIX}",
        f"{parent}.{half}.weight",
    )
    refs = tuple(tensors[name] for name in names if name in tensors)
    kinds = ("F32", "F32", "U8")
    if len(refs) < len(kinds) or any(ref.dtype != kind for ref, kind in zip(refs, kinds, strict=True)):
        return ()
    return refs if scale.dtype == ("F32" if suffix == GLOBAL_SUFFIX else "F8_E4M3") else ()
