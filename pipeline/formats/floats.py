"""Plain floats as a format: what every quantized source can become, and every target starts from.

Values are rounded once, to nearest even; a value that passes the dtype's largest number is refused.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardmill.kernels.block_fp8 import NonFinite
from shardmill.kernels.formats import F32, f32_to_bf16
from shardmill.kernels.group_codes import first_non_finite, widened
from shardmill.pipeline.formats.base import Arrays, Format, Params, Part, Setting, Shape, Spelling, always_fit

_BF16_EXPONENT: Final = np.uint16(0x7F80)


def _parts(shape: Shape, params: Params) -> tuple[Part, ...]:
    return (Part("values", "BF16", shape),)


def _encode(strip: NDArray[Any], setting: Setting) -> dict[str, NDArray[Any]]:
    values = f32_to_bf16(widened(strip))
    if ((values & _BF16_EXPONENT) == _BF16_EXPONENT).any():
        raise _beyond(strip, values)
    return {"values": values}


def _beyond(strip: NDArray[Any], values: NDArray[np.uint16]) -> NonFinite:
    if not np.isfinite(widened(strip)).all():
        return first_non_finite(strip)
    row, col = np.argwhere((values & _BF16_EXPONENT) == _BF16_EXPONENT)[0]
    return NonFinite(int(row), int(col), float(widened(strip)[row, col]))


def _decode(arrays: Arrays, setting: Setting) -> F32:
    return widened(arrays["values"])


_ANY: Final = (
    "fp8",
    "compressed-tensors",
    "modelopt",
    "modelopt-mixed",
    "awq",
    "gptq",
    "deepseek-v4",
    "gpt-oss",
)

FORMAT: Final = Format(
    name="bf16",
    title="BF16",
    laws={"bf16/1": "rounded once to nearest even"},
    spellings=tuple(Spelling(profile, {"values": ".weight"}) for profile in _ANY),
    parts=_parts,
    unfit=always_fit,
    unit=lambda shape, params: (1, 1),
    encode=_encode,
    decode=_decode,
)
