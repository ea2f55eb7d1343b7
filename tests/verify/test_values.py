"""Which codes and scales are allowed: every byte of the one-byte formats, edges of the others, any cut of strips."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from shardmill.verify.formats.values import CODE_LAWS, SCALE_LAWS, ElementCheck, ValueRule, place_of
from shardmill.verify.reading.header import Tensor

BYTES = range(256)
CASES = [
    ("E4M3 codes", CODE_LAWS["F8_E4M3"], {0x7F: "nan-code", 0xFF: "nan-code"}),
    ("E5M2 codes", CODE_LAWS["F8_E5M2"], {b: "nan-code" for b in BYTES if b & 0x7F >= 0x7C}),
    ("E8M0 scales", SCALE_LAWS["F8_E8M0"], {0xFF: "scale-not-finite"}),
    (
        "E4M3 scales",
        SCALE_LAWS["F8_E4M3"],
        {0x7F: "block-scale-nan", 0xFF: "block-scale-nan"}
        | dict.fromkeys(range(129, 255), "block-scale-negative"),
    ),
]


def _found(law: ValueRule, dtype: str, data: bytes, cut: int = 1 << 20) -> list[tuple[str, str]]:
    count = len(data) // law.dtype.itemsize
    look = ElementCheck(Tensor("t", dtype, (count,), "f", 0, len(data)), law)
    for begin in range(0, len(data), cut):
        look.feed(np.frombuffer(data[begin : begin + cut], np.uint8))
    return [(finding.slug, finding.got) for finding in look.findings()]


@pytest.mark.parametrize(("law", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_byte_is_allowed_or_has_its_rule(law: ValueRule, bad: dict[int, str]) -> None:
    for byte in BYTES:
        slugs = [slug for slug, _ in _found(law, "U8", bytes([0x11, byte, 0x11]))]
        assert slugs == ([bad[byte]] if byte in bad else []), hex(byte)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_float_scales_are_finite_and_above_zero(dtype: str) -> None:
    width = 4 if dtype == "F32" else 2
    infinity = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[dtype]
    sign = 1 << (8 * width - 1)
    verdicts = {
        1: None,
        infinity - 1: None,
        infinity: "scale-not-finite",
        infinity + 1: "scale-not-finite",
        sign | infinity: "scale-not-finite",
        0: "scale-not-positive",
        sign: "scale-not-positive",
        sign | 1: "scale-not-positive",
        sign | (infinity - 1): "scale-not-positive",
    }
    for bits, slug in verdicts.items():
        data = b"".join(value.to_bytes(width, "little") for value in (5, bits, 5))
        assert [found for found, _ in _found(SCALE_LAWS[dtype], dtype, data)] == ([slug] if slug else []), (
            hex(bits)
        )


@pytest.mark.parametrize("cut", [1, 3, 5, 7, 4096])
def test_strips_may_be_cut_within_an_element(cut: int) -> None:
    values = [1.0] * 20 + [0.0] + [1.0] * 20 + [float("nan"), 0.0]
    found = _found(SCALE_LAWS["F32"], "F32", struct.pack(f"<{len(values)}f", *values), cut)
    assert found == [
        ("scale-not-finite", "1 of 43, the first at element [41]"),
        ("scale-not-positive", "2 of 43, the first at element [20]"),
    ]


@pytest.mark.parametrize(
    ("element", "shape", "said"),
    [
        (7, (3, 4), "row 1, column 3"),
        (7, (8,), "element [7]"),
        (23, (2, 3, 4), "element [1, 2, 3]"),
        (0, (), "element []"),
    ],
)
def test_a_place_is_said_in_the_tensors_own_axes(element: int, shape: tuple[int, ...], said: str) -> None:
    assert place_of(element, shape) == said
