"""How weights are quantized in the field: which tensors belong together, by name, dtype and shape alone.

| kind | weight | scales | value of a code |
|---|---|---|---|
| fp8-block | F8_E4M3 [R,C] `weight` | `weight_scale_inv` [ceil(R/r), ceil(C/c)] | code * scale |
| fp8-tensor, -channel, -grid, -pbwo | F8_E4M3 `weight` | `weight_scale` [] / [R,1] / 2-D / [b,1,b,1] | code * scale |
| mxfp8 | F8_E4M3 `weight` | `weight_scale` U8 or F8_E8M0 [R,C/32] | code * 2^(scale-127) |
| nvfp4 | U8 [R,C/2] `weight` | `weight_scale` F8_E4M3 [R,C/16], `weight_scale_2` F32 [] | code * scale * scale_2 |
| mxfp4 | U8 [R,C/2] `weight_packed` | `weight_scale` U8 or F8_E8M0 [R,C/32] | code * 2^(scale-127) |
| ct-nvfp4 | U8 [R,C/2] `weight_packed` | `weight_scale` F8_E4M3, `weight_global_scale` | code * scale / global |
| comfy-fp8 | F8_E4M3 `weight` | `scale_weight` F32 [] | code * scale |

`weight_scale_inv` is DeepSeek's historical name: the number multiplies. `weight_global_scale` truly divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

# The leaf of a scale's name -> dtypes in which a loader reads it.
FLOATS = ("F32", "BF16", "F16")
SCALE_DTYPES: Mapping[str, tuple[str, ...]] = {
    "weight_scale_inv": ("F32", "BF16", "F16", "F8_E8M0"),
    "weight_scale": ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8"),
    "weight_scale_2": ("F32",),
    "weight_global_scale": ("F32",),
    "scale_weight": FLOATS,
    "input_scale": FLOATS,
    "input_global_scale": ("F32",),
    "scale_input": FLOATS,
}
INPUT_SCALES = ("input_scale", "input_global_scale", "scale_input")
CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "U8")
WEIGHTS = ("weight", "weight_packed")
PACKED = ("nvfp4", "ct-nvfp4", "mxfp4")  # two codes a byte
SECOND = {"nvfp4": "weight_scale_2", "ct-nvfp4": "weight_global_scale"}  # the scale of the block scales
GROUP = {"nvfp4": 16, "ct-nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


@dataclass(frozen=True, slots=True)
class Linear:
    """A quantized module: its weight (None if it is lost) and its scales by the leaf of their names."""

    module: str
    kind: str  # see the table above; "bare" = codes without a scale, "orphan" = scales without codes, "other"
    weight: Tensor | None
    scales: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight decoded."""
        if self.weight is None:
            return ()
        shape = self.weight.shape
        return (*shape[:-1], shape[-1] * 2) if self.kind in PACKED and shape else shape

    @property
    def grid(self) -> Tensor | None:
        """The scale that has one entry a block."""
        for leaf in ("weight_scale_inv", "weight_scale", "scale_weight"):
            if leaf in self.scales:
                return self.scales[leaf]
        return None


def split_name(name: str) -> tuple[str, str]:
    """(module, leaf): `a.b.weight_scale` -> (`a.b`, `weight_scale`); a fused `a.gate_up_proj_scale_inv` too."""
    module, _, leaf = name.rpartition(".")
    if leaf.endswith("_scale_inv") and leaf != "weight_scale_inv":
        return f"{module}.{leaf.removesuffix('_scale_inv')}", "weight_scale_inv"
    return module, leaf


def is_scale(name: str) -> bool:
    return split_name(name)[1] in SCALE_DTYPES


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Linear]:
    """Module -> Linear, of every module that has codes or a scale, in the order of names."""
    scales: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, None] = {}
    for name, tensor in tensors.items():
        module, leaf = split_name(name)
        if leaf in SCALE_DTYPES:
            scales.setdefault(module, {})[leaf] = tensor
            modules.setdefault(module)
        elif leaf in WEIGHTS and tensor.dtype in ("F8_E4M3", "F8_E5M2"):
            modules.setdefault(module)
    return {module: _linear(module, tensors, scales.get(module, {})) for module in sorted(modules)}


def _linear(module: str, tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> Linear:
    candidates = (f"{module}.weight_packed", f"{module}.weight", module)
    weight = next((tensors[name] for name in candidates if name in tensors), None)
    if weight is None and f"{module}.qweight" in tensors:
        weight = tensors[f"{module}.qweight"]
    if weight is None or weight.dtype in FLOATS:
        return Linear(module, "orphan", None, scales)
    if weight.dtype not in CODE_DTYPES:
        return Linear(module, "other", weight, scales)
    return Linear(module, _kind(weight, scales), weight, scales)


def _kind(weight: Tensor, scales: Mapping[str, Tensor]) -> str:
    if weight.dtype == "U8":
        if "weight_scale" in scales and scales["weight_scale"].dtype in ("U8", "F8_E8M0"):
            return "mxfp4"
        if "weight_global_scale" in scales or weight.name.endswith("weight_packed"):
            return "ct-nvfp4"
        return "nvfp4"
    if "weight_scale_inv" in scales:
        return "fp8-block"
    if "scale_weight" in scales:
        return "comfy-fp8"
    if "weight_scale" not in scales:
        return "bare"
    scale = scales["weight_scale"]
    if scale.dtype in ("U8", "F8_E8M0"):
        return "mxfp8"
    if len(scale.shape) == 4 and len(weight.shape) == 2:
        return "fp8-pbwo"
    if all(dim == 1 for dim in scale.shape):
        return "fp8-tensor"
    per_row = weight.shape[:-1]
    return "fp8-channel" if scale.shape in (per_row, (*per_row, 1)) else "fp8-grid"


def pair_faults(linears: Iterable[Linear]) -> Iterator[Finding]:
    """Codes without scales, scales without codes, scales whose dtype or shape do not fit."""
    for linear in linears:
        if linear.kind == "orphan":
            for scale in linear.scales.values():
                yield Finding("orphan-scale", scale.file, scale.name, "the weight that it scales", "none")
            continue
        if linear.kind == "other":
            continue
        assert linear.weight is not None
        second = SECOND.get(linear.kind)
        if linear.grid is None or (second is not None and second not in linear.scales):
            yield _bare(linear)
        yield from _dtype_faults(linear)
        yield from _grid_faults(linear, linear.weight)


def _bare(linear: Linear) -> Finding:
    assert linear.weight is not None
    wanted = {"nvfp4": "weight_scale and weight_scale_2", "ct-nvfp4": "weight_scale and weight_global_scale"}
    expected = f"{linear.module}.{wanted.get(linear.kind, 'weight_scale_inv or weight_scale')}"
    got = ", ".join(sorted(linear.scales)) or "no scale"
    return Finding("bare-codes", linear.weight.file, linear.weight.name, expected, got)


def _dtype_faults(linear: Linear) -> Iterator[Finding]:
    for leaf, scale in linear.scales.items():
        allowed = SCALE_DTYPES[leaf]
        if leaf == "weight_scale" and linear.kind in ("nvfp4", "ct-nvfp4"):
            allowed = ("F8_E4M3",)
        elif leaf == "weight_scale" and linear.kind.startswith("fp8"):
            allowed = FLOATS
        if scale.dtype not in allowed:
            yield Finding("scale-dtype", scale.file, scale.name, " or ".join(allowed), scale.dtype)


def _grid_faults(linear: Linear, weight: Tensor) -> Iterator[Finding]:
    for leaf, scale in linear.scales.items():
        expected = _expected_grid(linear, weight, leaf, scale)
        if expected:
            yield Finding(
                "scale-grid", scale.file, scale.name, f"{expected} for {weight}", str(list(scale.shape))
            )


def _expected_grid(linear: Linear, weight: Tensor, leaf: str, scale: Tensor) -> str:
    """What the scale's shape should be, or "" where it fits."""
    shape = linear.shape
    if leaf not in ("weight_scale_inv", "weight_scale"):
        leading = weight.shape[:-2]  # banks of experts have one global scale each, or one each of gate and up
        fits = all(dim == 1 for dim in scale.shape) or scale.shape in (leading, (*leading, 1), (*leading, 2))
        return "" if fits else "one number"
    if linear.kind in GROUP:
        grid = (*shape[:-1], -(-shape[-1] // GROUP[linear.kind])) if shape else ()
        return "" if scale.shape == grid else str(list(grid))
    if linear.kind == "fp8-pbwo":
        fits = scale.shape[1] == scale.shape[3] == 1 and _is_grid(shape, (scale.shape[0], scale.shape[2]))
        return "" if fits else "[row blocks, 1, column blocks, 1]"
    if linear.kind in ("fp8-block", "fp8-grid"):
        fits = len(scale.shape) == len(shape) and len(shape) >= 2 and scale.shape[:-2] == shape[:-2]
        return (
            "" if fits and _is_grid(shape[-2:], scale.shape[-2:]) else "[ceil(rows / r), ceil(columns / c)]"
        )
    return ""


def _is_grid(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether some block size gives this grid."""
    return all(implied_block(size, blocks) for size, blocks in zip(shape, grid, strict=True))


def implied_block(size: int, blocks: int) -> int:
    """The smallest block that cuts `size` into `blocks`, or 0 if none does."""
    if blocks < 1 or size < blocks:
        return 0
    block = -(-size // blocks)
    return block if -(-size // block) == blocks else 0


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The scales' shape of a weight [..., R, C] in blocks."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
