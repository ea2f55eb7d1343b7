"""Which tensors belong together, and which number format they are: by names, dtypes and shapes alone.

The formats are in `verify.formats.forms`, a file each. A name decides last: `weight_scale_inv` of one number is a scale
per tensor, whatever its maker calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from shardmill.verify.formats.forms import bitsandbytes, gptq
from shardmill.verify.formats.forms.whole_fp8 import PARTS_MAX
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import (
    EXPONENTS,
    EXTRAS,
    FLOATS,
    GRIDS,
    GROUP,
    INPUT_SCALES,
    PACKED,
    SCALE_DTYPES,
    SECOND,
    TABLES,
    Form,
    Linear,
    Shape,
    bits_of,
    grid_of,
    implied_block,
    is_grid,
    ones,
)
from shardmill.verify.formats.table import FORMS
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

__all__ = [
    "FLOATS", "GROUP", "INPUT_SCALES", "PACKED", "SCALE_DTYPES", "SECOND", "Linear", "bits_of", "grid_of",
    "implied_block", "is_grid",
]  # fmt: skip

CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8")
WEIGHTS = ("weight", "weight_packed")
_WITH_A_SCALE = ("U8", "I8", "I32")
_CODES_ENDS = (".weight_packed", ".weight", ".qweight", "_blocks", "")
_ALONE = ("F8_E4M3", "F8_E5M2")  # codes even without a scale
_FUSED = {"_scale_inv": "weight_scale_inv", "_blocks": "_blocks", "_scales": "_scales"}
_BYTES_BESIDE = frozenset(("absmax", "nested_absmax", *TABLES))  # of bitsandbytes, `weight.absmax`
_STATES = {"bitsandbytes__nf4": "quant_state_nf4", "bitsandbytes__fp4": "quant_state_fp4"}
_PARTS = frozenset((*SCALE_DTYPES, *EXTRAS, "qweight", "_blocks"))
_COMMON = frozenset(
    ("scale", "scales", *EXTRAS, "_scales", "_blocks", *_BYTES_BESIDE)
)  # words that others use too


def split_name(name: str) -> tuple[str, str]:
    """(module, leaf): `a.b.weight_scale` -> (`a.b`, `weight_scale`); a fused `a.gate_up_proj_blocks` too."""
    module, _, leaf = name.rpartition(".")
    if leaf in _BYTES_BESIDE and module.endswith(".weight"):
        return module.removesuffix(".weight"), leaf
    if leaf in _STATES and module.endswith(".weight.quant_state"):
        return module.removesuffix(".weight.quant_state"), _STATES[leaf]
    stem, meaning = _stem(leaf)
    return (f"{module}.{stem}" if stem else module), meaning


@lru_cache(4096)
def _stem(leaf: str) -> tuple[str, str]:
    """(what of a leaf belongs to the module's name, what is left of it)"""
    if leaf in SCALE_DTYPES:
        return "", leaf
    if leaf.endswith("proj_scale"):  # of a stack of experts, whose codes have no `.weight`
        return leaf.removesuffix("_scale"), "weight_scale"
    for ending, meaning in _FUSED.items():
        if leaf.endswith(ending) and leaf != ending:
            return leaf.removesuffix(ending), meaning
    return "", leaf


def is_scale(name: str) -> bool:
    return split_name(name)[1] in SCALE_DTYPES


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Linear]:
    """Module -> Linear, of every module that has codes or a scale, in the order of names."""
    parts: dict[str, dict[str, Tensor]] = {}
    unscaled: list[str] = []
    for name, tensor in tensors.items():
        module, leaf = split_name(name)
        if leaf in _PARTS:
            if leaf not in _COMMON or _beside_codes(module, leaf, tensor, tensors):
                parts.setdefault(module, {})[leaf] = tensor
        elif leaf in WEIGHTS and (tensor.dtype in _ALONE or leaf == "weight_packed"):
            parts.setdefault(module, {})
        elif leaf in WEIGHTS and tensor.dtype in _WITH_A_SCALE:
            unscaled.append(module)
    _take_bare(parts, unscaled)
    return {module: _linear(module, tensors, parts[module]) for module in sorted(parts)}


def _take_bare(parts: dict[str, dict[str, Tensor]], unscaled: list[str]) -> None:
    """Integers without a scale are codes where a sibling's have one; other tools name scales in ways of their own."""
    lacking = [module for module in unscaled if module not in parts]
    kinds = {kind_of(module) for module in parts} if lacking else set()
    for module in lacking:
        if kind_of(module) in kinds:
            parts[module] = {}


def _beside_codes(module: str, leaf: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a common name belongs to codes: `scale` is a norm's weight in other places."""
    if leaf == "_blocks":
        return tensor.dtype == "U8"
    if leaf == "_scales":
        return tensor.dtype == "U8" or f"{module}_blocks" in tensors
    if leaf == "scale":
        weight = tensors.get(f"{module}.weight")
        return tensor.dtype == "F8_E8M0" or (weight is not None and weight.dtype in CODE_DTYPES)
    if leaf in _BYTES_BESIDE:
        weight = tensors.get(f"{module}.weight")
        return weight is not None and weight.dtype == "U8" and f"{module}.weight.absmax" in tensors
    return f"{module}.qweight" in tensors or f"{module}.weight_packed" in tensors


def _linear(module: str, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Linear:
    scales, extras = parts, dict[str, Tensor]()
    if not parts.keys() <= SCALE_DTYPES.keys():
        scales = {leaf: tensor for leaf, tensor in parts.items() if leaf in SCALE_DTYPES}
        extras = {leaf: tensor for leaf, tensor in parts.items() if leaf in EXTRAS}
    weight = _codes(module, tensors)
    if weight is None or (weight.dtype in FLOATS and f"{module}.qweight" not in tensors):
        return Linear(module, "orphan", None, scales, extras)
    if weight.dtype == "U8" and "absmax" in scales:
        kind = "bnb-fp4" if "quant_state_fp4" in extras else "nf4"
        return Linear(module, kind, weight, scales, extras)
    return Linear(module, _kind(weight, scales), weight, scales, extras)


def _codes(module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    for end in _CODES_ENDS:
        if (weight := tensors.get(module + end)) is not None:
            return weight
    return None


_RECOGNIZED = tuple((form.kind, form.recognize) for form in FORMS.values() if form.recognize)


def _kind(weight: Tensor, scales: Mapping[str, Tensor]) -> str:
    for kind, recognize in _RECOGNIZED:
        if recognize(weight, scales):
            return kind
    if weight.name.endswith(".qweight"):
        return _words_kind(weight, scales.get("scales"))
    if weight.name.endswith("_blocks"):
        return "gpt-oss"
    grid = next((scales[leaf] for leaf in ("weight_scale", "scale") if leaf in scales), None)
    if weight.dtype == "I32" and weight.name.endswith(".weight_packed"):
        return "int-pack"
    if weight.dtype == "U8":
        if grid is not None and grid.dtype in EXPONENTS and not set(SECOND.values()) & scales.keys():
            return "mxfp4"
        packed = weight.name.endswith("weight_packed")
        return "ct-nvfp4" if packed or "weight_global_scale" in scales else "nvfp4"
    if weight.dtype == "I8":
        return "bare" if grid is None else "mxfp4" if grid.dtype in EXPONENTS else "int8"
    if weight.dtype in _ALONE:
        return _fp8_kind(weight, scales)
    return "other"


def _words_kind(weight: Tensor, scale: Tensor | None) -> str:
    """GPTQ packs inputs, so that its columns are the outputs, as the scales' are; AWQ packs outputs."""
    if scale is None or len(scale.shape) != 2 or len(weight.shape) != 2:
        return "gptq"
    return "gptq" if weight.shape[1] == scale.shape[1] else "awq"


def _fp8_kind(weight: Tensor, scales: Mapping[str, Tensor]) -> str:
    for own, kind in (("scale_weight", "comfy-fp8"), ("qscale_weight", "mistral-fp8")):
        if own in scales:
            return kind
    leaf = next((leaf for leaf in GRIDS if leaf in scales), None)
    if leaf is None:
        return "bare"
    scale, plain = scales[leaf], leaf == "weight_scale"
    shape, grid = weight.shape, scale.shape
    if scale.dtype in EXPONENTS and (plain or leaf == "scale") and _by_group_of_32(shape, grid, plain):
        return "mxfp8"
    if plain and len(grid) == 4 and len(shape) == 2:
        return "fp8-pbwo"
    if ones(grid):
        return "fp8-tensor" if plain or len(grid) < 2 or max(shape, default=0) > 128 else "fp8-block"
    if grid in (shape[:-1], (*shape[:-1], 1)) and (plain or shape[-1] > 128):
        return "fp8-channel"
    if plain and len(grid) == 1 and len(shape) == 2 and grid[0] <= PARTS_MAX:
        return "fp8-parts"
    return "fp8-grid" if plain else "fp8-block"


def _by_group_of_32(shape: Shape, grid: Shape, plain: bool) -> bool:
    """Powers of two beside E4M3 are MXFP8's, but where they are a grid of blocks that are more than a row high."""
    if grid == (*shape[:-1], -(-shape[-1] // 32)) if shape else False:
        return True
    return plain and not (len(shape) == len(grid) == 2 and 1 < grid[0] < shape[0] and is_grid(shape, grid))


def also(linear: Linear) -> frozenset[str]:
    """The kinds that a module's tensors may be read as: one scale is a tensor's, a row's or a grid of one block."""
    grid = linear.grid
    kinds = {linear.kind}
    if grid is not None and linear.kind in ("fp8-tensor", "fp8-channel", "fp8-grid", "fp8-block"):
        shape = linear.shape
        if ones(grid.shape):
            kinds |= {"fp8-tensor"}
            if max(shape, default=0) <= 128 and "weight_scale" in linear.scales:
                kinds |= {"fp8-pbwo"}  # ModelOpt drops the axes of a grid of one block
        if grid.shape == (*shape[:-1], 1) and shape[-1] <= 128:
            kinds |= {"fp8-channel"}
    return frozenset(kinds)


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
        form = FORMS.get(linear.kind)
        if linear.grid is None or (form is not None and any(n not in linear.scales for n in form.needs[1:])):
            yield _bare(linear, form)
        yield from _dtype_faults(linear, form)
        yield from _grid_faults(linear, form)
        if linear.kind in ("gptq", "awq"):
            yield from gptq.extra_faults(linear)
        if linear.kind in bitsandbytes.TABLES:
            yield from bitsandbytes.extra_faults(linear)


def _bare(linear: Linear, form: Form | None) -> Finding:
    assert linear.weight is not None
    wanted = " and ".join(form.needs) if form is not None else "weight_scale_inv or weight_scale"
    joined = f"{linear.module}{wanted}" if wanted.startswith("_") else f"{linear.module}.{wanted}"
    got = ", ".join(sorted(linear.scales)) or "no scale"
    return Finding("bare-codes", linear.weight.file, linear.weight.name, joined, got)


def _dtype_faults(linear: Linear, form: Form | None) -> Iterator[Finding]:
    grid = linear.grid
    for leaf, scale in linear.scales.items():
        allowed = form.scale_dtypes if form is not None and scale is grid else SCALE_DTYPES[leaf]
        if scale.dtype not in allowed:
            yield Finding("scale-dtype", scale.file, scale.name, " or ".join(allowed), scale.dtype)


def _grid_faults(linear: Linear, form: Form | None) -> Iterator[Finding]:
    grid = linear.grid
    for scale in linear.scales.values():
        if form is not None and scale is grid:
            expected = form.grid(linear, scale)
        elif linear.kind in bitsandbytes.TABLES:
            expected = ""  # its own faults
        else:
            leading = linear.shape[:-2]  # banks of experts have one each, or one each of gate and up
            fits = ones(scale.shape) or scale.shape in (leading, (*leading, 1), (*leading, 2))
            expected = "" if fits else "one number"
        if expected:
            said = f"{expected} for {linear.weight}"
            yield Finding("scale-grid", scale.file, scale.name, said, str(list(scale.shape)))
