"""A quantized module as its file shows it, and the words that all number formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.reading.header import Tensor

F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
Shape = tuple[int, ...]

FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("F8_E8M0", "U8")  # a byte e is the scale 2^(e - 127)

# The leaf of a scale's name -> dtypes in which a loader reads it.
SCALE_DTYPES: Mapping[str, tuple[str, ...]] = {
    "weight_scale_inv": (*FLOATS, *EXPONENTS),
    "weight_scale": (*FLOATS, "F8_E4M3", *EXPONENTS),
    "weight_scale_2": ("F32",),
    "weight_global_scale": ("F32",),
    "scale": (*FLOATS, *EXPONENTS),  # DeepSeek-V4 and transformers: beside codes alone
    "scale_weight": FLOATS,
    "qscale_weight": FLOATS,
    "scales": FLOATS,  # GPTQ, AWQ: beside a qweight alone
    "_scales": EXPONENTS,  # gpt-oss: beside _blocks
    "input_scale": FLOATS,
    "input_global_scale": ("F32",),
    "scale_input": FLOATS,
    "activation_scale": FLOATS,
    "qscale_act": FLOATS,
    "input_scale_ub": FLOATS,  # fbgemm: an upper bound, the same for all
    "absmax": ("F32", "U8"),  # bitsandbytes: beside a weight of bytes
    "nested_absmax": ("F32",),
}
INPUT_SCALES = ("input_scale", "input_global_scale", "scale_input", "activation_scale", "qscale_act")
GRIDS = (
    *("weight_scale_inv", "weight_scale", "scale", "scale_weight", "qscale_weight", "scales", "_scales"),
    "absmax",
)
TABLES = ("quant_map", "nested_quant_map", "quant_state_nf4", "quant_state_fp4")  # of bitsandbytes
EXTRAS = ("qzeros", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx", *TABLES)

FLAT = ("nf4", "bnb-fp4")  # codes in one column, whose shape is in a tensor of its own
PACKED = ("nvfp4", "ct-nvfp4", "mxfp4", "gpt-oss")  # two E2M1 codes a byte
SECOND = {"nvfp4": "weight_scale_2", "ct-nvfp4": "weight_global_scale"}  # the scale of the block scales
GROUP = {"nvfp4": 16, "ct-nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "gpt-oss": 32}


@dataclass(frozen=True, slots=True)
class Linear:
    """A quantized module: its weight (None if it is lost) and its scales by the leaf of their names."""

    module: str
    kind: str  # of verify.formats.table; "bare" = codes without a scale, "orphan" = scales without codes, "other"
    weight: Tensor | None
    scales: Mapping[str, Tensor]
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # zeros and tables of indices, by leaf
    grid: Tensor | None = field(init=False)  # the scale that has one entry a block
    shape: Shape = field(init=False)  # decoded; of GPTQ and AWQ [inputs, outputs], as they store it

    def __post_init__(self) -> None:
        """Every question asks for both, again and again."""
        grid = next((leaf for leaf in GRIDS if leaf in self.scales), "")
        object.__setattr__(self, "grid", self.scales.get(grid))
        object.__setattr__(self, "shape", self._shape())

    def _shape(self) -> Shape:
        if self.weight is None:
            return ()
        shape = self.weight.shape
        if self.kind == "gpt-oss" and len(shape) >= 2:
            return (*shape[:-2], shape[-2] * shape[-1] * 2)
        if self.kind in PACKED and shape:
            return (*shape[:-1], shape[-1] * 2)
        if self.kind in INTEGER_SHAPES:
            return INTEGER_SHAPES[self.kind](self)
        return shape

    @property
    def float_name(self) -> str:
        """The name that the weight had before it was quantized."""
        if self.weight is None or not self.weight.name.endswith((".weight_packed", ".qweight", "_blocks")):
            return self.weight.name if self.weight is not None else self.module
        return self.module if self.kind == "gpt-oss" else f"{self.module}.weight"


def bits_of(linear: Linear) -> int:
    """Bits of an integer code in I32 words, as the tensors' own shapes show them; 4 where they don't."""
    weight, scale, zeros = linear.weight, linear.grid, linear.extras.get("qzeros")
    if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2:
        return 4
    columns = scale.shape[1]
    if linear.kind == "awq" and columns:
        return 32 * weight.shape[1] // columns or 4
    if linear.kind == "gptq":
        index = linear.extras.get("g_idx")
        if index is not None and len(index.shape) == 1 and index.shape[0]:
            return 32 * weight.shape[0] // index.shape[0] or 4
        if zeros is not None and len(zeros.shape) == 2 and columns:
            return 32 * zeros.shape[1] // columns or 4
    return 4


def _stored_by_inputs(linear: Linear) -> Shape:
    weight, bits = linear.weight, bits_of(linear)
    if weight is None or len(weight.shape) != 2:
        return weight.shape if weight is not None else ()
    rows, columns = weight.shape
    return (rows * 32 // bits, columns) if linear.kind == "gptq" else (rows, columns * 32 // bits)


def _stored_by_outputs(linear: Linear) -> Shape:
    assert linear.weight is not None
    shape = linear.weight.shape
    return (*shape[:-1], shape[-1] * 8) if shape else shape


INTEGER_SHAPES: Mapping[str, Callable[[Linear], Shape]] = {
    "gptq": _stored_by_inputs,
    "awq": _stored_by_inputs,
    "int-pack": _stored_by_outputs,
}


def implied_block(size: int, blocks: int) -> int:
    """The smallest block that cuts `size` into `blocks`, or 0 if none does."""
    if blocks < 1 or size < blocks:
        return 0
    block = -(-size // blocks)
    return block if -(-size // block) == blocks else 0


def is_grid(shape: Shape, grid: Shape) -> bool:
    """Whether some block size gives this grid."""
    return len(shape) == len(grid) and all(
        implied_block(size, blocks) for size, blocks in zip(shape, grid, strict=True)
    )


def grid_of(shape: Shape, block: tuple[int, int]) -> Shape:
    """The scales' shape of a weight [..., R, C] in blocks."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def ones(shape: Shape) -> bool:
    """Whether a tensor of this shape is one number."""
    return all(dim == 1 for dim in shape)


class Form(NamedTuple):
    """One number format: how its parts must fit together, how its codes become numbers, how deeply it is judged."""

    kind: str
    title: str  # for people
    makers: str  # who publishes it
    parts: str  # its tensors, with dtypes and shapes
    needs: tuple[str, ...]  # leaves without which the codes are bare; the first may be any of GRIDS
    scale_dtypes: tuple[str, ...]  # of the grid
    grid: Callable[[Linear, Tensor], str]  # what the grid's shape should be, or "" where it fits
    unpack: (
        Callable[[U8, int], tuple[F32, U8]] | None
    )  # (stored rows, bits) -> (values before scaling, codes)
    error_max: float  # relative, of a weight rounded to nearest without data
    top: int = 0  # the largest magnitude of a code where reaching it often means clipping; 0 = it does not
    lacks: tuple[str, ...] = ()  # what of it is not judged, in words
    recognize: Callable[[Tensor, Mapping[str, Tensor]], bool] | None = (
        None  # (codes, scales by leaf) -> whether they are this form's, asked before the rules for all others
    )
