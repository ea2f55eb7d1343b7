"""GPTQ and AWQ: integers packed into words of 32 bits, stored [inputs, outputs], with zeros and scales by group.

| kind | `qweight` I32 | `qzeros` I32 | `scales` | `g_idx` |
|---|---|---|---|---|
| gptq | [C * bits / 32, R], inputs packed | [groups, R * bits / 32] | F16 [groups, R] | I32 [C]: groups |
| awq | [C, R * bits / 32], outputs packed | [groups, R * bits / 32] | F16 [groups, R] | none |

A scale may be negative (AutoRound writes such), never zero. GPTQ of the old layout stores the zero less one.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardmill.verify.formats.linear import FLOATS, Form, Linear, Shape, bits_of
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding


def _scales(linear: Linear, scale: Tensor) -> str:
    shape = linear.shape
    fits = (
        len(shape) == len(scale.shape) == 2 and scale.shape[1] == shape[1] and 0 < scale.shape[0] <= shape[0]
    )
    return "" if fits else f"[groups, {shape[-1] if shape else '?'}]"


def extra_faults(linear: Linear) -> Iterator[Finding]:
    """`qzeros` and `g_idx` of other shapes than the codes and scales ask for."""
    scale, weight = linear.scales.get("scales"), linear.weight
    if scale is None or weight is None or len(scale.shape) != 2 or len(weight.shape) != 2:
        return
    groups, columns = scale.shape
    wanted: dict[str, Shape] = {"qzeros": (groups, columns * bits_of(linear) // 32)}
    if linear.kind == "gptq":
        wanted["g_idx"] = (linear.shape[0],)
    for leaf, shape in wanted.items():
        tensor = linear.extras.get(leaf)
        if tensor is not None and tensor.shape != shape:
            yield Finding(
                "scale-grid", tensor.file, tensor.name, f"{list(shape)} for {weight}", str(list(tensor.shape))
            )
    if "qzeros" not in linear.extras:
        got = ", ".join(sorted({*linear.scales, *linear.extras}))
        yield Finding("bare-codes", weight.file, weight.name, f"{linear.module}.qzeros", got)


FORMS = (
    Form("gptq", "GPTQ", "GPTQModel, AutoGPTQ, AutoRound, llm-compressor",
         "`qweight` I32 [C * bits / 32, R]; `qzeros` I32; `scales` F16 [groups, R]; `g_idx` I32 [C]",
         ("scales",), FLOATS, _scales, None, 0.5),
    Form("awq", "AWQ", "AutoAWQ, AutoRound",
         "`qweight` I32 [C, R * bits / 32]; `qzeros` I32; `scales` F16 [groups, R]",
         ("scales",), FLOATS, _scales, None, 0.5),
)  # fmt: skip
