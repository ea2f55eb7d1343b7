"""What a number format is: parts, laws, spellings, and two verbs, encode and decode. Every format file makes one.

A format works on a matrix [R, C], a strip of whole rows at a time; a stack [E, R, C] is E matrices. Numbers are
right here once: how a published checkpoint names and declares them is a Spelling, of which a format may have many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.formats import F32
from shardmill.kernels.group_codes import GroupCodes
from shardmill.kernels.pieces import Pieces

Shape = tuple[int, ...]
Arrays = Mapping[str, NDArray[Any]]  # role -> a part's numbers, as stored
FLOATS = ("BF16", "F16", "F32")
RECAST = "recast/1"  # the law of a weight that keeps its source's codes and scales wherever a block can


@dataclass(frozen=True, slots=True)
class Params:
    """What a recipe may say of a format. A format that has no such side ignores it."""

    block: tuple[int, int] = (128, 128)
    group: int = 128
    scale_dtype: str = "F32"  # F8_E8M0: powers of two, a byte each
    law: str = ""  # one of the format's laws; "" is its first


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a weight: its role, dtype and shape, and how it goes with the weight's rows.

    per: weight rows that one index of axis `axis` covers; 0 where the part belongs to the whole weight.
    """

    role: str
    dtype: str
    shape: Shape
    per: int = 1
    axis: int = 0

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Which indices of its axis weight rows [begin, end) need; `begin` starts one."""
        return (
            (begin // self.per, -(-end // self.per))
            if self.per
            else (0, self.shape[self.axis] if self.shape else 1)
        )


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one family of checkpoints names a format's parts, and what its config.json says of them.

    ends: role -> what stands in place of the weight's `.weight`. dtypes, shapes: where the stored form differs.
    entry: params -> the object that declares it; None where this profile has no words for the format as a target.
    """

    profile: str
    ends: Mapping[str, str]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    entry: Callable[[Params], dict[str, Any]] | None = None
    law: str = ""  # the law that this profile's own tools follow, where it is not the format's first
    drafted: str = (
        ""  # the law that init writes, where a loader of this profile keeps scales in the model's dtype
    )
    unread: str = ""  # why stock transformers can't read a weight so; "" where it can
    unread_expert: str = ""  # the same of an expert's weight alone


@dataclass(frozen=True, slots=True)
class Setting:
    """What encode and decode need beside numbers."""

    params: Params
    spelling: Spelling
    codes: GroupCodes
    law: str
    amax: np.float32 | None = None  # of the tensor or its fused group, where the format surveys


@dataclass(frozen=True, slots=True)
class Coded:
    """A strip of a quantized source: its parts as they are stored, how they are read, and their numbers."""

    form: Format
    arrays: Arrays
    setting: Setting
    values: F32


@dataclass(frozen=True, slots=True)
class Recast:
    """A way from another format's parts that keeps more than decoding and encoding anew.

    survey(arrays): of a strip, what the encoder needs the largest of; encode(coded, setting): with that as amax.
    law: the only one under which it is the way; "" for any. unit: what a loss is counted by, where not the target's.
    """

    encode: Callable[[Coded, Setting], dict[str, NDArray[Any]]]
    survey: Callable[[Arrays], np.float32] | None = None
    law: str = ""
    unit: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class InPieces:
    """How a format whose elements share a scale over many rows or columns encodes a matrix that it sees in pieces.

    choose(pieces, (rows, C), setting): f32 [1, ceil(C/c)], the scales of one row of blocks of that many rows.
    encode(part, scales, setting): codes of a part [k, n] of that row, whose own scales are f32 [1, ceil(n/c)].
    stored(scales, setting): the scales as they are stored.
    """

    choose: Callable[[Pieces, tuple[int, int], Setting], F32]
    encode: Callable[[NDArray[Any], F32, Setting], NDArray[Any]]
    stored: Callable[[F32, Setting], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Format:
    """One number format.

    parts(shape, params): the stored tensors of a weight [R, C], in the format's own terms.
    unfit(shape, params): why such a weight can't be stored so; None where it can.
    unit(shape, params): (rows, columns) of the elements that share a scale.
    cut(shape, params): (rows, columns) that a tensor-parallel rank must get whole.
    encode(strip, setting): strip [rows, C], u16 (BF16 bits), f16 or f32 -> role -> array. Raises NonFinite.
    decode(arrays, setting): role -> array of a strip's parts -> f32 [rows, C].
    surveys: the encoder needs the largest magnitude of the whole tensor, and one for all of a fused group.
    in_pieces: where `encode` needs whole rows or blocks of rows, how to do without.
    """

    name: str
    title: str
    laws: Mapping[str, str]  # law -> what it does, the default first; {} for what is only read
    spellings: Sequence[Spelling]
    parts: Callable[[Shape, Params], tuple[Part, ...]]
    unfit: Callable[[Shape, Params], str | None]
    unit: Callable[[Shape, Params], tuple[int, int]]
    encode: Callable[[NDArray[Any], Setting], dict[str, NDArray[Any]]] | None
    decode: Callable[[Arrays, Setting], F32]
    surveys: bool = False
    in_pieces: InPieces | None = None
    weight_shape: Callable[[Shape, Spelling], Shape] = lambda stored, spelling: (
        stored
    )  # from the codes' own shape
    group_of: Callable[[Shape, Shape], int] | None = (
        None  # (weight's shape, scales' shape) -> columns of a group
    )
    cut: Callable[[Shape, Params], tuple[int, int]] | None = None  # where it is not `unit`
    counted: Callable[[Shape, Params], tuple[int, int]] | None = (
        None  # what a loss is counted by, where not `unit`
    )
    recasts: Mapping[str, Recast] = field(default_factory=dict)  # source format -> the way from it

    def rank_unit(self, shape: Shape, params: Params) -> tuple[int, int]:
        """What tensor parallelism must not split: (rows, columns)."""
        return (self.cut or self.unit)(shape[-2:], params)

    def spelling(self, profile: str) -> Spelling | None:
        return next((each for each in self.spellings if each.profile == profile), None)

    def stored(self, shape: Shape, params: Params, spelling: Spelling) -> tuple[Part, ...]:
        """The parts as this spelling stores them; a stack [E, R, C] has its experts in front."""
        stack, matrix = shape[:-2], shape[-2:]
        return tuple(
            Part(
                part.role,
                spelling.dtypes.get(part.role, part.dtype),
                (*stack, *spelling.shapes.get(part.role, tuple)(part.shape)),
                part.per,
                part.axis,
            )
            for part in self.parts(matrix, params)
            if part.role in spelling.ends
        )


def columns_of(group: int) -> Callable[[Shape, Params], str | None]:
    """An `unfit` for formats whose groups of `group` columns must be whole."""

    def unfit(shape: Shape, params: Params) -> str | None:
        if shape[-1] % group:
            return f"has {shape[-1]} columns, which are not whole groups of {group}"
        return None

    return unfit


def always_fit(shape: Shape, params: Params) -> str | None:
    return None


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> dict[str, Any]:
    """A config group of compressed-tensors 0.20, without its targets."""
    first = {key: weights[key] for key in ("num_bits", "type")}
    stated = {**first, "symmetric": True, "dynamic": False, **weights}
    return {"weights": stated, "input_activations": inputs, "output_activations": None, "format": form}


DYNAMIC_TOKENS: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": True,
    "strategy": "token",
}
