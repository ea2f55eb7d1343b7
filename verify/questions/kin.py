"""A child beside its parent, and what a tensor of one is in the other: converted, repaired, packed, of no origin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.laws import NUMERICS, REBLOCK, RECONCILE
from shardmill.verify.formats.linear import INTEGER_SHAPES
from shardmill.verify.formats.schemes import FLOATS, SCALE_DTYPES, WEIGHTS, Linear, split_name
from shardmill.verify.questions.companions import belongs_to
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.reading.manifest import Manifest

REPAIRS = (RECONCILE,)  # that change scales in place
REPAIRED_LEAVES = ("weight_scale", "weight_scale_2")
_ENDS = re.compile(r"(?<![^.])(norm|ln_f|final_layernorm|embed_tokens|wte)\.weight$")


@dataclass(frozen=True, slots=True)
class Kin:
    """Child and parent side by side: quantized modules of both, and where the parent's names went."""

    child: Checkpoint
    parent: Checkpoint
    linears: dict[str, Linear]
    theirs: dict[str, Linear]
    here: dict[str, str]  # parent's name -> name here
    containers: frozenset[str]  # of the child's tensors
    folded: frozenset[str]  # layers whose norms roundtrip holds to the weights that took factors from them

    @property
    def manifest(self) -> Manifest | None:
        return self.child.manifest


def is_of_the_trunk(kin: Kin, name: str) -> bool:
    """Whether a tensor is the embedding or the last norm of a stack of layers that is here."""
    front = _ENDS.sub("", name)
    return front != name and any(container.startswith(front) for container in kin.containers)


def is_re_encoded(kin: Kin, name: str) -> bool:
    """Whether a part of the parent's codes has new bytes by the manifest, though it may keep its dtype and shape."""
    if kin.manifest is None or not is_in_converted_module(kin, name):
        return False
    linear = kin.linears.get(split_of(kin.here[name], kin)[0])
    weight = linear.weight if linear is not None else None
    conversion = kin.manifest.conversions.get(weight.name) if weight is not None else None
    return conversion is not None and conversion.numerics in NUMERICS - {REBLOCK, RECONCILE}


def shape_of(checkpoint: Checkpoint, module: str, linears: dict[str, Linear]) -> tuple[int, ...]:
    """The shape of a weight decoded; () where headers alone do not show it."""
    linear = linears.get(module)
    if linear is not None and linear.weight is not None:
        return () if linear.kind in INTEGER_SHAPES or linear.kind in BY_ELEMENTS else linear.shape
    weight = weight_of(checkpoint, module, None)
    return weight.shape if weight is not None and weight.dtype in FLOATS else ()


def alike(kin: Kin, module: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two shapes are one weight's. A tool without a manifest may store it turned, or as another matrix."""
    if kin.manifest is None:
        return prod(ours) == prod(theirs)
    weight = weight_of(kin.child, module, kin.linears.get(module))
    conversion = kin.manifest.conversions.get(weight.name) if weight is not None else None
    turned = conversion is not None and conversion.family in kin.manifest.transposed
    return ours == theirs or (turned and ours == (*theirs[:-2], *reversed(theirs[-2:])))


def main_part(kin: Kin, module: str) -> str:
    weight = weight_of(kin.parent, module, kin.theirs.get(module))
    return weight.name if weight is not None else ""


def is_in_converted_module(kin: Kin, name: str) -> bool:
    """Whether a parent's tensor is the weight, or a scale, of a module that has another form here."""
    module, leaf = split_of(kin.here[name], kin)
    before_module = split_of(name, kin)[0]
    if leaf not in WEIGHTS and leaf not in SCALE_DTYPES and module not in kin.theirs:
        return False
    ours, theirs = kin.linears.get(module), kin.theirs.get(before_module)
    if ours is None and theirs is None:
        return False
    weight = weight_of(kin.child, module, ours)
    before = weight_of(kin.parent, before_module, theirs)
    if weight is None or before is None:
        return False
    return leaf != "bias" and form_of_weight(weight, ours) != form_of_weight(before, theirs)


def split_of(name: str, kin: Kin) -> tuple[str, str]:
    """(module, leaf); a stack of experts has the module's own name."""
    return (name, "weight") if name in kin.linears or name in kin.theirs else split_name(name)


def weight_of(checkpoint: Checkpoint, module: str, linear: Linear | None) -> Tensor | None:
    if linear is not None and linear.weight is not None:
        return linear.weight
    return checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors.get(module)


def form_of_weight(
    weight: Tensor, linear: Linear | None
) -> tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]:
    scales = linear.scales if linear is not None and linear.weight is not None else {}
    kept = (
        (leaf, scale.dtype, scale.shape)
        for leaf, scale in sorted(scales.items())
        if leaf.startswith(("weight", "scale"))
    )
    return weight.dtype, tuple(kept)


def is_rounded(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype in FLOATS and theirs.dtype in FLOATS and ours.shape == theirs.shape


def is_packed_elsewise(kin: Kin, ours: Tensor, theirs: Tensor) -> bool:
    """Whether floats became bitsandbytes' codes: bytes beside a table of their own."""
    tables = (f"{ours.name}.absmax", f"{ours.name}.quant_map", f"{split_name(ours.name)[0]}.SCB")
    return (
        theirs.dtype in FLOATS
        and ours.dtype in ("U8", "I8")
        and any(table in kin.child.tensors for table in tables)
    )


def is_encoded_anew(kin: Kin, name: str) -> bool:
    """Whether the manifest says that the codes of a tensor's module were written anew from the parent's codes.

    Of a module that was reblocked the codes stay, so they are compared byte by byte.
    """
    linear = kin.linears.get(split_name(kin.here[name])[0])
    if kin.manifest is None or linear is None or linear.weight is None:
        return False
    conversion = kin.manifest.conversions.get(linear.weight.name)
    return conversion is not None and conversion.numerics != "reblock/1"


def is_repaired(kin: Kin, name: str) -> bool:
    """Whether the manifest names a known repair of this very scale, of a packed module that has both its scales."""
    module, leaf = split_name(name)
    if kin.manifest is None or leaf not in REPAIRED_LEAVES or module not in kin.theirs:
        return False
    if kin.theirs[module].kind != "nvfp4":
        return False
    tensors = {f"{module}.{leaf}" for leaf in REPAIRED_LEAVES}
    return any(row.get("repair") in REPAIRS and row.get("tensor") in tensors for row in kin.manifest.repairs)


def has_origin(kin: Kin, name: str, linear: Linear | None) -> bool:
    """Whether the parent has what a converted weight can be of: itself under any name, or the stack that it was in."""
    if linear is None or linear.weight is None:
        return False
    before = {new: old for old, new in (kin.manifest.renamed if kin.manifest is not None else {}).items()}
    olds = {before.get(each, each) for each in (linear.float_name, linear.weight.name, name)}
    theirs = kin.parent.tensors
    if any(old in theirs or old in kin.parent.elsewhere or split_name(old)[0] in kin.theirs for old in olds):
        return True
    bank = linear.module.partition(".experts.")[0]
    return belongs_to(name, theirs, kin.child.tensors) or any(
        module.startswith(f"{bank}.experts") for module in kin.theirs if ".experts." in linear.module
    )
