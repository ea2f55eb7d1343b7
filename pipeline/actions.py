"""The actions: what a family does to a tensor. Each is one frozen class that holds everything known about it.

To add one: a class here and its row in ACTIONS, a stage where no stage does its work yet, and a test. A class tells
the keys that its families need, its stage, the layout that it makes before any byte is read, whether a tensor fits,
and its words. The key digests every field of the class, so no field can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from shardmill.pipeline.plan import sources
from shardmill.pipeline.types import BlockShape, Shape, TensorRef

# What fills an output tensor: the parent's own bytes, new codes, new scales, or values that a stage computes.
Part = Literal["bytes", "codes", "scales", "values"]
Outputs = tuple[tuple[str, str, Shape, Part], ...]  # name, dtype, shape, part
Tensors = Mapping[str, TensorRef]

_FLOATS = ("BF16", "F16", "F32")
_PACKED = ("U8", "I8", "F4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What every action has. A field of a subclass is filled from the recipe's key of the same name."""

    name: ClassVar[str]  # as a recipe writes it
    # convert: a weight's bytes change, or what they mean; the manifest lists it under `conversions`.
    kind: ClassVar[Literal["copy", "drop", "move", "convert", "repair"]]
    needs: ClassVar[tuple[str, ...]]  # keys that a family must give
    takes: ClassVar[tuple[str, ...]] = ()  # keys that it may give
    stage: ClassVar[str | None] = None  # the stage that does it, where the six standard ones do not
    encodes: ClassVar[bool] = False  # new codes and scales are computed from float values
    consumes_scales: ClassVar[bool] = (
        False  # the family matches the parent's block scales too and uses them up
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The action of a family whose keys are `given`. Raises ValueError where they contradict each other."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def outputs(self, ref: TensorRef) -> Outputs:
        """The tensors that `ref` becomes, from metadata alone."""
        raise NotImplementedError

    def scales(self, ref: TensorRef, tensors: Tensors) -> TensorRef | None:
        """The parent's tensor that holds the scales of `ref`, where the action reads them."""
        return None

    def reads(self, ref: TensorRef, tensors: Tensors) -> tuple[TensorRef, ...]:
        """Further tensors of the parent that the action reads."""
        return ()

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        """Why `ref` can't have this action, as the end of a sentence about it; None where it can."""
        return None

    def words(self) -> str:
        """What the action does, in a few words; the one description that is shown anywhere."""
        return self.name

    def as_fused(self) -> Action:
        """What a runtime that fuses modules can tell of the action: members of one module must have it in common."""
        return self

    def key(self) -> list[Any]:
        """The name and every field, as JSON holds them: part of the shard's key."""
        return [self.name, asdict(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Action):
    """The tensor is passed on byte for byte."""

    name = "keep"
    kind = "copy"
    needs = ("reason",)

    def outputs(self, ref: TensorRef) -> Outputs:
        return ((ref.name, ref.dtype, ref.shape, "bytes"),)

    def words(self) -> str:
        return "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Action):
    """The tensor is left out, as the recipe declares."""

    name = "drop"
    kind = "drop"
    needs = ("reason",)

    def outputs(self, ref: TensorRef) -> Outputs:
        return ()

    def words(self) -> str:
        return "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename(Action):
    """The tensor is passed on under another name."""

    name = "rename"
    kind = "move"
    needs = ("to", "expect")

    to: str

    def outputs(self, ref: TensorRef) -> Outputs:
        return ((self.to, ref.dtype, ref.shape, "bytes"),)

    def words(self) -> str:
        return f"renamed {self.to}"

    def as_fused(self) -> Action:
        """A tensor under another name is still a copy."""
        return Copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Action):
    """What changes a weight's bytes, or their meaning, by a formula that has an id."""

    block: BlockShape  # of the scales that the weight gets, or else of those that it had
    numerics: str  # the formula's id; another id stands for other bits
    kind = "convert"

    @property
    def block_made(self) -> BlockShape | None:
        """The block of the block-FP8 weight that is left; None where none is."""
        return self.block

    def words(self) -> str:
        return converted(self.numerics, self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeBlock(Conversion):
    """A weight [R, C] becomes E4M3 codes and one F32 scale a block.

    The stored name ends in `_scale_inv`, DeepSeek's historical one; the number *multiplies* a code back to a weight.
    """

    name = "quantize"
    needs = ("block", "expect")
    takes = ("numerics",)
    encodes = True

    numerics: str = "amax/1"  # one of shardmill.kernels.block_fp8's formulas
    scale_suffix: str = "_scale_inv"

    def outputs(self, ref: TensorRef) -> Outputs:
        return (
            (ref.name, "F8_E4M3", ref.shape, "codes"),
            (ref.name + self.scale_suffix, "F32", self.block.grid(ref.shape), "scales"),
        )

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        if ref.dtype not in _FLOATS:
            coded = ref.dtype in _PACKED or ref.dtype[:2] == "F8"
            kind = "already quantized or packed" if coded else "no float"
            return f"is {ref.dtype}, {kind}; only {', '.join(_FLOATS)} can be quantized, keep it"
        if len(ref.shape) != 2 or 0 in ref.shape:
            return f"has shape {list(ref.shape)}; only matrices [rows, columns] can be quantized, keep it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dequantize(Conversion):
    """Block-FP8 codes [R, C] of the parent become BF16: code times its block's scale in f32, rounded once."""

    name = "dequantize"
    needs = ("source_block", "expect")
    stage = "dequantize"
    consumes_scales = True

    numerics: str = "dequantize/1"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        return cls(block=given["source_block"])

    @property
    def block_made(self) -> BlockShape | None:
        return None

    def outputs(self, ref: TensorRef) -> Outputs:
        return ((ref.name, "BF16", ref.shape, "values"),)

    def scales(self, ref: TensorRef, tensors: Tensors) -> TensorRef | None:
        return sources.scales_of(ref, tensors)

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        return sources.why_not_block_fp8(ref, self.block, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reblock(Conversion):
    """Block-FP8 codes of the parent stay; each scale is repeated over the smaller blocks that lie in its own.

    So the child decodes to the parent's numbers exactly, whatever they were.
    """

    name = "reblock"
    needs = ("source_block", "block", "expect")
    stage = "dequantize"
    consumes_scales = True

    numerics: str = "reblock/1"
    source_block: BlockShape  # the parent's
    scale_suffix: str = "_scale_inv"

    def __post_init__(self) -> None:
        whole, part = self.source_block, self.block
        if whole.rows % part.rows or whole.cols % part.cols:
            raise ValueError(
                f"blocks of {whole} do not divide into blocks of {part}; only a smaller block keeps every number: "
                f"dequantize first, then quantize"
            )

    def outputs(self, ref: TensorRef) -> Outputs:
        return (
            (ref.name, "F8_E4M3", ref.shape, "bytes"),
            (ref.name + self.scale_suffix, "F32", self.block.grid(ref.shape), "scales"),
        )

    def scales(self, ref: TensorRef, tensors: Tensors) -> TensorRef | None:
        return sources.scales_of(ref, tensors)

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        return sources.why_not_block_fp8(ref, self.source_block, tensors)

    def words(self) -> str:
        return converted(self.numerics, self.block, self.source_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile(Action):
    """A global or block scale of an NVFP4 expert's gate or up, made to share one global scale with the other half."""

    name = "reconcile"
    kind = "repair"
    needs = ("expect",)
    stage = "reconcile"

    numerics: str = "reconcile/1"

    def outputs(self, ref: TensorRef) -> Outputs:
        return ((ref.name, ref.dtype, ref.shape, "values"),)

    def reads(self, ref: TensorRef, tensors: Tensors) -> tuple[TensorRef, ...]:
        return sources.halves(ref, tensors)

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        return None if sources.halves(ref, tensors) else sources.NO_NVFP4_HALF

    def words(self) -> str:
        return self.numerics


def converted(numerics: str, block: BlockShape, source_block: BlockShape | None = None) -> str:
    """The words of a conversion, from what a manifest holds of it too."""
    return f"{numerics} {source_block} -> {block}" if source_block else f"{numerics} {block}"


# The word in a recipe -> what is done. To add an action, add a row.
ACTIONS: dict[str, type[Action]] = {
    each.name: each for each in (QuantizeBlock, Dequantize, Reblock, Reconcile, Rename, Copy, Drop)
}


def keys_of_families() -> frozenset[str]:
    """Every key that some action needs or takes."""
    return frozenset(key for action in ACTIONS.values() for key in (*action.needs, *action.takes))
