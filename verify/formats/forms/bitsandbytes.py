"""bitsandbytes' four bits: NF4 and FP4, one absmax for each 64 elements or another power of two, in the order of rows.

| tensor | dtype | what |
|---|---|---|
| `weight` | U8 [elements / 2, 1] | two codes a byte, the first in the high nibble |
| `weight.absmax` | F32 [blocks], or U8 | the block's largest magnitude, or a code of it |
| `weight.quant_map` | F32 [16] | what each code stands for |
| `weight.nested_absmax`, `weight.nested_quant_map` | F32 [ceil(blocks / 256)], F32 [256] | beside an absmax of U8 |
| `weight.quant_state.bitsandbytes__nf4` or `__fp4` | U8 | JSON: shape, block sizes, the offset of absmax |
"""

from __future__ import annotations

from collections.abc import Iterator

from shardmill.verify.formats.linear import Form, Linear, Shape
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = 256  # blocks under one nested_absmax

# bitsandbytes 0.50 `get_4bit_type`: quantiles of a normal distribution; signs, exponents and mantissas, over 12
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * value / 12.0 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"nf4": NF4, "bnb-fp4": FP4}


def _absmax(linear: Linear, scale: Tensor) -> str:
    assert linear.weight is not None
    elements = 2 * linear.weight.bytes
    fits = len(scale.shape) == 1 and scale.shape[0] in {-(-elements // block) for block in BLOCKS}
    return "" if fits else "one number for each 32, 64, 128 ... 4,096 elements"


def extra_faults(linear: Linear) -> Iterator[Finding]:
    """Tables and states that are missing, or of other shapes than absmax asks for."""
    absmax, weight = linear.scales.get("absmax"), linear.weight
    if absmax is None or weight is None or len(absmax.shape) != 1:
        return
    parts = {**linear.scales, **linear.extras}
    wanted: dict[str, Shape] = {"quant_map": (16,)}
    if absmax.dtype == "U8":
        wanted |= {"nested_quant_map": (256,), "nested_absmax": (-(-absmax.shape[0] // NESTED),)}
    for leaf, shape in wanted.items():
        tensor = parts.get(leaf)
        if tensor is None:
            got = ", ".join(sorted(parts))
            yield Finding("bare-codes", weight.file, weight.name, f"{weight.name}.{leaf}", got)
        elif tensor.shape != shape:
            yield Finding(
                "scale-grid", tensor.file, tensor.name, f"{list(shape)} for {weight}", str(list(tensor.shape))
            )
    if not {"quant_state_nf4", "quant_state_fp4"} & parts.keys():
        expected = f"{weight.name}.quant_state.bitsandbytes__nf4"
        yield Finding("bare-codes", weight.file, weight.name, expected, ", ".join(sorted(parts)))


_PARTS = "`weight` U8 [elements / 2, 1]; `weight.absmax` F32 or U8 [blocks]; `weight.quant_map`, `weight.quant_state.*`"
FORMS = (
    Form("nf4", "NF4 of bitsandbytes", "bitsandbytes, transformers, Unsloth", _PARTS,
         ("absmax",), ("F32", "U8"), _absmax, None, 0.16),
    Form("bnb-fp4", "FP4 of bitsandbytes", "bitsandbytes, transformers", _PARTS,
         ("absmax",), ("F32", "U8"), _absmax, None, 0.2),
)  # fmt: skip
