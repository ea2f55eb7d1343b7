"""A parent's NVFP4 experts: which tensors belong to an expert's gate and up, which runtimes fuse into one w13.

A Linear is `weight` U8 (two E2M1 codes a byte), `weight_scale` E4M3 (one for 16 columns) and `weight_scale_2` F32, the
global scale; a weight is the product of the three.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.pipeline.types import TensorRef

GLOBAL_SUFFIX, BLOCK_SUFFIX = ".weight_scale_2", ".weight_scale"
_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
WHY_UNFIT = (
    f"is not a {GLOBAL_SUFFIX} or {BLOCK_SUFFIX} of an NVFP4 gate or up beside which its weight and the other half's "
    f"global scale stand; only these can be reconciled"
)


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
