"""The actions: what a family does to a tensor. Each is one frozen class that holds everything known about it.

To add one: a class here and its row in ACTIONS, a stage where no stage does its work yet, and a test. A class tells
the keys that its families need, its stage, the layout that it makes before any byte is read, whether a tensor fits,
and its words. The key digests every field of the class, so no field can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import RECAST, Format, Params, Spelling
from shardmill.pipeline.formats.base import Part as FormatPart
from shardmill.pipeline.formats.kept import keeps
from shardmill.pipeline.formats.module import MAIN, WEIGHT, Held, end_of, held, is_further_part, targets
from shardmill.pipeline.plan import sources
from shardmill.pipeline.types import SCALE_SUFFIXES, BlockShape, Shape, TensorRef

# What fills an output tensor: the parent's own bytes, new codes, new scales, or values that a stage computes.
Part = Literal["bytes", "codes", "scales", "values"]
Outputs = tuple[tuple[str, str, Shape, Part], ...]  # name, dtype, shape, part
Tensors = Mapping[str, TensorRef]

_FLOATS = ("BF16", "F16", "F32")
_PACKED = ("U8", "I8", "F4")
_USUAL = BlockShape(128, 128)
# What a fused projection of an expert is published as, in the order of its rows.
_HALVES: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


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

    @property
    def surveys(self) -> bool:
        """Whether the tensor's largest magnitude, and its fused group's, is wanted before it is encoded."""
        return False

    def as_fused(self) -> Action:
        """What a runtime that fuses modules can tell of the action: members of one module must have it in common."""
        return self

    @classmethod
    def consumes(cls, name: str, given: Mapping[str, Any]) -> bool:
        """Whether a family of this action uses up the parent's tensor `name` with the weight that it belongs to."""
        return cls.consumes_scales and name.endswith(SCALE_SUFFIXES)

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

    def mains(self, ref: TensorRef) -> tuple[str, ...]:
        """The weights that `ref` becomes, by the names of their codes or values."""
        return (self.outputs(ref)[0][0],)

    def rank_unit(self, ref: TensorRef) -> tuple[Shape, BlockShape] | None:
        """The weight's own shape, and the (rows, columns) of it that a rank must get whole; None: nothing to split."""
        return (ref.shape, self.block_made) if self.block_made else None

    def unit(self, ref: TensorRef) -> BlockShape:
        """The elements that share a scale, or shared one."""
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
    scale_axes: int = 2  # 4: [n, 1, m, 1], as stock ModelOpt loaders have it

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        axes = {"scale_axes": 4} if given.get("profile") == "modelopt" else {}
        return super(QuantizeBlock, cls).of({**given, **axes})

    def outputs(self, ref: TensorRef) -> Outputs:
        n, m = self.block.grid(ref.shape)
        return (
            (ref.name, "F8_E4M3", ref.shape, "codes"),
            (ref.name + self.scale_suffix, "F32", (n, m) if self.scale_axes == 2 else (n, 1, m, 1), "scales"),
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
class Convert(Conversion):
    """A weight [R, C], or a stack [E, R, C] of them, goes from one number format to another.

    source: the parent's format; without one, floats. to: a format of shardmill.pipeline.formats. The other parts of a
    quantized source are in the weight's family too and are used up. A format that is surveyed reads its fused group.
    """

    name = "convert"
    needs = ("to", "expect")
    takes = (
        "source",
        "block",
        "source_block",
        "scale_dtype",
        "group",
        "numerics",
        "lossless",
        "transposed",
        "unstack",
    )
    stage = "convert"
    consumes_scales = True

    to: str
    profile: str
    source: str = "bf16"
    source_block: BlockShape = _USUAL
    scale_dtype: str = "F32"  # of block FP8; F8_E8M0: powers of two
    group: int = 128
    lossless: bool = False  # whether a block that does not decode to the parent's numbers is refused
    transposed: bool = False  # the parent stores [..., C, R]
    unstack: bool = (
        False  # a stack [E, R, C] becomes one weight an expert; gate_up_proj two, which share its rows
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        form = _format(given["to"], "to")
        if form.encode is None:
            raise ValueError(f"`to`: {form.name} is only read; choose from {', '.join(_written())}")
        spelling, source = form.spelling(given["profile"]), _format(given.get("source", "bf16"), "source")
        laws = list(form.laws)
        laws[:0] = [spelling.law] if spelling and spelling.law else []
        laws[:0] = [RECAST] if source.name != "bf16" and keeps(source, form) else []
        law = given.get("numerics") or laws[0]
        if law not in laws:
            raise ValueError(f"`numerics`: {form.name} has no {law!r}; choose from {', '.join(laws)}")
        _refuse_scale_dtype(given.get("scale_dtype", "F32"), form, law)
        for key, kind in (("lossless", bool), ("transposed", bool), ("unstack", bool), ("group", int)):
            if key in given and type(given[key]) is not kind:
                raise ValueError(f"`{key}` should be {'true or false' if kind is bool else 'a whole number'}")
        keys = {field.name for field in fields(cls)} - {"block", "numerics", "name"}
        kept = {key: given[key] for key in keys if key in given}
        return cls(**kept, block=given.get("block", _USUAL), numerics=law)

    @classmethod
    def consumes(cls, name: str, given: Mapping[str, Any]) -> bool:
        source = given.get("source", "bf16")
        return source != "bf16" and is_further_part(name, formats()[source])

    @property
    def params(self) -> Params:
        return Params((self.block.rows, self.block.cols), self.group, self.scale_dtype, self.numerics)

    @property
    def block_made(self) -> BlockShape | None:
        return self.block if self.to == "fp8-block" else None

    def held(self, ref: TensorRef, tensors: Tensors) -> Held | str:
        """What the parent holds of `ref`, or why that is no weight of the `source` format."""
        block = (self.source_block.rows, self.source_block.cols)
        return held(formats()[self.source], ref, tensors, Params(block, self.group), self.transposed)

    def shape(self, ref: TensorRef) -> Shape:
        """The weight's own shape [..., R, C], from its main part alone."""
        form = formats()[self.source]
        if form.name == "bf16":
            return (*ref.shape[:-2], *reversed(ref.shape[-2:])) if self.transposed else ref.shape
        ends = {each.profile: end_of(ref.name, each) for each in form.spellings}
        fitting = [each for each in form.spellings if ends[each.profile] is not None]
        return form.weight_shape(ref.shape, max(fitting, key=lambda each: len(ends[each.profile] or "")))

    def spelling(self) -> Spelling:
        spelling = formats()[self.to].spelling(self.profile)
        assert spelling is not None, "why_unfit has refused it"
        return spelling

    def members(self, ref: TensorRef) -> list[tuple[str, int, int]]:
        """(module, expert, first row) of every weight that `ref` becomes where it is unstacked."""
        experts, rows, _ = self.shape(ref)
        home, _, own = ref.name.removesuffix(WEIGHT).rpartition(".")
        parts = _HALVES.get(own, (own,))
        step = rows // len(parts)
        return [
            (f"{home}.{expert}.{own}", expert, place * step)
            for expert in range(experts)
            for place, own in enumerate(parts)
        ]

    def parts_of_rows(self, ref: TensorRef) -> int:
        """How many weights share the rows of each matrix of `ref`."""
        own = ref.name.removesuffix(WEIGHT).rpartition(".")[2]
        return len(_HALVES.get(own, (own,))) if self.unstack else 1

    def made_of(self, ref: TensorRef, module: str) -> dict[str, tuple[str, FormatPart]]:
        """Role -> (name, part) of one weight of an unstacked `ref`."""
        _, rows, columns = self.shape(ref)
        shape = (rows // self.parts_of_rows(ref), columns)
        found = targets(module, False, formats()[self.to], self.spelling(), shape, self.params)
        return {part.role: (name, part) for name, part in found}

    def made(self, ref: TensorRef) -> dict[str, tuple[str, FormatPart]]:
        """Role -> (name, part) of what `ref` becomes, where it is not unstacked."""
        form, target = formats()[self.source], formats()[self.to]
        ends = [WEIGHT] if form.name == "bf16" else [end_of(ref.name, each) or "" for each in form.spellings]
        end = max((each for each in ends if ref.name.endswith(each)), key=len, default="")
        plain = end != WEIGHT and not end.startswith(".")
        found = targets(
            ref.name.removesuffix(end), plain, target, self.spelling(), self.shape(ref), self.params
        )
        return {part.role: (name, part) for name, part in found}

    def mains(self, ref: TensorRef) -> tuple[str, ...]:
        return tuple(name for name, _, _, part in self.outputs(ref) if part == "values")

    def outputs(self, ref: TensorRef) -> Outputs:
        if self.why_unspelled() or len(ref.shape) < (3 if self.unstack else 2):
            return ()
        if self.unstack:
            weights = [self.made_of(ref, module) for module, _, _ in self.members(ref)]
        else:
            weights = [self.made(ref)]
        return tuple(
            (name, each.dtype, each.shape, "values" if role in MAIN else "scales")
            for made in weights
            for role, (name, each) in made.items()
        )

    def reads(self, ref: TensorRef, tensors: Tensors) -> tuple[TensorRef, ...]:
        found = self.held(ref, tensors)
        return () if isinstance(found, str) else tuple(each for each in found.refs.values() if each != ref)

    def why_unspelled(self) -> str | None:
        """Why the profile has no words for the target; None where it has."""
        form = formats()[self.to]
        spelling = form.spelling(self.profile)
        if self.scale_dtype != "F32" and self.profile != "fp8":
            return f"the profile {self.profile!r} has no words for scales in {self.scale_dtype}; choose fp8"
        if spelling and (spelling.entry or form.name == "bf16"):
            return None
        known = ", ".join(each.profile for each in form.spellings if each.entry)
        return f"the profile {self.profile!r} has no words for {self.to}; choose one of {known}"

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        if reason := self.why_unspelled():
            return reason
        found = self.held(ref, tensors)
        if isinstance(found, str):
            return found
        target = formats()[self.to]
        if self.unstack and (len(found.shape) != 3 or found.shape[1] % self.parts_of_rows(ref)):
            return f"has shape {list(found.shape)}; only a stack [experts, rows, columns] can be unstacked"
        if found.count > 1 and target.surveys and not self.unstack:
            return f"is a stack of {found.count}; {self.to} has a number for each matrix, unstack it first"
        if reason := target.unfit(found.shape[-2:], self.params):
            return f"{reason}, as {self.to} needs"
        own = {each.name for each in found.refs.values()}
        taken = [name for name, *_ in self.outputs(ref) if name in tensors and name not in own]
        return f"the parent holds {taken[0]} already" if taken else None

    def rank_unit(self, ref: TensorRef) -> tuple[Shape, BlockShape] | None:
        rows, columns = self.shape(ref)[-2:]
        shape = (rows // self.parts_of_rows(ref), columns)
        return shape, BlockShape(*formats()[self.to].rank_unit(shape, self.params))

    def unit(self, ref: TensorRef) -> BlockShape:
        return BlockShape(*formats()[self.to].unit(self.shape(ref)[-2:], self.params))

    @property
    def surveys(self) -> bool:
        return formats()[self.to].surveys and self.numerics != RECAST

    def words(self) -> str:
        return f"{self.source} -> {self.to} ({self.numerics})"


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
    each.name: each for each in (QuantizeBlock, Convert, Dequantize, Reblock, Reconcile, Rename, Copy, Drop)
}


def _format(name: Any, key: str) -> Format:
    if name not in formats():
        raise ValueError(f"`{key}`: {name!r} is no format; choose from {', '.join(formats())}")
    return formats()[name]


def _refuse_scale_dtype(dtype: str, form: Format, law: str) -> None:
    """Raises ValueError where scales can't have that dtype: a byte holds nothing but a power of two."""
    if dtype not in ("F32", "F8_E8M0"):
        raise ValueError(f"`scale_dtype` should be F32 or F8_E8M0, not {dtype!r}")
    if dtype == "F8_E8M0" and (form.name != "fp8-block" or law not in ("ue8m0/1", RECAST)):
        raise ValueError(
            "`scale_dtype`: F8_E8M0 holds powers of two, which are fp8-block's by `numerics` ue8m0/1"
        )


def _written() -> list[str]:
    return [name for name, form in formats().items() if form.encode]


def keys_of_families() -> frozenset[str]:
    """Every key that some action needs or takes."""
    return frozenset(key for action in ACTIONS.values() for key in (*action.needs, *action.takes))
