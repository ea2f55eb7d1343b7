"""What the bytes of codes and scales may be, looked at strip by strip.

E4M3 codes: no NaN (0x7F, 0xFF). E5M2 codes: neither NaN nor infinity. Scales in a float dtype: finite and above zero.
E4M3 block scales: no NaN and no sign; zero is legal there (a zero block). E8M0 scales: no NaN (0xFF). GPTQ and
AWQ scales: finite and not zero. Floats that are no codes: neither NaN nor infinity; masks may be infinite.
Each row of the table has a quick test that runs at memory speed; only strips that fail it are looked at closely.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.formats.forms.kv_cache import cache_scales
from shardmill.verify.formats.linear import SCALE_DTYPES, Linear
from shardmill.verify.formats.schemes import CODE_DTYPES
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

Elements = NDArray[Any]
Test = tuple[
    str, str, Callable[[Elements], NDArray[np.bool_]]
]  # slug, what is expected, which elements are bad


class ValueRule(NamedTuple):
    """What the elements of a tensor must be."""

    dtype: np.dtype[Any]
    suspicious: Callable[[Elements], bool]
    tests: tuple[Test, ...]

    def holds(self, data: NDArray[np.uint8]) -> bool:
        """Whether these bytes are whole elements that lie in place, none of them suspicious."""
        elements = self.elements(data)
        return elements is not None and not self.suspicious(elements)

    def elements(self, data: NDArray[np.uint8]) -> Elements | None:
        """The elements in these bytes; None where they are not whole or do not lie in place."""
        if self.dtype.itemsize == 1:
            return data
        if len(data) % self.dtype.itemsize:
            return None
        elements = data.view(self.dtype)
        return elements if elements.flags.aligned else None


def _between(bits: Elements, low: int, high: int) -> bool:
    """Whether all lie between `low` and `high`, both left out. Most scales of a checkpoint are one number."""
    if len(bits) == 1:
        return bool(low < bits.item() < high)
    return bool(bits.min() > low and bits.max() < high)


def _float_scales(dtype: str, infinity: int, magnitude: int) -> ValueRule:
    def finite(bits: Elements) -> NDArray[np.bool_]:
        return (bits & magnitude) < infinity

    return ValueRule(
        np.dtype(dtype),
        lambda bits: not _between(bits, 0, infinity),
        (
            ("scale-not-finite", "a finite scale", lambda bits: ~finite(bits)),
            ("scale-not-positive", "a scale above zero", lambda bits: (bits <= 0) & finite(bits)),
        ),
    )


def _nan_e4m3(codes: Elements) -> NDArray[np.bool_]:
    return np.asarray((codes & 0x7F) == 0x7F)


CODE_LAWS: Mapping[str, ValueRule] = {
    "F8_E4M3": ValueRule(
        np.dtype(np.uint8),
        lambda codes: bool(codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F),
        (("nan-code", "finite codes", _nan_e4m3),),
    ),
    "F8_E5M2": ValueRule(
        np.dtype(np.uint8),
        lambda codes: bool(codes.max() >= 0xFC or codes.view(np.int8).max() >= 0x7C),
        (("nan-code", "finite codes", lambda codes: (codes & 0x7F) >= 0x7C),),
    ),
}
_E8M0 = ValueRule(
    np.dtype(np.uint8),
    lambda scales: bool(scales.max() == 0xFF),
    (("scale-not-finite", "a finite scale", lambda scales: scales == 0xFF),),
)
SCALE_LAWS: Mapping[str, ValueRule] = {
    "F32": _float_scales("<i4", 0x7F800000, 0x7FFFFFFF),
    "BF16": _float_scales("<i2", 0x7F80, 0x7FFF),
    "F16": _float_scales("<i2", 0x7C00, 0x7FFF),
    "F8_E4M3": ValueRule(
        np.dtype(np.uint8),
        lambda scales: bool(scales.max() >= 0x7F),
        (
            ("block-scale-nan", "a block scale of at most 448", _nan_e4m3),
            ("block-scale-negative", "a block scale without sign", lambda s: (s > 0x80) & ~_nan_e4m3(s)),
        ),
    ),
    "F8_E8M0": _E8M0,
    "U8": _E8M0,
}


def _signed_scales(dtype: str, infinity: int, magnitude: int) -> ValueRule:
    """Of GPTQ and AWQ: AutoRound writes negative ones."""
    return ValueRule(
        np.dtype(dtype),
        lambda bits: bool((bits & magnitude).max() >= infinity or not bits.all()),
        (
            ("scale-not-finite", "a finite scale", lambda bits: (bits & magnitude) >= infinity),
            ("scale-not-positive", "a scale that is not zero", lambda bits: (bits & magnitude) == 0),
        ),
    )


def _unsigned_scales(dtype: str, infinity: int) -> ValueRule:
    """Of bitsandbytes: a block of zeros has the absmax 0."""
    return ValueRule(
        np.dtype(dtype),
        lambda bits: bool(bits.min() < 0 or bits.max() >= infinity),
        (
            ("scale-not-finite", "a finite scale", lambda bits: (bits & 0x7FFFFFFF) >= infinity),
            (
                "scale-not-positive",
                "a scale of zero or above",
                lambda bits: (bits < 0) & ((bits & 0x7FFFFFFF) < infinity),
            ),
        ),
    )


ABSMAX_LAW = _unsigned_scales("<i4", 0x7F800000)
_ABSMAX = ("absmax", "nested_absmax")


def _floats(dtype: str, infinity: int) -> ValueRule:
    """Of tensors that are neither codes nor scales. `infinity`: its bits."""
    sign = 1 << (8 * np.dtype(dtype).itemsize - 1)
    signed = np.dtype(dtype.replace("u", "i"))
    return ValueRule(
        np.dtype(dtype),
        lambda bits: bool(bits.max() >= sign | infinity or bits.view(signed).max() >= infinity),
        (
            ("nan-value", "finite weights", lambda bits: (bits & (sign - 1)) > infinity),
            ("infinite-value", "finite weights", lambda bits: (bits & (sign - 1)) == infinity),
        ),
    )


FLOAT_LAWS: Mapping[str, ValueRule] = {
    "BF16": _floats("<u2", 0x7F80),
    "F16": _floats("<u2", 0x7C00),
    "F32": _floats("<u4", 0x7F800000),
    "F64": _floats("<u8", 0x7FF0000000000000),
}
SIGNED_SCALE_LAWS: Mapping[str, ValueRule] = {
    "F32": _signed_scales("<i4", 0x7F800000, 0x7FFFFFFF),
    "BF16": _signed_scales("<i2", 0x7F80, 0x7FFF),
    "F16": _signed_scales("<i2", 0x7C00, 0x7FFF),
}


def float_rules(tensors: Mapping[str, Tensor], known: Container[str]) -> dict[str, ValueRule]:
    """Tensor name -> the law of its elements, for float tensors that no module's law covers."""
    return {
        name: FLOAT_LAWS[tensor.dtype]
        for name, tensor in tensors.items()
        if tensor.dtype in FLOAT_LAWS and name not in known and "mask" not in name
    }


def law_of_scale(kind: str, leaf: str, scale: Tensor) -> ValueRule | None:
    """The law of a scale's elements; None for a dtype that no scale of this name has."""
    if scale.dtype not in SCALE_DTYPES[leaf]:
        return None
    if leaf in _ABSMAX:
        return ABSMAX_LAW if scale.dtype == "F32" else None  # a byte is a code of it, and each is one
    signed = SIGNED_SCALE_LAWS.get(scale.dtype) if kind in ("gptq", "awq") and leaf == "scales" else None
    return signed or SCALE_LAWS[scale.dtype]


def value_rules(linears: Mapping[str, Linear], tensors: Mapping[str, Tensor] = {}) -> dict[str, ValueRule]:
    """Tensor name -> the law of its elements, for the codes and scales of these modules and for scales of the cache."""
    laws: dict[str, ValueRule] = {}
    for linear in linears.values():
        if (
            linear.weight is not None
            and linear.weight.dtype in CODE_DTYPES
            and linear.weight.dtype in CODE_LAWS
        ):
            laws[linear.weight.name] = CODE_LAWS[linear.weight.dtype]
        for leaf, scale in linear.scales.items():
            law = law_of_scale(linear.kind, leaf, scale)
            if law is not None:
                laws[scale.name] = law
    for name, scale in cache_scales(tensors).items():
        laws[name] = SCALE_LAWS[scale.dtype]
    return laws


@dataclass(slots=True)
class ElementCheck:
    """One tensor's elements against their law, fed in the order of its bytes."""

    tensor: Tensor
    law: ValueRule
    _rest: bytes = b""
    _seen: int = 0
    _first: dict[str, int] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def feed(self, strip: NDArray[np.uint8]) -> Elements:
        """Looks at the elements that are whole with this strip, and gives them back."""
        elements = self._elements(strip)
        if len(elements) and self.law.suspicious(elements):
            for slug, _, bad in self.law.tests:
                places = np.flatnonzero(bad(elements))
                if len(places):
                    self._first.setdefault(slug, self._seen + int(places[0]))
                    self._count[slug] = self._count.get(slug, 0) + len(places)
        self._seen += len(elements)
        return elements

    def _elements(self, strip: NDArray[np.uint8]) -> Elements:
        elements = self.law.elements(strip) if not self._rest else None
        if elements is not None:
            return elements
        data = self._rest + strip.tobytes()  # strips end anywhere, elements don't
        whole = len(data) - len(data) % self.law.dtype.itemsize
        self._rest = data[whole:]
        return np.frombuffer(data[:whole], self.law.dtype)

    def findings(self) -> list[Finding]:
        return [
            Finding(slug, self.tensor.file, self.tensor.name, expected, self._where(slug))
            for slug, expected, _ in self.law.tests
            if slug in self._first
        ]

    def _where(self, slug: str) -> str:
        count, place = self._count[slug], place_of(self._first[slug], self.tensor.shape)
        return f"{count:,} of {self._seen:,}, the first at {place}" if self._seen > 1 else "its one element"


def place_of(element: int, shape: tuple[int, ...]) -> str:
    """The indices of the n-th element: `row 3, column 17` of a matrix."""
    indices: list[int] = []
    for dim in reversed(shape):
        element, index = divmod(element, max(dim, 1))
        indices.insert(0, index)
    if len(indices) == 2:
        return f"row {indices[0]}, column {indices[1]}"
    return f"element {indices}"
